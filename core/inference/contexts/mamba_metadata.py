"""Live slots of running requests.

The names in `_MOVED` are those of `mambaslots.vllm.chunk_metadata`; hosts may also import them from here.
"""

from collections.abc import Iterable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ...errors import RequestOverflowError
from ...validation import INT32_MAX, integer, integers
from .cache.left_entries import LeftEntries

_MOVED = (
    "Mamba2AttentionBackend",
    "Mamba2AttentionMetadata",
    "Mamba2AttentionMetadataBuilder",
    "build_chunk_metadata",
    "compute_varlen_chunk_metadata",
)


def __getattr__(name: str) -> Any:
    """Import a moved name at its first use; this module must not import `mambaslots.vllm` at load time."""
    if name in _MOVED:
        return getattr(import_module("...vllm.chunk_metadata", __package__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class MambaMetadata:
    """Which live slot each running request owns.

    Attributes:
        request_to_mamba_state_idx: [max_requests] int32 on the CPU, -1 = none. The context writes it as
            requests move between rows; `free_slots` reads it.
        intermediate_count, per_request_intermediate_counts: how many checkpoints this step's kernels
            extract, in all and for each prefill request. The context writes them; the slot allocator
            reads them when it commits.
    """

    def __init__(
        self, max_requests: int, num_live_slots: int | None = None, left: LeftEntries | None = None
    ) -> None:
        """
        Args:
            max_requests: rows.
            num_live_slots: defaults to one a request; speculative decoding needs more.
            left: notes the slots that become free; None for nothing.
        """
        self._left = left or LeftEntries()
        self.max_requests = integer("max_requests", max_requests, 1, INT32_MAX)
        self.num_live_slots = integer(
            "num_live_slots", max_requests if num_live_slots is None else num_live_slots, 1, INT32_MAX
        )
        with torch.inference_mode(False):  # `reset` writes it anywhere
            self.request_to_mamba_state_idx = torch.empty(self.max_requests, dtype=torch.int32, device="cpu")
        self.reset()

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def idle_slots(self) -> list[int]:
        """The live slots that no one owns."""
        return list(self._free)

    def allocate_slot(self) -> int:
        """A live slot that no one owns, as a plain int; its state is stale. Enters no row.

        Raises:
            RequestOverflowError: none is free.
        """
        return self.allocate_slots(1)[0]

    @property
    def _last_slot(self) -> int:
        return self.num_live_slots - 1

    def has_room(self, num_slots: int, resume_slot: int = -1) -> bool:
        """Whether a request could get `num_slots` live slots, and resume from durable slot `resume_slot`."""
        return len(self._free) >= num_slots

    def allocate_slots(self, num_slots: int, resume_slot: int = -1) -> tuple[int, ...]:
        """The live slots of one request; their states are stale. They enter no row.

        `resume_slot`: the durable slot that the request resumes from; -1 for none. Where both kinds share a
        pool, it may come first among the result, and then holds the request's state.

        Raises:
            RequestOverflowError: too few are free; nothing is changed.
        """
        if len(self._free) < num_slots:
            raise RequestOverflowError(required=num_slots, available=len(self._free))
        slots = tuple(self._free.popitem()[0] for _ in range(num_slots))
        self._left.give(slots)
        return slots

    def free_slot(self, slot: int) -> None:
        """Free `slot`. The caller clears the row that names the slot.

        Raises:
            ValueError: `slot` is out of range or free already; nothing is changed.
        """
        self._release("slot", [integer("slot", slot, 0, self._last_slot)])

    def free_slots(self, request_indices: Iterable[int] | Tensor) -> None:
        """Free the slots of these rows and clear the rows; rows without a slot are skipped.

        Raises:
            ValueError: a row is out of range, or its slot is named twice or free already; nothing is
                changed.
        """
        rows = integers("request_indices", request_indices, 0, self.max_requests - 1)
        slots = self.request_to_mamba_state_idx[rows].tolist()
        self._release("request_indices", [slot for slot in slots if slot != -1])
        self.request_to_mamba_state_idx[rows] = -1

    def reset(self) -> None:
        """All slots free, all rows empty, no checkpoints. Rows keep their storage."""
        self._free = dict.fromkeys(reversed(range(self.num_live_slots)))  # a stack with fast membership tests
        self._left.note(self._free)
        self.request_to_mamba_state_idx.fill_(-1)
        self.intermediate_count = 0
        self.per_request_intermediate_counts: list[int] = []

    def check_integrity(self) -> None:
        """Assert that every slot is free or owned, and that no two rows name one."""
        assert all(0 <= slot < self.num_live_slots for slot in self._free), "a free slot is out of range"
        named = [slot for slot in self.request_to_mamba_state_idx.tolist() if slot != -1]
        assert all(0 <= slot < self.num_live_slots for slot in named), "a row names a slot out of range"
        assert len(set(named)) == len(named), "two rows name one slot"
        assert self._free.keys().isdisjoint(named), "a row names a free slot"

    def _release(self, named_by: str, slots: list[int]) -> None:
        released = dict.fromkeys(slots)
        if len(released) < len(slots) or not released.keys().isdisjoint(self._free):
            raise ValueError(
                f"{named_by} names slots {slots}, some free or named twice; accepted: slots in use, once each"
            )
        self._left.note(released)
        self._free.update(released)
