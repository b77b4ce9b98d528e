"""Live slots of running requests."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ...errors import RequestOverflowError
from ...validation import INT32_MAX, integer, integers
from .cache.memory import DirtyEntries
from .cache.state_slots import StateSlots


class MambaMetadata:
    """Which live slots each running request owns.

    Live slots have a pool of their own, or are slots of the cache's pool (`slots`), so that those of idle
    rows hold cached states. That pool has `num_live_slots` slots more than pins may keep, and no pin of a
    running request lasts (`RequestStates.move_to_live` ends it): a free row always finds its live slots.

    Attributes:
        request_to_mamba_state_idx: [max_requests] int32 on the CPU, -1 = none. The context writes it as
            requests move between rows; `free_slots` reads it.
        intermediate_count, per_request_intermediate_counts: how many checkpoints this step's kernels
            extract, in all and for each prefill request. The context writes them; the slot allocator
            reads them when it commits.
    """

    def __init__(
        self,
        max_requests: int,
        num_live_slots: int | None = None,
        left: DirtyEntries | None = None,
        slots: StateSlots | None = None,
    ) -> None:
        """
        Args:
            max_requests: rows.
            num_live_slots: of all rows together; one a row by default, more with speculative decoding.
            left: collects the slots that become free, in a pool of their own.
            slots: the pool of cached states, to allocate from; None for a pool of their own.
        """
        self._left = left or DirtyEntries()
        self._slots = slots
        self.max_requests = integer("max_requests", max_requests, 1, INT32_MAX)
        self.num_live_slots = integer(
            "num_live_slots", max_requests if num_live_slots is None else num_live_slots, 1, INT32_MAX
        )
        with torch.inference_mode(False):  # `reset` writes it anywhere
            self.request_to_mamba_state_idx = torch.empty(self.max_requests, dtype=torch.int32, device="cpu")
        self.reset()

    @property
    def free_count(self) -> int:
        """Live slots that rows may still allocate."""
        return len(self._free) if self._slots is None else self.num_live_slots - len(self._slots.live)

    @property
    def idle_slots(self) -> list[int]:
        """The free slots of a pool of live slots' own."""
        return list(self._free)

    def has_room(self, num_slots: int) -> bool:
        """Whether a request could get `num_slots` live slots, and resume from any cached state."""
        return (len(self._free) if self._slots is None else self._slots.num_available) >= num_slots

    def allocate_slot(self) -> int:
        """A free live slot, as a plain int; its state is stale. Enters no row.

        Raises:
            RequestOverflowError: none is free.
        """
        return self.allocate_slots(1)[0]

    def allocate_slots(self, num_slots: int, resume_slot: int = -1) -> tuple[int, ...]:
        """The live slots of one request; their states are stale. They enter no row. May evict states.

        `resume_slot`: the slot of the state that the request resumes from; -1 for none. Where a shared
        pool has no other slot, the request takes this one over: it is the first of the result, holds the
        request's state, and the state is not cached any more.

        Raises:
            RequestOverflowError, MambaSlotCapacityError: too few are free; nothing is changed.
        """
        slots = self._slots
        if slots is not None:
            if resume_slot < 0 or resume_slot in slots.pins or slots.num_available != num_slots:
                return tuple(slots.take_live(num_slots, (resume_slot,)))
            others = slots.take_live(num_slots - 1, (resume_slot,))
            slots.take_over(resume_slot)
            return resume_slot, *others
        if len(self._free) < num_slots:
            raise RequestOverflowError(required=num_slots, available=len(self._free))
        taken = tuple(self._free.popitem()[0] for _ in range(num_slots))
        self._left.give(taken)
        return taken

    def free_slot(self, slot: int) -> None:
        """Free `slot`. The caller clears the row that names the slot.

        Raises:
            ValueError: `slot` is out of range or free already; nothing is changed.
        """
        last = (self.num_live_slots if self._slots is None else self._slots.num_slots) - 1
        self._release("slot", [integer("slot", slot, 0, last)])

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

    def _release(self, named_by: str, slots: list[int]) -> None:
        released = dict.fromkeys(slots)
        in_use = (
            released.keys().isdisjoint(self._free)
            if self._slots is None
            else self._slots.live.issuperset(released)
        )
        if len(released) < len(slots) or not in_use:
            raise ValueError(f"{named_by} names slots {slots}; accepted: live slots in use, once each")
        if self._slots is not None:
            self._slots.free_live(slots)
            return
        self._left.note(released)
        self._free.update(released)

    def reset(self) -> None:
        """All slots free, all rows empty, no checkpoints. Rows keep their storage."""
        num_own = self.num_live_slots if self._slots is None else 0
        self._free = dict.fromkeys(reversed(range(num_own)))  # a stack with fast membership tests
        self._left.note(self._free)
        self.request_to_mamba_state_idx.fill_(-1)
        self.intermediate_count = 0
        self.per_request_intermediate_counts: list[int] = []

    def check_integrity(self) -> None:
        """Assert that every slot is free or owned, and that no two rows name one."""
        named = [slot for slot in self.request_to_mamba_state_idx.tolist() if slot != -1]
        assert len(set(named)) == len(named), "two rows name one slot"
        if self._slots is not None:
            assert self._slots.live.issuperset(named), "a row names a slot that is not live"
            assert self.free_count >= 0, "more slots are live than rows may have"
            return
        assert all(0 <= slot < self.num_live_slots for slot in self._free), "a free slot is out of range"
        assert all(0 <= slot < self.num_live_slots for slot in named), "a row names a slot out of range"
        assert self._free.keys().isdisjoint(named), "a row names a free slot"
