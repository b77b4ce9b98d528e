"""The memory of a process at rest: what it has between the rounds of a soak, and whether that grows."""

import ctypes
import gc
import os
from statistics import median

import torch

MIB = 1 << 20
READINGS = 5
"""Readings at either end whose medians are compared; fewer of a short soak."""
FEWEST = 4


class MemoryWatch:
    """Reads memory between rounds.

    Attributes:
        resident: bytes of the process in memory, one reading a round.
        on_device: bytes that torch has allocated on the GPU; 0 on a CPU.
    """

    def __init__(self, device: str) -> None:
        self.resident: list[int] = []
        self.on_device: list[int] = []
        self._on_gpu = device == "cuda"
        self._libc = ctypes.CDLL(None)

    def read(self) -> None:
        """Give back what nobody uses, and note what is left."""
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
