"""The free entries of pools: KV blocks in a memory of units, and which entries are not zero yet."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

Zero = Callable[[Sequence[int]], None]


class BlocksByUnit:
    """The free list in a memory of units: blocks come from units with just enough; O(blocks of a unit)."""

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

    def reset(self, free: list[int]) -> None:
        self._of_unit = [[] for _ in self._of_unit]
        for block in free:
            self._of_unit[block // self._size].append(block)
        self._units_with = [{} for _ in range(self._size + 1)]
        for unit, blocks in enumerate(self._of_unit):
            self._units_with[len(blocks)][unit] = None
        self._num_free = len(free)

    def allocate(self, num_blocks: int) -> list[int]:
        blocks: list[int] = []
        while num_missing := num_blocks - len(blocks):
            enough = range(min(num_missing, self._size), self._size + 1)
            count = next((n for n in enough if self._units_with[n]), 0)
            count = count or next(n for n in range(enough.start - 1, 0, -1) if self._units_with[n])
            unit = next(iter(self._units_with[count]))
            cut = max(0, count - num_missing)
            blocks += self._of_unit[unit][cut:][::-1]
            self._set(unit, self._of_unit[unit][:cut])
        return blocks

    def extend(self, blocks: Iterable[int]) -> None:
        by_unit: dict[int, list[int]] = {}
        for block in blocks:
            by_unit.setdefault(block // self._size, []).append(block)
        for unit, free in by_unit.items():
            self._set(unit, self._of_unit[unit] + free)

    def allocate_unit(self, unit: int) -> None:
        """Allocate the blocks of a unit that is wholly free."""
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


class DirtyEntries:
    """Dirty set of one pool: its free entries that are not zero yet; empty without `zero`."""

    def __init__(self, zero: Zero | None = None) -> None:
        """`zero`: fills entries with zeros, in stream order; called with distinct entries in order."""
        self.scrubs = zero is not None  # callers that free and allocate often ask this first
        self._zero = zero
        self._entries: set[int] = set()

    def add(self, entries: Iterable[int]) -> None:
        """These entries are free now, and not zero."""
        if self._zero is not None:
            self._entries.update(entries)

    def scrub(self, entries: Iterable[int]) -> None:
        """Zero those of these entries that are dirty, before they are allocated."""
        if self._entries and self._zero is not None and (dirty := self._entries.intersection(entries)):
            self._zero(sorted(dirty))
            self._entries -= dirty  # last: an interrupted call zeroes again

    def has_any(self, entries: Iterable[int]) -> bool:
        return not self._entries.isdisjoint(entries)

    def remove(self, entries: Iterable[int]) -> None:
        """These entries are zero, or another pool owns their memory."""
        self._entries.difference_update(entries)

    def scrub_all(self) -> None:
        """Zero all dirty entries."""
        if self._entries:
            self.scrub(self._entries.copy())

    def clear(self) -> None:
        """The pool has no memory, or is all zeros."""
        self._entries.clear()


class MemoryScrubber:
    """Zeroes freed entries of the pools before another owner can have them; this one zeroes nothing."""

    def __init__(self) -> None:
        self.blocks = DirtyEntries()
        self.slots = DirtyEntries()

    def move_unit(self, unit: int, entries: Sequence[int], dirty: DirtyEntries) -> None:
        """Zero a unit of shared memory before it changes sides; `entries`, `dirty`: of the freeing side."""
