"""The book of slots that running requests and cached states share."""

from collections.abc import Iterable, Sequence
from typing import Any

from .durable_slots import DurableSlots, SlotCounts


class SharedSlots(DurableSlots):
    """Durable slots, of which running requests may take some: a slot can be LIVE, too.

        FREE -- take_live --> LIVE -- free_live --> FREE
        COMMITTED -- take_over --> LIVE

    A live slot belongs to one running request, which alone reads and writes it. It is neither free nor
    reserved nor committed, and cannot be pinned.

    Attributes:
        live: the live slots; empty where live states have a pool of their own.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """The arguments of `DurableSlots`."""
        self.live: set[int] = set()
        super().__init__(*args, **kwargs)

    @property
    def counts(self) -> SlotCounts:
        return super().counts._replace(live=len(self.live))

    def take_live(self, num_slots: int, keep: Iterable[int] = ()) -> list[int]:
        """Take slots for a running request; evicts unpinned states where too few slots are free.

        `keep`: slots whose states stay.

        Raises:
            MambaSlotCapacityError: too few slots can be freed; nothing is changed.
        """
        slots = self._take(num_slots, keep, "live_state")
        self.live.update(slots)
        return slots

    def take_over(self, slot: int) -> None:
        """Make an unpinned committed slot live: a running request updates its state, which nobody finds then.

        It counts as a use of the state, and as its eviction.
        """
        self.note_use(slot)
        self._evict_slots([slot], "live_state")
        self.live.add(slot)

    def free_live(self, slots: Sequence[int]) -> None:
        """Free live slots.

        Raises:
            ValueError: a slot is not live, or named twice; nothing is changed.
        """
        if len(set(slots)) < len(slots) or not self.live.issuperset(slots):
            raise ValueError(f"slots is {list(slots)}; accepted: distinct live slots")
        self.live.difference_update(slots)
        self._free_slots(slots)

    def clear(self, totals: bool = False, live: bool = False) -> None:
        """Forget every state, reservation, pin and ghost.

        Args:
            totals: whether the totals of `counts` are forgotten, too.
            live: whether live slots become free, too.
        """
        if live:
            self.live.clear()
        super().clear(totals)

    def _all_free(self) -> list[int]:
        return [slot for slot in super()._all_free() if slot not in self.live]

    def check_integrity(self) -> None:
        super().check_integrity()
        known = {*self.free, *self.reserved, *self.map.slots}
        assert self.live.isdisjoint(known), "a live slot is free, reserved or committed"
