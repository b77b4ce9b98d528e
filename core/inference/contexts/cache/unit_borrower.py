"""Moves units of one memory between states and KV blocks, as one side needs more."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .free_entries import BlocksByUnit, MemoryScrubber
from .kv_block_allocator import KVBlockAllocator
from .memory import MemoryUnits
from .state_slots import StateSlots

MAX_LOOKS = 64  # units that one call looks at, at most, to find one that can be emptied


class KVUnit(NamedTuple):
    """A unit of KV that could be emptied: its cached `leaves`, children first, and their states' `slots`."""

    unit: int
    leaves: list[int]
    slots: list[int]
    last_use: int


class UnitBorrower:
    """Moves units between states and KV, as one of them needs memory. Moves no bytes.

    A state and the KV before it are worth nothing without each other, so the order in which states are
    evicted decides for both, and alike on all ranks.
    """

    def __init__(
        self, units: MemoryUnits, kv_blocks: KVBlockAllocator, slots: StateSlots, scrubber: MemoryScrubber
    ) -> None:
        self.units = units
        self._kv_blocks = kv_blocks
        assert isinstance(kv_blocks.free_blocks, BlocksByUnit)
        self._free_list = kv_blocks.free_blocks
        self._slots = slots
        self._clock_hand = 0  # the unit at which the next look begins
        self._scrubber = scrubber
        kv_blocks.connect(self)

    # ---- states need memory

    def borrow_slots(self, num_slots: int) -> None:
        """Add free slots until so many are free, or until it is better to evict states."""
        while len(self._slots.free_slots) < num_slots:
            whole = [unit for unit in self._free_list.whole_units if unit >= self.units.num_kv_units]
            if whole:
                self._give_to_states(whole[0])
                continue
            best = min(self._candidates(), key=lambda c: (len(c.slots), c.last_use, c.unit), default=None)
            if best is None:
                return
            victims = best.slots and self._slots.next_victims(len(best.slots) + self.units.slots_per_unit)
            if not set(best.slots).issubset(victims):  # the unit's states are worth more than others
                return
            self._kv_blocks.evict_leaves(best.leaves)
            self._give_to_states(best.unit)

    def _candidates(self) -> Iterator[KVUnit]:
        """Clock algorithm: units that could be emptied, of `MAX_LOOKS` from the hand on."""
        units, cached_states = self.units, self._slots.cached_states
        first, count = units.num_kv_units, units.num_units - units.num_kv_units
        for step in range(min(count, MAX_LOOKS)):
            unit = first + (self._clock_hand + step) % count
            if units.for_states[unit] or (leaves := self._leaves_of(unit)) is None:
                continue
            slots = [cached_states.slot_of(block) for block in leaves if cached_states.holds_state(block)]
            if -1 in slots or not self._slots.pins.keys().isdisjoint(slots):
                continue  # a state of a tier, or one that is read
            last_use = max(map(self._kv_blocks.tree.leaves.timestamps.__getitem__, leaves), default=0)
            yield KVUnit(unit, leaves, slots, last_use)
        self._clock_hand = (self._clock_hand + MAX_LOOKS) % max(1, count)

    def _leaves_of(self, unit: int) -> list[int] | None:
        """A unit's cached blocks, children first; None where one is held, or continued by another unit's."""
        blocks, tree = self.units.blocks_of(unit), self._kv_blocks.tree
        parents = tree.parents
        if any(tree.references[blocks.start : blocks.stop]):
            return None
        counts = {block: tree.num_children[block] for block in blocks if parents[block] >= 0}
        ordered = [block for block, num_children in counts.items() if not num_children]
        for block in ordered:
            parent = parents[block]
            if parent in counts:
                counts[parent] -= 1
                if not counts[parent]:
                    ordered.append(parent)
        return ordered if len(ordered) == len(counts) else None

    def _give_to_states(self, unit: int) -> None:
        blocks = self.units.blocks_of(unit)
        self._scrubber.move_unit(unit, blocks, self._scrubber.blocks)
        self._kv_blocks.tree.set_references(blocks, 1)
        self._scrubber.blocks.remove(blocks)
        self._free_list.allocate_unit(unit)
        self.units.for_states[unit] = True
        self._slots.take_back(self.units.slots_of(unit))

    # ---- KV needs memory

    def num_blocks_to_borrow(self, pinned: Sequence[int] | None = None) -> int:
        """How many blocks `borrow_blocks` could add; `pinned`: by a request that needs spare units."""
        units, slots = self.units, self._slots
        fixed = units.units_of_slots([*slots.pins, *slots.reserved, *slots.live_slots, *(pinned or ())])
        movable = sum(has_states and unit not in fixed for unit, has_states in enumerate(units.for_states))
        num_spare = units.num_spare_units if pinned is not None else 0
        return max(0, min(movable, self._num_units_that_may_go) - num_spare) * units.blocks_per_unit

    @property
    def _num_units_that_may_go(self) -> int:
        """Of the units that hold states, those that neither pins nor the live slots of idle rows need."""
        return sum(self.units.for_states) - self.units.num_units_for_pins(self._slots.pins)

    def borrow_blocks(self, num_blocks: int) -> None:
        """Add blocks until so many are free: stateless ones go first, then free slots, then states."""
        kv, slots, leaves = self._kv_blocks, self._slots, self._kv_blocks.tree.leaves
        while kv.total_avail < num_blocks:
            if (leaf := leaves.first) >= 0 and not leaves.holds_state(leaf):
                kv.evict_lru_blocks(1)
            elif (unit := self._free_state_unit()) >= 0:
                self._give_to_kv(unit)
            elif self._num_units_that_may_go > 0 and slots.next_victims(1):
                slots.evict(1)
            else:
                return

    def _free_state_unit(self) -> int:
        """The last unit of states all of whose slots are free; negative where none is. O(free slots)."""
        if self._num_units_that_may_go < 1:
            return -1
        counts = Counter(map(self.units.unit_of_slot, self._slots.free_slots))
        return max((unit for unit, count in counts.items() if count == self.units.slots_per_unit), default=-1)

    def _give_to_kv(self, unit: int) -> None:
        self._scrubber.move_unit(unit, self.units.slots_of(unit), self._scrubber.slots)
        self._slots.lend(self.units.slots_of(unit))
        self.units.for_states[unit] = False
        blocks = self.units.blocks_of(unit)
        self._kv_blocks.tree.set_references(blocks, 0)
        self._free_list.extend(reversed(blocks))

    def check_integrity(self) -> None:
        """Raise AssertionError where a unit that always holds KV holds states."""
        assert not any(self.units.for_states[: self.units.num_kv_units]), "KV has too few units"
