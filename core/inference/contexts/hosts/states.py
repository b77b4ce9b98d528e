"""The states of a host that has a KV cache of its own: their index by block, and their tensors."""

from collections.abc import Sequence
from typing import Any

import torch

from ....validation import integer
from ...kernels.operands import ConvAndSsm
from ...kernels.state_copy import copy_states
from ..cache.block_tree import BlockTree


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
            torch.zeros(len(each), num_slots, *each.shape[2:], dtype=each.dtype, device=each.device)
            for each in self._empty
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
