"""How much memory pools get where no size is given."""

import os
from dataclasses import replace
from pathlib import Path

import torch

from ...config import InferenceConfig
from .pool_sizes import GIGABYTE

SHARE_OF_FREE_GPU = 0.85  # the rest is for activations, graphs and the libraries' workspaces
SHARE_OF_FREE_RAM = 0.5
MAX_GB_ON_CPU = 16.0


def with_total_gb(config: InferenceConfig, device: torch.device) -> InferenceConfig:
    """`config`, with `total_gb` where no pool has a size."""
    if config.total_gb is None and config.num_kv_blocks is None:
        return replace(config, total_gb=available_gb(device))
    return config


def available_gb(device: torch.device) -> float:
    """The memory that pools get where no size is given, in 2**30 bytes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return SHARE_OF_FREE_GPU * torch.cuda.mem_get_info(device)[0] / GIGABYTE
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # of torchrun on this machine
    return min(MAX_GB_ON_CPU, SHARE_OF_FREE_RAM * _available_ram() / GIGABYTE) / ranks


def _available_ram() -> int:
    """Bytes of RAM that this process may still use: of the machine, and of its control group."""
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    try:
        with open("/proc/meminfo") as lines:
            named = dict(line.split(":", 1) for line in lines)
        available = int(named["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass  # no Linux: what is known by now
    of_group = _group_ram(Path("/sys/fs/cgroup"))
    return max(available if of_group is None else min(available, of_group), 0)


def _group_ram(group: Path) -> int | None:
    """Bytes that a control group (version 2) may still use, its idle page cache too; None: no limit."""
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # "max" is no limit
        return None
    try:
        named = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        reclaimable = int(named["inactive_file"])
    except (OSError, KeyError, ValueError):
        reclaimable = 0
    return limit - max(used - reclaimable, 0)
