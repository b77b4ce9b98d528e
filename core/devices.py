"""A device: current while work is launched, sent numbers, and how much of its memory pools may have."""

import os
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

GIGABYTE = 1 << 30
SHARE_OF_FREE_GPU = 0.85  # the rest is for activations, graphs and the libraries' workspaces
SHARE_OF_FREE_RAM = 0.5
MAX_GB_ON_CPU = 16.0


def on_device_of(device: torch.device | None) -> AbstractContextManager[object]:
    """A context in which `device` is the current CUDA device; no effect for None or another kind."""
    # Triton launches on the current device, wherever its tensors are; nccl sends Python objects from it. With
    # -1, `torch.cuda.device` makes no CUDA call.
    is_cuda = device is not None and device.type == "cuda"
    return torch.cuda.device(device.index if is_cuda and device is not None else -1)


def tensor_on(device: torch.device, numbers: Sequence[Any], dtype: torch.dtype = torch.int64) -> Tensor:
    """A list of numbers, or of lists, on `device`, by one copy that does not synchronise."""
    pinned = torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)


def available_gb(device: torch.device) -> float:
    """The memory that pools get where no size is given, in 2**30 bytes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return SHARE_OF_FREE_GPU * torch.cuda.mem_get_info(device)[0] / GIGABYTE
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # of torchrun on this machine
    return min(MAX_GB_ON_CPU, SHARE_OF_FREE_RAM * _available_ram() / GIGABYTE) / ranks


def _available_ram() -> int:
    """Bytes of RAM that this process may still use: of the machine, and of its control group."""
    available = _kernel_number(Path("/proc/meminfo"), "MemAvailable:") * 1024
    if not available:  # no Linux: a guess
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    of_group = _group_ram(Path("/sys/fs/cgroup"))
    return max(available if of_group is None else min(available, of_group), 0)


def _group_ram(group: Path) -> int | None:
    """Bytes that a control group (version 2) may still use, its idle page cache too; None: no limit."""
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # "max" is no limit
        return None
    return limit - max(used - _kernel_number(group / "memory.stat", "inactive_file"), 0)


def _kernel_number(path: Path, name: str) -> int:
    """The number after `name` in a file of the kernel that has one a line; 0 without it."""
    try:
        found = re.search(rf"^{name} +(\d+)", path.read_text(), re.MULTILINE)
    except OSError:
        found = None
    return 0 if found is None else int(found[1])
