"""Memory as numbers: units that hold states or KV blocks."""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from ....validation import ceil_div

UNIT_ALIGNMENT = 256  # bytes. Every slot and every block begins at a multiple of it
MAX_WASTE = 0.02
_MAX_PER_UNIT = 24
_MAX_NUMBERS = 1 << 18
"""Slots, or blocks, that a memory numbers at most: the bookkeeping of each costs some hundred bytes."""


class UnitSizes(NamedTuple):
    """Bytes of one state and of one KV block on one rank. A rank without such layers has 0."""

    slot: int
    block: int


class RankBudget(NamedTuple):
    """What one rank has: `memory` bytes for states and KV together, `num_live` live states among them."""

    sizes: UnitSizes
    memory: int
    num_live: int


class UnitShape(NamedTuple):
    """What fits into one unit: so many slots, or so many blocks."""

    slots: int
    blocks: int

    def unit_bytes(self, sizes: UnitSizes) -> int:
        """Bytes of a unit. Slots divide a unit evenly, and so do blocks. Not 0 where a rank has neither."""
        granule = UNIT_ALIGNMENT * math.lcm(self.slots, self.blocks)
        return max(1, ceil_div(max(self.slots * sizes.slot, self.blocks * sizes.block), granule)) * granule

    def slot_stride(self, sizes: UnitSizes) -> int:
        return self.unit_bytes(sizes) // self.slots

    def block_stride(self, sizes: UnitSizes) -> int:
        return self.unit_bytes(sizes) // self.blocks

    def waste(self, ranks: Iterable[UnitSizes]) -> float:
        """The share of a unit that stays unused, on the worst rank and for what fits worse."""
        shares = [0.0]
        for sizes in ranks:
            unit = self.unit_bytes(sizes)
            used = (self.slots * sizes.slot, self.blocks * sizes.block)
            shares += [1 - size / unit for size in used if size]
        return max(shares)

    @classmethod
    def of(cls, ranks: Sequence[UnitSizes]) -> Self:
        """The smallest shape that wastes less than 2 %, or the least wasteful of the small ones."""
        mixed = [sizes for sizes in ranks if min(sizes)]
        slot, block = mixed[0] if mixed else (max(s for s, _ in ranks), max(b for _, b in ranks))
        small, large = sorted((slot, block))
        best, least = cls(1, 1), math.inf
        for few in range(1, _MAX_PER_UNIT + 1):
            for many in (few * large // small, ceil_div(few * large, small)):
                shape = cls(few, many) if slot >= block else cls(many, few)
                waste = shape.waste(ranks)
                if waste < least:
                    best, least = shape, waste
                if waste < MAX_WASTE:
                    return shape
        return best


@dataclass(frozen=True)
class MemoryDivision:
    """One memory for states and KV. The address of a slot or block never changes; from the start there are:

    live slots, one more slot | unit 0 .. num_kv_units-1 | .. | unit num_units-1
    always states             | always KV                | states or KV, as they are needed
    """

    shape: UnitShape
    num_live: int
    num_units: int
    num_kv_units: int  # always hold KV: those of one longest sequence
    slots_per_request: int = 1  # of the live slots

    @property
    def num_fixed_slots(self) -> int:
        """Slots before the units: the live ones, and one for a cached state."""
        return self.num_live + 1

    @property
    def num_durable_slots(self) -> int:
        """Numbers of durable slots: those before the units, and those of all units."""
        return self.num_fixed_slots - self.num_live + self.num_units * self.shape.slots

    @property
    def num_kv_blocks(self) -> int:
        """Numbers of KV blocks: those of all units."""
        return self.num_units * self.shape.blocks

    @property
    def has_all_numbers(self) -> bool:
        """Whether more memory would not be used: `_MAX_NUMBERS` slots or blocks are there."""
        return self.num_units == _MAX_NUMBERS // max(self.shape)

    def total_bytes(self, sizes: UnitSizes) -> int:
        """Bytes of the memory on a rank."""
        before = self.num_fixed_slots * self.shape.slot_stride(sizes)
        return before + self.num_units * self.shape.unit_bytes(sizes)

    @classmethod
    def of(cls, ranks: Sequence[RankBudget], blocks_of_longest: int) -> Self:
        """The division that every rank can afford; `num_units` < `num_kv_units` where one has too little."""
        shape = UnitShape.of([rank.sizes for rank in ranks])
        num_live = max(rank.num_live for rank in ranks)
        num_units = min(_MAX_NUMBERS // max(shape), *(_units(rank, shape, num_live) for rank in ranks))
        return cls(shape, num_live, num_units, ceil_div(blocks_of_longest, shape.blocks))

    def least_bytes(self, sizes: UnitSizes) -> int:
        """Bytes that a rank needs at least: without units but those that always hold KV."""
        return replace(self, num_units=self.num_kv_units).total_bytes(sizes)


def _units(rank: RankBudget, shape: UnitShape, num_live: int) -> int:
    for_units = rank.memory - (num_live + 1) * shape.slot_stride(rank.sizes)
    return for_units // shape.unit_bytes(rank.sizes)


class MemoryUnits:
    """For each unit of a `MemoryDivision`, whether its slots or its blocks are in use."""

    def __init__(self, division: MemoryDivision) -> None:
        self.slots_per_unit, self.blocks_per_unit = division.shape
        self.num_units = division.num_units
        self.num_kv_units = division.num_kv_units
        self.num_spare_units = division.slots_per_request + 2  # live slots, the state resumed, one more
        self._first_slot = division.num_fixed_slots
        first = max(division.num_kv_units, ceil_div(division.num_units, 2))  # at the start, of half or fewer
        self.for_states = [unit >= first for unit in range(division.num_units)]

    def slots_of(self, unit: int) -> range:
        first = self._first_slot + unit * self.slots_per_unit
        return range(first, first + self.slots_per_unit)

    def blocks_of(self, unit: int) -> range:
        return range(unit * self.blocks_per_unit, (unit + 1) * self.blocks_per_unit)

    def unit_of_slot(self, slot: int) -> int:
        """The unit of a slot; negative for a slot before the units."""
        return (slot - self._first_slot) // self.slots_per_unit

    def units_of_slots(self, slots: Iterable[int]) -> set[int]:
        """The units of these slots, without those before the units."""
        return {unit for slot in slots if (unit := self.unit_of_slot(slot)) >= 0}

    def num_units_for_pins(self, slots: Collection[int]) -> int:
        """Units that must hold states while these slots are pinned; one cached state needs none."""
        beyond = ceil_div(len(set(slots)) - 1, self.slots_per_unit)
        return max(len(self.units_of_slots(slots)), beyond)

    @property
    def lent_slots(self) -> list[int]:
        """Slots whose memory holds KV; O(slots)."""
        return [slot for unit, held in enumerate(self.for_states) if not held for slot in self.slots_of(unit)]

    @property
    def num_lent_slots(self) -> int:
        """How many slots' memory holds KV; O(units)."""
        return (self.num_units - sum(self.for_states)) * self.slots_per_unit

    @property
    def lent_blocks(self) -> list[int]:
        """Blocks whose memory holds states; O(blocks)."""
        return [block for unit, held in enumerate(self.for_states) if held for block in self.blocks_of(unit)]

    @property
    def num_lent_blocks(self) -> int:
        """How many blocks' memory holds states; O(units)."""
        return sum(self.for_states) * self.blocks_per_unit
