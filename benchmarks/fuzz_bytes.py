"""Fuzz targets that are bytes: of peers, of memory and files behind the device, and of the network."""

from collections.abc import Callable
from pathlib import Path

import fuzz_hand_overs
import fuzz_http
import fuzz_tiers
from fuzz_events import Channel, Events
from fuzz_prefixes import ImportedBytes, LoadedFolders
from fuzz_target import Target

WEIGHTS: dict[str, float] = {}
"""Shares of the inputs of some targets; 1 for the others."""


def targets(folder: Path) -> list[Target]:
    """All of them. `folder`: what targets may write to."""
    makers: list[Callable[[], Target]] = [
        ImportedBytes,
        lambda: LoadedFolders(folder),
        *fuzz_hand_overs.targets(),
        *fuzz_tiers.targets(folder),
        Events,
        Channel,
        *fuzz_http.targets(),
    ]
    return [make() for make in makers]


if __name__ == "__main__":
    print(__doc__)
