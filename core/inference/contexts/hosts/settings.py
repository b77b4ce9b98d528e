"""What a host's context says of its states: `MambaSlotAllocator` reads the context once, and checks it."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ....validation import INT32_MAX, described, holds_data, instance, integer, refused
from ..cache.checkpoint_plan import CheckpointPlan
from ..cache.eviction import PolicyChoice
from ..cache.kv_block_allocator import KVBlockAllocator


@dataclass(frozen=True)
class HostSettings:
    """How a host wants its states to be stored; `MambaSlotAllocator` names the settings of a context."""

    policy: PolicyChoice
    plan: CheckpointPlan
    grid: int  # tokens; kernels can store states inside a prefill at multiples of it
    device: torch.device  # of the live states

    @classmethod
    def of(cls, context: Any) -> Self:
        """The settings of a context. ValueError for a wrong one."""
        policy = getattr(context, "prefix_caching_eviction_policy", "lru")
        plan = getattr(context, "checkpoint_plan", None)
        plan = instance("context.checkpoint_plan", CheckpointPlan() if plan is None else plan, CheckpointPlan)
        chunk = size_of(context, "mamba_chunk_size") or 1
        grid = size_of(context, "ssm_chunk_alignment") or chunk
        return cls(policy, plan, grid, device_of(context))


def device_of(context: Any) -> torch.device:
    """Where the live states are."""
    live = getattr(context, "mamba_ssm_states", None)
    if not isinstance(live, Tensor) or not holds_data(live):
        raise ValueError(
            f"context.mamba_ssm_states {described(live)}; accepted: the live states, a tensor that holds data"
        )
    return live.device


def size_of(context: Any, name: str, default: int = 0, minimum: int = 0) -> int:
    """The size that the host states, or `default`."""
    value = getattr(context, name, None)
    return default if value is None else integer(f"context.{name}", value, minimum, INT32_MAX)


def block_count(context: object) -> int:
    """The number of KV blocks of a host; a ValueError for an object that is no host."""
    kv = getattr(context, "kv_block_allocator", None)
    if kv is None:
        raise refused("context", context, "a host that has a kv_block_allocator")
    name = next((name for name in ("total_count", "pool_size") if hasattr(kv, name)), "")
    if not name or not (isinstance(kv, KVBlockAllocator) or hasattr(kv, "block_hashes")):
        raise refused("context.kv_block_allocator", kv, "what has block_hashes, and total_count or pool_size")
    return integer(f"context.kv_block_allocator.{name}", getattr(kv, name), 0, INT32_MAX)
