"""Which entries of a pool somebody has left, and hold bytes still."""

from collections.abc import Callable, Iterable, Sequence

Zero = Callable[[Sequence[int]], None]


class LeftEntries:
    """The free entries of one pool that are not zero yet; of the pool's numbers, as its book has them.

    The book of the pool notes each entry that it frees, and tells of each entry that it gives to somebody. So
    whoever gets an entry gets zeros, and `scrub` makes zeros of what nobody has taken. Without `zero` nothing
    is noted and nothing is done.

    An entry is zero before it is no longer noted: a call that is interrupted zeroes it again.
    """

    def __init__(self, zero: Zero | None = None) -> None:
        """`zero`: fills entries with zeros, in stream order; called with distinct numbers in order."""
        self._zero = zero
        self._entries: set[int] = set()

    @property
    def is_active(self) -> bool:
        return self._zero is not None

    def note(self, entries: Iterable[int]) -> None:
        """Note that nobody owns these entries any more."""
        if self._zero is not None:
            self._entries.update(entries)

    def give(self, entries: Iterable[int]) -> None:
        """Zero those of these entries that are left: somebody is about to own them."""
        if self._entries and self._zero is not None:
            found = self._entries.intersection(entries)
            if found:
                self._zero(sorted(found))
                self._entries -= found

    def pass_on(self, entries: Sequence[int]) -> None:
        """Zero these entries, whose owner changes."""
        self.note(entries)
        self.give(entries)

    def has_any(self, entries: Iterable[int]) -> bool:
        """Whether one of these entries is left."""
        return not self._entries.isdisjoint(entries)

    def withdraw(self, entries: Iterable[int]) -> None:
        """Note that these entries are zero, or that their memory is not this pool's any more."""
        self._entries.difference_update(entries)

    def scrub(self) -> None:
        """Zero all that is left."""
        if self._entries:
            self.give(self._entries.copy())

    def clear(self) -> None:
        """Note that the pool has no memory, or is all zeros."""
        self._entries.clear()


class MemoryCleaner:
    """Zeroes freed entries of the pools before another owner can have them; this one zeroes nothing."""

    def __init__(self) -> None:
        self.blocks = LeftEntries()
        self.slots = LeftEntries()

    def move_unit(self, unit: int, entries: Sequence[int], left: LeftEntries) -> None:
        """Zero a unit of shared memory before it changes sides; `entries`, `left`: of the freeing side."""
