"""The kinds of rounds of a soak, what a round counts, and the memory of the process between rounds."""

import ctypes
import gc
import os
import sys
import traceback
from collections import Counter
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from statistics import median
from types import ModuleType

import torch

sys.path.append(str(Path(__file__).parents[2] / "tests"))  # rounds take their oracles from there
from oracle import toy_answers


@dataclass
class RoundTally:
    """What came of a round, or of several."""

    requests: int = 0
    comparisons: int = 0
    tokens_compared: int = 0
    resumed_tokens: int = 0
    hits: int = 0
    events: Counter[str] = field(default_factory=Counter)
    mismatches: list[str] = field(default_factory=list)

    def add(self, other: "RoundTally") -> None:
        """Count what another round did, too."""
        self.requests += other.requests
        self.comparisons += other.comparisons
        self.tokens_compared += other.tokens_compared
        self.resumed_tokens += other.resumed_tokens
        self.hits += other.hits
        self.events.update(other.events)
        self.mismatches += other.mismatches


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
    finally:  # thousands of expected answers fill megabytes, and no other round asks for them
        toy_answers.answer.cache_clear()
        toy_answers.prompt_log_probs.cache_clear()
    return tally


MIB = 1 << 20
READINGS = 5
"""Readings at either end whose medians are compared; fewer of a short soak."""
FEWEST = 4


M_ARENA_MAX = -8  # glibc's malloc.h


class MemoryWatch:
    """Reads memory between rounds.

    glibc gives threads up to eight arenas a core, and each keeps free memory between objects that stay: with
    sixteen, a process grew by 1.4 to 1.8 % in an hour in which what it holds did not. Here it gets two.
    """

    def __init__(self, device: str) -> None:
        self.resident: list[int] = []
        self.on_device: list[int] = []
        self._on_gpu = device == "cuda"
        self._libc = ctypes.CDLL(None)
        self._libc.mallopt(M_ARENA_MAX, 2)

    def read(self) -> None:
        """Free what is not used, and note what is left."""
        gc.collect()
        if self._on_gpu:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        self._libc.malloc_trim(0)
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
        self.resident.append(pages * os.sysconf("SC_PAGE_SIZE"))
        self.on_device.append(torch.cuda.memory_allocated() if self._on_gpu else 0)

    @property
    def is_enough(self) -> bool:
        """Whether there are readings at either end."""
        return len(self.resident) >= FEWEST


def ends(readings: list[int]) -> tuple[float, float]:
    """The medians of the first and of the last readings, in MiB; (0, 0) for none."""
    if not readings:
        return 0.0, 0.0
    count = max(1, min(READINGS, len(readings) // 2))
    return median(readings[:count]) / MIB, median(readings[-count:]) / MIB
