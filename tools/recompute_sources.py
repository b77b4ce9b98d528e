"""Print the table of core/mcore/versions.py for unpacked wheels of megatron-core.

python tools/recompute_sources.py WHEEL_FOLDER ...
"""

import argparse
import ast
from pathlib import Path

import mambaslots.mcore  # noqa: F401 - fills REGISTRY
from mambaslots.mcore.overrides import REGISTRY
from mambaslots.mcore.versions import hash_of


def sources(roots: list[Path]) -> dict[str, tuple[str, ...]]:
    """Overridden method -> the hashes of its sources in these folders."""
    table: dict[str, dict[str, None]] = {}
    for root in roots:
        found = {owner: _hashes_of_class(root, owner) for owner in {entry.owner for entry in REGISTRY}}
        for entry in REGISTRY:
            if (digest := found[entry.owner].get(entry.method)) is not None:
                table.setdefault(entry.name, {})[digest] = None
    return {name: tuple(table[name]) for name in sorted(table)}


def _hashes_of_class(root: Path, owner: str) -> dict[str, str]:
    """Method -> hash, for the class `owner` ("module:Class") in an unpacked wheel."""
    module, _, name = owner.partition(":")
    tree = ast.parse(root.joinpath(*module.split(".")).with_suffix(".py").read_text())
    return {
        part.name: hash_of(part)
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == name
        for part in node.body
        if isinstance(part, ast.FunctionDef)
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="WHEEL_FOLDER", help="an unpacked wheel")
    for method, hashes in sources(parser.parse_args().folders).items():
        print(f'    "{method}": {hashes!r},'.replace("'", '"'))
