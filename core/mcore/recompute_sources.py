"""The table of `known_sources`, anew: `python -m mambaslots.mcore.recompute_sources WHEEL_FOLDER ...`."""

import sys
from collections.abc import Iterable
from pathlib import Path

from . import REGISTRY
from .known_sources import hashes_of_class


def recompute(trees: Iterable[tuple[str, Path]]) -> dict[str, dict[str, tuple[str, ...]]]:
    """The table of known sources for unpacked wheels, given as (version, root)."""
    table: dict[str, dict[str, tuple[str, ...]]] = {}
    for version, root in trees:
        found = {owner: hashes_of_class(root, owner) for owner in {entry.owner for entry in REGISTRY}}
        for entry in REGISTRY:
            if (digest := found[entry.owner].get(entry.method)) is not None:
                hashes = table.setdefault(entry.name, {})
                hashes[digest] = (*hashes.get(digest, ()), version)
    return dict(sorted(table.items()))


def version_of_tree(root: Path) -> str:
    """The version of an unpacked wheel, from its dist-info."""
    (info,) = root.glob("megatron_core-*.dist-info")
    return info.name.removeprefix("megatron_core-").removesuffix(".dist-info")


def main(arguments: list[str]) -> None:
    roots = [Path(argument) for argument in arguments]
    for method, hashes in recompute((version_of_tree(root), root) for root in roots).items():
        print(f'    "{method}": {{')
        for digest, versions in hashes.items():
            print(f'        "{digest}": {versions!r},'.replace("'", '"'))
        print("    },")


if __name__ == "__main__":
    main(sys.argv[1:])
