"""KV blocks in a memory that they share with states."""

import time
from collections.abc import Sequence
from typing import Protocol

from .free_blocks import BlocksByUnit, FreeBlocks
from .kv_block_allocator import ForgetStates, KVBlockAllocator
from .left_entries import LeftEntries
from .memory_units import MemoryUnits
from .pool_stats import Clock


class BlockLender(Protocol):
    """Gives memory of states to blocks."""

    def num_blocks_to_lend(self, keep: Sequence[int] = (), num_spare_units: int = 0) -> int:
        """How many blocks `lend_blocks` could add at most to those that are free or cached.

        Args:
            keep: slots whose states must stay.
            num_spare_units: units that states are about to need.
        """

    def lend_blocks(self, num_blocks: int) -> None:
        """Add free blocks until so many are free, or until it is better to evict cached blocks."""


class SharedKVBlocks(KVBlockAllocator):
    """A `KVBlockAllocator` that uses those of its blocks whose units hold KV.

    A block whose unit holds states has one reference, so that it is neither free nor cached.

    Attributes:
        units: which units hold KV.
        lender: asked where too few blocks are free; its owner sets it.
    """

    lender: BlockLender

    def __init__(
        self,
        units: MemoryUnits,
        forget_states: ForgetStates,
        clock: Clock = time.monotonic_ns,
        left: LeftEntries | None = None,
    ) -> None:
        """
        Args:
            units: of the memory.
            forget_states, clock, left: as for `KVBlockAllocator`.
        """
        self.units = units
        super().__init__(units.num_units * units.blocks_per_unit, True, forget_states, clock, left)

    def _new_free_blocks(self) -> FreeBlocks:
        self._by_unit = BlocksByUnit(self.total_count, self.units.blocks_per_unit)
        return self._by_unit

    def _lent_blocks(self) -> Sequence[int]:
        return self.units.lent_blocks

    def _num_blocks_to_borrow(self, keep_slots: Sequence[int] | None) -> int:
        if keep_slots is None:
            return self.lender.num_blocks_to_lend()
        return self.lender.num_blocks_to_lend(keep_slots, self.units.num_spare_units)

    def _borrow(self, num_blocks: int) -> None:
        self.lender.lend_blocks(num_blocks)

    @property
    def held_count(self) -> int:
        return super().held_count - self.units.num_lent_blocks

    # ---- units

    def unit_leaves(self, unit: int) -> list[int] | None:
        """The cached blocks of a unit, children before parents.

        None where the unit cannot be emptied: a block is held, or continued by a block of another unit.
        """
        blocks = self.units.blocks_of(unit)
        if any(self._refs[blocks.start : blocks.stop]):
            return None
        tree = self.tree
        parents = tree.parents
        left = {block: tree.num_children(block) for block in blocks if parents[block] >= 0}
        ordered = [block for block, num_children in left.items() if not num_children]
        for block in ordered:
            parent = parents[block]
            if parent in left:
                left[parent] -= 1
                if not left[parent]:
                    ordered.append(parent)
        return ordered if len(ordered) == len(left) else None

    def empty_unit(self, leaves: list[int]) -> None:
        """Evict the blocks that `unit_leaves` has named."""
        tree = self.tree
        for block in leaves:
            parent = tree.parents[block]
            self.leaves.withdraw(block)
            tree.num_cached_children[parent] -= 1
            if not self._refs[parent] and not tree.num_children(parent):
                self.leaves.offer(parent)
        last_used_ns = list(map(self._timestamps.__getitem__, leaves))
        self._deregister(leaves, "new_block")
        tree.turnover.note_ages(self._now(), last_used_ns)

    def last_use(self, blocks: Sequence[int]) -> int:
        """When one of these blocks was last used; 0 for no blocks."""
        return max(map(self._timestamps.__getitem__, blocks), default=0)

    @property
    def whole_units(self) -> list[int]:
        """The units all of whose blocks are free."""
        return self._by_unit.whole_units

    def withdraw_unit(self, unit: int) -> None:
        """Give up the blocks of a unit, all of which are free: its memory shall hold states."""
        for block in self.units.blocks_of(unit):
            self._refs[block] = 1
        self._left.withdraw(self.units.blocks_of(unit))
        self._by_unit.withdraw(unit)

    def enter_unit(self, unit: int) -> None:
        """Take the blocks of a unit into use, whose memory held states; zero where that is asked for."""
        blocks = self.units.blocks_of(unit)
        for block in blocks:
            self._refs[block] = 0
        self._by_unit.add(list(reversed(blocks)))
