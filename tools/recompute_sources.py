"""Print the table of core/mcore/versions.py for unpacked wheels or checkouts of megatron-core.

python tools/recompute_sources.py FOLDER ...
"""

import argparse
import ast
from pathlib import Path

import mambaslots.mcore  # noqa: F401 - fills REGISTRY
from mambaslots.mcore.overrides import REGISTRY, Override, overrides_for
from mambaslots.mcore.versions import KV_ALLOCATOR, hash_of, series_of


def hashes_of_tree(root: Path) -> tuple[list[Override], dict[str, str]]:
    """What is replaced in the megatron-core in the folder `root`, and override -> hash of what is there."""
    by_owner = {owner: hashes_in(root, owner) for owner in {entry.owner for entry in REGISTRY}}
    overrides = overrides_for(series_of(by_owner[KV_ALLOCATOR]))
    found = [entry for entry in overrides if entry.method in by_owner[entry.owner]]
    return overrides, {entry.name: by_owner[entry.owner][entry.method] for entry in found}


def hashes_in(root: Path, owner: str) -> dict[str, str]:
    """Method -> hash, for the class `owner` ("module:Class") in the folder `root`; {} without it."""
    module, _, name = owner.partition(":")
    path = root.joinpath(*module.split(".")).with_suffix(".py")
    return {
        part.name: hash_of(part)
        for node in (ast.parse(path.read_text()).body if path.is_file() else ())
        if isinstance(node, ast.ClassDef) and node.name == name
        for part in node.body
        if isinstance(part, ast.FunctionDef)
    }


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
