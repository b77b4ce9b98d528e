"""Memory as numbers: units that hold states or KV blocks, free lists, and entries that are not zero yet."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple, Self

ALIGNMENT = 256
"""Bytes. Every slot and every block begins at a multiple of it."""
MOST_WASTE = 0.02
_MOST_OF_A_UNIT = 24
_MOST_NUMBERS = 1 << 18
"""Slots, or blocks, that a memory numbers at most: the bookkeeping of each costs some hundred bytes."""
Zero = Callable[[Sequence[int]], None]


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
        """Bytes of a unit. Slots divide a unit evenly, and so do blocks."""
        granule = ALIGNMENT * math.lcm(self.slots, self.blocks)
        return -(-max(self.slots * sizes.slot, self.blocks * sizes.block) // granule) * granule

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
        both = [sizes for sizes in ranks if min(sizes)]
        slot, block = both[0] if both else (max(s for s, _ in ranks), max(b for _, b in ranks))
        small, large = sorted((slot, block))
        best, least = cls(1, 1), math.inf
        for few in range(1, _MOST_OF_A_UNIT + 1):
            for many in (few * large // small, -(-few * large // small)):
                shape = cls(few, many) if slot >= block else cls(many, few)
                waste = shape.waste(ranks)
                if waste < least:
                    best, least = shape, waste
                if waste < MOST_WASTE:
                    return shape
        return best


@dataclass(frozen=True)
class MemoryDivision:
    """One memory for states and KV, in bytes from its start:

        live slots, one more slot | unit 0 .. num_kv_units-1 | .. | unit num_units-1
        always states             | always KV                | states or KV, as they are needed

    Slots are numbered through the whole memory, and so are blocks from unit 0 on. A number keeps its address
    whatever the unit holds.

    Attributes:
        shape: of a unit.
        num_live: live slots, of running requests.
        num_units: units.
        num_kv_units: units that always hold KV: those of one longest sequence.
        slots_per_request: of the live slots, those of one request.
    """

    shape: UnitShape
    num_live: int
    num_units: int
    num_kv_units: int
    slots_per_request: int = 1

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
    def first_state_unit(self) -> int:
        """The first of the units that hold states at the start: half of the units do, or fewer."""
        return max(self.num_kv_units, -(-self.num_units // 2))

    def total_bytes(self, sizes: UnitSizes) -> int:
        """Bytes of the memory on a rank."""
        before = self.num_fixed_slots * self.shape.slot_stride(sizes)
        return before + self.num_units * self.shape.unit_bytes(sizes)

    @classmethod
    def of(cls, ranks: Sequence[RankBudget], blocks_of_longest: int) -> Self:
        """The division that every rank can afford; `num_units` < `num_kv_units` where one has too little."""
        shape = UnitShape.of([rank.sizes for rank in ranks])
        num_live = max(rank.num_live for rank in ranks)
        num_units = min(_MOST_NUMBERS // max(shape), *(_units(rank, shape, num_live) for rank in ranks))
        return cls(shape, num_live, num_units, -(-blocks_of_longest // shape.blocks))

    def least_bytes(self, sizes: UnitSizes) -> int:
        """Bytes that a rank needs at least: without units but those that always hold KV."""
        return replace(self, num_units=self.num_kv_units).total_bytes(sizes)


def _units(rank: RankBudget, shape: UnitShape, num_live: int) -> int:
    for_units = rank.memory - (num_live + 1) * shape.slot_stride(rank.sizes)
    return for_units // shape.unit_bytes(rank.sizes)


class MemoryUnits:
    """For each unit of a `MemoryDivision`, whether its slots or its blocks are in use; trusts arguments.

    `Borrowing` writes `holds_states`. Slots before the units always hold states, units below `num_kv_units`
    KV. A request may need `num_spare_units` for its live slots, the state it resumes from, and one state
    more.
    """

    def __init__(self, division: MemoryDivision) -> None:
        self.slots_per_unit, self.blocks_per_unit = division.shape
        self.num_units = division.num_units
        self.num_kv_units = division.num_kv_units
        self.num_spare_units = division.slots_per_request + 2
        self._first_slot = division.num_fixed_slots
        self.holds_states = [unit >= division.first_state_unit for unit in range(division.num_units)]

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


class BlockStack(list[int]):
    """A stack: the block freed last is allocated first."""

    def restart(self, free: list[int]) -> None:
        """These blocks are free now, and no others; the last one is allocated first."""
        self[:] = free

    def take(self, num_blocks: int) -> list[int]:
        cut = len(self) - num_blocks
        blocks = self[cut:][::-1]
        del self[cut:]
        return blocks


class BlocksByUnit:
    """Best fit: a call's blocks come from units with just enough free blocks; O(blocks of a unit)."""

    def __init__(self, total_count: int, blocks_per_unit: int) -> None:
        self._size = blocks_per_unit
        self._of_unit: list[list[int]] = [[] for _ in range(total_count // blocks_per_unit)]
        # Number of free blocks -> the units that have so many, in the order in which they came to have them.
        self._units_with: list[dict[int, None]] = []
        self._num_free = 0

    def __len__(self) -> int:
        return self._num_free

    @property
    def whole_units(self) -> list[int]:
        return list(self._units_with[self._size])

    def restart(self, free: list[int]) -> None:
        self._of_unit = [[] for _ in self._of_unit]
        for block in free:
            self._of_unit[block // self._size].append(block)
        self._units_with = [{} for _ in range(self._size + 1)]
        for unit, blocks in enumerate(self._of_unit):
            self._units_with[len(blocks)][unit] = None
        self._num_free = len(free)

    def take(self, num_blocks: int) -> list[int]:
        taken: list[int] = []
        while num_missing := num_blocks - len(taken):
            enough = range(min(num_missing, self._size), self._size + 1)
            count = next((n for n in enough if self._units_with[n]), 0)
            count = count or next(n for n in range(enough.start - 1, 0, -1) if self._units_with[n])
            unit = next(iter(self._units_with[count]))
            cut = max(0, count - num_missing)
            taken += self._of_unit[unit][cut:][::-1]
            self._set(unit, self._of_unit[unit][:cut])
        return taken

    def extend(self, blocks: Iterable[int]) -> None:
        by_unit: dict[int, list[int]] = {}
        for block in blocks:
            by_unit.setdefault(block // self._size, []).append(block)
        for unit, free in by_unit.items():
            self._set(unit, self._of_unit[unit] + free)

    def withdraw(self, unit: int) -> None:
        """Take the blocks of a unit that is wholly free."""
        self._set(unit, [])

    def _set(self, unit: int, free: list[int]) -> None:
        before = len(self._of_unit[unit])
        del self._units_with[before][unit]
        self._units_with[len(free)][unit] = None
        self._of_unit[unit] = free
        self._num_free += len(free) - before

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._of_unit)

    def check_integrity(self) -> None:
        """Raise AssertionError where a count of free blocks is off."""
        for count, units in enumerate(self._units_with):
            assert all(len(self._of_unit[unit]) == count for unit in units), "a unit's count of blocks is off"
        assert sum(map(len, self._units_with)) == len(self._of_unit), "a unit is counted nowhere, or twice"
        assert len(list(self)) == self._num_free, "the count of free blocks is off"


FreeBlocks = BlockStack | BlocksByUnit


class DirtyEntries:
    """Dirty set of one pool: its free entries that are not zero yet; empty without `zero`.

    The pool notes what it frees; `clean` zeroes what it allocates, `scrub` all others. An entry is zeroed
    before it is dropped from the set: an interrupted call zeroes it again.
    """

    def __init__(self, zero: Zero | None = None) -> None:
        """`zero`: fills entries with zeros, in stream order; called with distinct numbers in order."""
        self._zero = zero
        self._entries: set[int] = set()

    @property
    def is_active(self) -> bool:
        return self._zero is not None

    def note(self, entries: Iterable[int]) -> None:
        """Note that these entries are free."""
        if self._zero is not None:
            self._entries.update(entries)

    def clean(self, entries: Iterable[int]) -> None:
        """Zero those of these entries that are dirty, before they are allocated."""
        if self._entries and self._zero is not None:
            found = self._entries.intersection(entries)
            if found:
                self._zero(sorted(found))
                self._entries -= found

    def has_any(self, entries: Iterable[int]) -> bool:
        return not self._entries.isdisjoint(entries)

    def withdraw(self, entries: Iterable[int]) -> None:
        """Note that these entries are zero, or that another pool owns their memory."""
        self._entries.difference_update(entries)

    def scrub(self) -> None:
        """Zero all dirty entries."""
        if self._entries:
            self.clean(self._entries.copy())

    def clear(self) -> None:
        """Note that the pool has no memory, or is all zeros."""
        self._entries.clear()


class MemoryCleaner:
    """Zeroes freed entries of the pools before another owner can have them; this one zeroes nothing."""

    def __init__(self) -> None:
        self.blocks = DirtyEntries()
        self.slots = DirtyEntries()

    def move_unit(self, unit: int, entries: Sequence[int], dirty: DirtyEntries) -> None:
        """Zero a unit of shared memory before it changes sides; `entries`, `dirty`: of the freeing side."""
