"""Print the table of core/mcore/versions.py for unpacked wheels of megatron-core.

python tools/recompute_sources.py WHEEL_FOLDER ...
"""

import argparse
from pathlib import Path

import mambaslots.mcore  # noqa: F401 - fills REGISTRY
from mambaslots.mcore.overrides import REGISTRY
from mambaslots.mcore.versions import hashes_in


def sources(roots: list[Path]) -> dict[str, tuple[str, ...]]:
    """Overridden method -> the hashes of its sources in these folders."""
    table: dict[str, dict[str, None]] = {}
    for root in roots:
        found = {owner: hashes_in(root, owner) for owner in {entry.owner for entry in REGISTRY}}
        for entry in REGISTRY:
            if (digest := found[entry.owner].get(entry.method)) is not None:
                table.setdefault(entry.name, {})[digest] = None
    return {name: tuple(table[name]) for name in sorted(table)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="WHEEL_FOLDER", help="an unpacked wheel")
    for method, hashes in sources(parser.parse_args().folders).items():
        print(f'    "{method}": {hashes!r},'.replace("'", '"'))
