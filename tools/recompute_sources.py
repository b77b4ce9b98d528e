"""Print the table of core/mcore/versions.py for unpacked wheels or checkouts of megatron-core.

python tools/recompute_sources.py FOLDER ...
"""

import argparse
from pathlib import Path

import mambaslots.mcore.installation  # noqa: F401 - fills REGISTRY
from mambaslots.mcore.overrides import hashes_of_tree


def sources(roots: list[Path]) -> dict[str, tuple[str, ...]]:
    """Overridden method -> the hashes of its sources in these folders."""
    table: dict[str, dict[str, None]] = {}
    for root in roots:
        overrides, hashes = hashes_of_tree(root)
        for entry in overrides:
            if entry.name in hashes:
                table.setdefault(entry.name, {})[hashes[entry.name]] = None
    return {name: tuple(table[name]) for name in sorted(table)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="FOLDER", help="an unpacked wheel, or a checkout"
    )
    for method, hashes in sources(parser.parse_args().folders).items():
        print(f'    "{method}": {hashes!r},'.replace("'", '"'))
