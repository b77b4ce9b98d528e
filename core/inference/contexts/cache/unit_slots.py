"""Slots of states in a memory that they share with KV blocks."""

from collections.abc import Sequence
from typing import Any

from .memory_units import MemoryUnits
from .shared_slots import SharedSlots


class UnitSlots(SharedSlots):
    """`SharedSlots` that use those of their slots whose units hold states.

    Attributes:
        units: which units hold states.
    """

    def __init__(self, units: MemoryUnits, *args: Any, **kwargs: Any) -> None:
        """`units`: of the memory. The others are the arguments of `DurableSlots`."""
        self.units = units
        super().__init__(*args, **kwargs)

    def _lent_slots(self) -> Sequence[int]:
        return self.units.lent_slots

    def next_victims(self, count: int) -> list[int]:
        """Up to `count` unpinned slots whose states would be evicted next. Changes nothing."""
        pins = self.pins
        return self.order.victims(count, lambda slot: slot not in pins)

    def evict_slots(self, slots: Sequence[int]) -> None:
        """Evict the states in these unpinned slots, and free the slots."""
        if slots:
            self._evict_slots(list(slots))
            self._free_slots(slots)

    def withdraw(self, slots: Sequence[int]) -> None:
        """Give up these free slots: their memory shall hold KV."""
        gone = set(slots)
        self._left.withdraw(gone)
        self.free = [slot for slot in self.free if slot not in gone]
        self.version += 1

    def enter(self, slots: Sequence[int]) -> None:
        """Take these slots into use, whose memory held KV and is zero where that is asked for."""
        self._free_slots(slots)
        self._left.withdraw(slots)
