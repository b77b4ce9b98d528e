"""Live slots that come from the pool of cached states."""

from .cache.shared_slots import SharedSlots
from .mamba_metadata import MambaMetadata


class SharedLiveSlots(MambaMetadata):
    """Takes live slots from the slots that hold cached states, and gives them back free.

    So the slots of idle rows hold cached states. The pool has `num_live_slots` slots more than pins may keep,
    and no pin of a running request lasts: `RequestStates.move_to_live` ends it. So whoever has a free row can
    have its live slots.

    The states of running requests and cached states must have one encoding. Where they have not, live slots
    are a pool of their own: a `MambaMetadata`.
    """

    def __init__(self, max_requests: int, num_live_slots: int, slots: SharedSlots) -> None:
        """
        Args:
            max_requests: rows.
            num_live_slots: live slots of all rows together.
            slots: the book of the pool.
        """
        self._slots = slots
        super().__init__(max_requests, num_live_slots)

    @property
    def free_count(self) -> int:
        """Live slots that rows may still take."""
        return self.num_live_slots - len(self._slots.live)

    @property
    def _last_slot(self) -> int:
        return self._slots.num_slots - 1

    def has_room(self, num_slots: int, resume_slot: int = -1) -> bool:
        return self._slots.num_available >= num_slots

    def allocate_slots(self, num_slots: int, resume_slot: int = -1) -> tuple[int, ...]:
        """The live slots of one request; their states are stale. They enter no row. May evict states.

        Where there is no slot but the one that the request resumes from, the request takes it over: it comes
        first, holds the request's state, and the state is not cached any more.

        Raises:
            MambaSlotCapacityError: too few slots can be had; nothing is changed.
        """
        slots = self._slots
        if resume_slot < 0 or resume_slot in slots.pins or slots.num_available != num_slots:
            return tuple(slots.take_live(num_slots, (resume_slot,)))
        others = slots.take_live(num_slots - 1, (resume_slot,))
        slots.take_over(resume_slot)
        return resume_slot, *others

    def _release(self, named_by: str, slots: list[int]) -> None:
        if len(set(slots)) < len(slots) or not self._slots.live.issuperset(slots):
            raise ValueError(f"{named_by} names slots {slots}; accepted: live slots, once each")
        self._slots.free_live(slots)

    def check_integrity(self) -> None:
        """Assert that rows name distinct live slots, and that no more slots are live than rows may have."""
        named = [slot for slot in self.request_to_mamba_state_idx.tolist() if slot != -1]
        assert len(set(named)) == len(named), "two rows name one slot"
        assert self._slots.live.issuperset(named), "a row names a slot that is not live"
        assert self.free_count >= 0, "more slots are live than rows may have"
