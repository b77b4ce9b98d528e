"""How one memory is cut into units that hold either cached states or KV blocks."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

ALIGNMENT = 256
"""Bytes. Every slot and every block begins at a multiple of it."""
MOST_WASTE = 0.02
_MOST_OF_A_UNIT = 24
_MOST_NUMBERS = 1 << 18
"""Slots, or blocks, that a memory numbers at most: the host's books of each take some hundred bytes."""


class UnitSizes(NamedTuple):
    """Bytes of one state and of one KV block on one rank. A rank without such layers has 0."""

    slot: int
    block: int


class RankBudget(NamedTuple):
    """What one rank has.

    Attributes:
        sizes: of a state and of a KV block.
        memory: bytes for states and KV together, behind what else running requests need.
        num_live: live states among them.
    """

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
        """Bytes from a slot to the next one."""
        return self.unit_bytes(sizes) // self.slots

    def block_stride(self, sizes: UnitSizes) -> int:
        """Bytes from a block to the next one."""
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
        """The smallest shape that wastes less than 2 %, or the least wasteful of the small ones.

        `ranks`: of all ranks, of which one has states and KV. All ranks have one shape, because they share
        their decisions.
        """
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
        """The division that every rank can afford.

        Args:
            ranks: all ranks of a model. At least one has states, and one has KV.
            blocks_of_longest: KV blocks of the longest sequence.

        Returns:
            A division with `num_units` < `num_kv_units` where a rank has too little memory.
        """
        shape = UnitShape.of([rank.sizes for rank in ranks])
        num_live = max(rank.num_live for rank in ranks)
        num_units = min(_MOST_NUMBERS // max(shape), *(_units(rank, shape, num_live) for rank in ranks))
        return cls(shape, num_live, num_units, -(-blocks_of_longest // shape.blocks))

    def least_bytes(self, sizes: UnitSizes) -> int:
        """Bytes that a rank needs at least: without units but those that always hold KV."""
        return self.num_fixed_slots * self.shape.slot_stride(
            sizes
        ) + self.num_kv_units * self.shape.unit_bytes(sizes)


def _units(rank: RankBudget, shape: UnitShape, num_live: int) -> int:
    left = rank.memory - (num_live + 1) * shape.slot_stride(rank.sizes)
    return left // shape.unit_bytes(rank.sizes)
