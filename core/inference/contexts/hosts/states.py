"""The states of a host that has a KV cache of its own: what its context says, their index, their tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ....validation import INT32_MAX, described, holds_data, instance, integer, refused
from ...kernels.state_copy import copy_states
from ...kernels.state_pools import ConvAndSsm
from ..cache.block_tree import BlockTree
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


class HostTree(BlockTree):
    """The index of states over a host's own index of KV blocks, which are not registered here."""

    def __init__(self, num_blocks: int, host_kv: Any) -> None:
        super().__init__(num_blocks)
        self.host_kv = host_kv

    def hash_of(self, block: int) -> int:
        return max(0, int(self.host_kv.block_hashes[block]))

    def hashes_to(self, block: int) -> list[int]:
        """The hash of the block alone: a host does not say what precedes it."""
        return [self.hash_of(block)]


class HostStates:
    """The tensors of a host's states, and copies between them: all layers of a state, without synchronising.

    Attributes:
        durable [layers, slots, ...]: the cached states.
        scratch [layers, states of a step, ...]: where kernels write states inside prefills.
    """

    def __init__(self, context: Any, empty: ConvAndSsm, num_slots: int, num_scratch: int) -> None:
        """`context`: has the live states; `empty`: tensors without a slot."""
        self._context = context
        self._empty = empty
        self.durable = self.zeros(num_slots)
        self.scratch = self.zeros(num_scratch)

    @torch.inference_mode(False)  # inference tensors cannot be written outside of that mode
    def zeros(self, num_slots: int) -> ConvAndSsm:
        zeros = (
            torch.zeros(len(tensor), num_slots, *tensor.shape[2:], dtype=tensor.dtype, device=tensor.device)
            for tensor in self._empty
        )
        return ConvAndSsm(*zeros)

    @property
    def _live(self) -> ConvAndSsm:
        return ConvAndSsm(self._context.mamba_conv_states, self._context.mamba_ssm_states)

    def live_slot(self, request_idx: int) -> int:
        """The live slot of a request, by its row in the context; ValueError for one without."""
        slots = self._context.mamba_metadata.request_to_mamba_state_idx
        slot = int(slots[integer("request_idx", request_idx, 0, len(slots) - 1)])
        if slot < 0:
            raise ValueError(f"request_idx is {request_idx}; accepted: a request with a live slot")
        return slot

    def store_scratch(self, indices: Sequence[int], slots: Sequence[int]) -> None:
        copy_states(self.scratch, indices, self.durable, slots)

    def store_live(self, live_slots: Sequence[int], slots: Sequence[int]) -> None:
        copy_states(self._live, live_slots, self.durable, slots)

    def restore(self, slots: Sequence[int], live_slots: Sequence[int]) -> None:
        copy_states(self.durable, slots, self._live, live_slots)

    def clear_scratch(self) -> None:
        for tensor in self.scratch:
            tensor.zero_()
