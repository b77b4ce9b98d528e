"""The kinds of rounds of a soak, and one round of a kind.

A kind is a module with `run_round(seed, seconds, device) -> RoundTally`. Its `REQUIRED_EVENTS`, if it has
any, names for each device what must happen at least once in a soak of some minutes.
"""

import sys
import traceback
from importlib import import_module
from pathlib import Path
from types import ModuleType

from soaking.tally import RoundTally

sys.path.append(str(Path(__file__).parents[2] / "tests"))  # rounds take their oracles from there

KINDS = ("engine", "server", "replicas")
ON_DEVICE = {"cpu": KINDS, "cuda": ("engine",)}
"""The kinds that a device has."""
ROUND_S = {"cpu": 6.0, "cuda": 25.0}
"""Seconds of traffic of a round: on a GPU, an engine takes long to capture its graphs."""


def module_of(kind: str) -> ModuleType:
    return import_module(f"soaking.{kind}")


def required_events(kind: str, device: str) -> tuple[str, ...]:
    required: dict[str, tuple[str, ...]] = getattr(module_of(kind), "REQUIRED_EVENTS", {})
    return required.get(device, ())


def run_round(kind: str, seed: int, seconds: float, device: str) -> RoundTally:
    """One round. What it raises is a mismatch, and its traceback goes to stderr."""
    try:
        tally: RoundTally = module_of(kind).run_round(seed, seconds, device)
    except Exception as error:
        traceback.print_exc()
        return RoundTally(mismatches=[f"{kind} round, seed {seed}: {type(error).__name__}: {error}"])
    return tally
