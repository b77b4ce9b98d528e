"""Fuzz targets that are bytes: of peers, of memory and files behind the device, and of the network."""

from collections.abc import Callable
from pathlib import Path

from fuzzing.events import Events
from fuzzing.http import Http
from fuzzing.messages import Answers, Clients, FleetRequests, Sessions
from fuzzing.prefixes import ImportedBytes, LoadedFolders, Tiers
from fuzzing.target import Target

MAKERS: dict[str, Callable[[Path], Target]] = {
    "imported prefixes": lambda folder: ImportedBytes(),
    "prefix folders": LoadedFolders,
    "host memory rows": lambda folder: Tiers(folder, "rows"),
    "state files": lambda folder: Tiers(folder, "files"),
    "events of replicas": lambda folder: Events(),
    "prefill questions": lambda folder: Sessions(),
    "prefill answers": lambda folder: Clients(),
    "lockstep connections": lambda folder: Answers(),
    "fleet requests": lambda folder: FleetRequests(),
    "HTTP": lambda folder: Http(has_keys=False),
    "HTTP with keys": lambda folder: Http(has_keys=True),
}
"""By their names; each gets a folder that it may write to."""
WEIGHTS: dict[str, float] = {
    "host memory rows": 0.3,
    "state files": 0.3,
    "HTTP": 0.5,
    "HTTP with keys": 0.5,
    "fleet requests": 0.5,
}
"""Shares of the inputs of some targets; 1 for the others."""
REMEMBERING = {"host memory rows", "state files", "HTTP", "HTTP with keys"}
"""Targets with one engine for all inputs, which is not set back behind each."""


def targets(folder: Path) -> list[Target]:
    """All of them. `folder`: what targets may write to."""
    return [make(folder) for make in MAKERS.values()]
