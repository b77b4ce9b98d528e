"""Which part of a shared memory holds states, and which holds KV."""

from collections.abc import Collection, Iterable

from .memory_division import MemoryDivision


class MemoryUnits:
    """For each unit of a `MemoryDivision`, whether its slots or its blocks are in use. Arguments are trusted.

    Slots before the units always hold states. Units below `num_kv_units` always hold KV.

    Attributes:
        slots_per_unit, blocks_per_unit: what fits into a unit.
        num_units: units.
        holds_states: for each unit, whether its slots are in use; else its blocks are. `Borrowing` writes it.
        num_kv_units: the first units, which never hold states.
        num_spare_units: units that a request may need for its states, at most: for its live slots, for the
            state that it resumes from, and for one state more in a slot before the units.
    """

    def __init__(self, division: MemoryDivision) -> None:
        self.slots_per_unit, self.blocks_per_unit = division.shape
        self.num_units = division.num_units
        self.num_kv_units = division.num_kv_units
        self.num_spare_units = division.slots_per_request + 2
        self._first_slot = division.num_fixed_slots
        self.holds_states = [unit >= division.first_state_unit for unit in range(division.num_units)]

    def slots_of(self, unit: int) -> range:
        """The slots of a unit."""
        first = self._first_slot + unit * self.slots_per_unit
        return range(first, first + self.slots_per_unit)

    def blocks_of(self, unit: int) -> range:
        """The KV blocks of a unit."""
        return range(unit * self.blocks_per_unit, (unit + 1) * self.blocks_per_unit)

    def unit_of_slot(self, slot: int) -> int:
        """The unit of a slot; negative for a slot before the units."""
        return (slot - self._first_slot) // self.slots_per_unit

    def units_of_slots(self, slots: Iterable[int]) -> set[int]:
        """The units of these slots, without those before the units."""
        return {unit for slot in slots if (unit := self.unit_of_slot(slot)) >= 0}

    def num_units_for_pins(self, slots: Collection[int]) -> int:
        """Units that must hold states while these slots are pinned.

        Running requests can have all slots before the units but one; pins beyond need slots of units.
        """
        beyond = -(-(len(set(slots)) - 1) // self.slots_per_unit)
        return max(len(self.units_of_slots(slots)), beyond)

    @property
    def num_lent_slots(self) -> int:
        """How many slots' memory holds KV; O(units)."""
        return (self.num_units - sum(self.holds_states)) * self.slots_per_unit

    @property
    def lent_blocks(self) -> list[int]:
        """Blocks whose memory holds states; O(blocks)."""
        return [block for unit in self._units_with(True) for block in self.blocks_of(unit)]

    @property
    def lent_slots(self) -> list[int]:
        """Slots whose memory holds KV; O(slots)."""
        return [slot for unit in self._units_with(False) for slot in self.slots_of(unit)]

    @property
    def num_lent_blocks(self) -> int:
        """How many these are; O(units)."""
        return sum(self.holds_states) * self.blocks_per_unit

    def _units_with(self, states: bool) -> list[int]:
        return [unit for unit, holds in enumerate(self.holds_states) if holds == states]
