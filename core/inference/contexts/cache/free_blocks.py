"""The free KV blocks, and which of them is taken next."""

from collections.abc import Sequence
from typing import Protocol


class FreeBlocks(Protocol):
    """The free blocks of a pool. A block is free that nobody holds and that is not registered."""

    def __len__(self) -> int: ...

    def restart(self, num_free: int, references: Sequence[int], parents: Sequence[int]) -> None:
        """Note that every block is free that has no reference and no parent.

        `num_free`: how many these are.
        """

    def take(self, num_blocks: int, references: Sequence[int], parents: Sequence[int]) -> list[int]:
        """Take free blocks; there must be so many.

        `references`, `parents`: of each block, as in `restart`.
        """

    def add(self, blocks: list[int]) -> None:
        """Note that these blocks are free."""

    def listed(self, references: Sequence[int], parents: Sequence[int]) -> list[int]:
        """All free blocks, for checks; O(pool)."""


class BlockStack:
    """The block freed last is taken first.

    What `restart` leaves free is found by a sweep, so that a restart costs O(1).
    """

    def __init__(self, total_count: int) -> None:
        self._total_count = total_count
        self._stack: list[int] = []
        self._sweep = self._num_unswept = total_count  # blocks from `_sweep` on are not in the stack

    def __len__(self) -> int:
        return len(self._stack) + self._num_unswept

    def restart(self, num_free: int, references: Sequence[int], parents: Sequence[int]) -> None:
        self._stack = []
        self._sweep = 0
        self._num_unswept = num_free

    def take(self, num_blocks: int, references: Sequence[int], parents: Sequence[int]) -> list[int]:
        while len(self._stack) < num_blocks:
            stop = min(self._sweep + max(num_blocks, 256), self._total_count)
            found = [b for b in range(stop - 1, self._sweep - 1, -1) if not references[b] and parents[b] < 0]
            self._stack[:0] = found
            self._num_unswept -= len(found)
            self._sweep = stop
        cut = len(self._stack) - num_blocks
        blocks = self._stack[cut:][::-1]
        del self._stack[cut:]
        return blocks

    def add(self, blocks: list[int]) -> None:
        if self._sweep < self._total_count:
            swept = [block for block in blocks if block < self._sweep]
            self._num_unswept += len(blocks) - len(swept)
            blocks = swept
        self._stack.extend(blocks)

    def listed(self, references: Sequence[int], parents: Sequence[int]) -> list[int]:
        swept = range(self._sweep, self._total_count)
        return [block for block in swept if not references[block] and parents[block] < 0] + self._stack


class BlocksByUnit:
    """Blocks of one call come from few units, and those units come first that have just enough free blocks.

    So units stay wholly free, or become so together. A change takes O(blocks of a unit).
    """

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
        """The units all of whose blocks are free."""
        return list(self._units_with[self._size])

    def restart(self, num_free: int, references: Sequence[int], parents: Sequence[int]) -> None:
        size = self._size
        self._units_with = [{} for _ in range(size + 1)]
        self._num_free = 0
        for unit in range(len(self._of_unit)):
            blocks = range((unit + 1) * size - 1, unit * size - 1, -1)
            self._of_unit[unit] = free = [b for b in blocks if not references[b] and parents[b] < 0]
            self._units_with[len(free)][unit] = None
            self._num_free += len(free)

    def take(self, num_blocks: int, references: Sequence[int], parents: Sequence[int]) -> list[int]:
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

    def add(self, blocks: list[int]) -> None:
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

    def listed(self, references: Sequence[int], parents: Sequence[int]) -> list[int]:
        for count, units in enumerate(self._units_with):
            assert all(len(self._of_unit[unit]) == count for unit in units), "a unit's count of blocks is off"
        assert sum(map(len, self._units_with)) == len(self._of_unit), "a unit is counted nowhere, or twice"
        listed = [block for free in self._of_unit for block in free]
        assert len(listed) == self._num_free, "the count of free blocks is off"
        return listed
