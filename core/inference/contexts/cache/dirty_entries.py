"""Which free entries of a pool are not zero yet, and who zeroes them."""

from collections.abc import Callable, Iterable, Sequence

Zero = Callable[[Sequence[int]], None]


class DirtyEntries:
    """Dirty set of one pool: its free entries that are not zero yet; empty without `zero`."""

    def __init__(self, zero: Zero | None = None) -> None:
        """`zero`: fills entries with zeros, in stream order; called with distinct numbers in order."""
        self.zeroes = zero is not None  # callers that free and allocate often ask this first
        self._zero = zero
        self._entries: set[int] = set()

    def add(self, entries: Iterable[int]) -> None:
        """These entries are free now, and not zero."""
        if self._zero is not None:
            self._entries.update(entries)

    def clean(self, entries: Iterable[int]) -> None:
        """Zero those of these entries that are dirty, before they are allocated."""
        if self._entries and self._zero is not None:
            found = self._entries.intersection(entries)
            if found:
                self._zero(sorted(found))
                self._entries -= found  # last: an interrupted call zeroes again

    def has_any(self, entries: Iterable[int]) -> bool:
        return not self._entries.isdisjoint(entries)

    def remove(self, entries: Iterable[int]) -> None:
        """These entries are zero, or another pool owns their memory."""
        self._entries.difference_update(entries)

    def scrub(self) -> None:
        """Zero all dirty entries."""
        if self._entries:
            self.clean(self._entries.copy())

    def clear(self) -> None:
        """The pool has no memory, or is all zeros."""
        self._entries.clear()


class MemoryCleaner:
    """Zeroes freed entries of the pools before another owner can have them; this one zeroes nothing."""

    def __init__(self) -> None:
        self.blocks = DirtyEntries()
        self.slots = DirtyEntries()

    def move_unit(self, unit: int, entries: Sequence[int], dirty: DirtyEntries) -> None:
        """Zero a unit of shared memory before it changes sides; `entries`, `dirty`: of the freeing side."""
