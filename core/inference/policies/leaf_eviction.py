"""Which cached KV block goes when memory is needed."""

import heapq
from collections.abc import Callable, Iterable, KeysView

LeafEntry = tuple[bool, int, int]
"""Whether the block holds a state, when it was used last, the block: the smallest entry goes first."""


class LeafEviction:
    """Orders the cached blocks that no registered block continues: the only ones that may be evicted.

    Blocks without a state go first, because nothing can resume there; then those used longest ago. A heap
    holds the entries; an entry counts only while `_entry_of` names it, so that a block leaves, or changes its
    place, in O(log leaves).

    Attributes:
        holds_state: callable(block) -> bool; the owner of the states sets it.
    """

    def __init__(self, timestamps: list[int]) -> None:
        """`timestamps`: of every block, when it was used last; the owner writes the list in place."""
        self.holds_state: Callable[[int], bool] = lambda block: False
        self._timestamps = timestamps
        self._heap: list[LeafEntry] = []
        self._entry_of: dict[int, LeafEntry] = {}

    @property
    def blocks(self) -> KeysView[int]:
        """The leaves; a view of what is now."""
        return self._entry_of.keys()

    def offer(self, block: int) -> None:
        """Give a cached block that nothing continues its place, instead of an earlier place."""
        self._entry_of[block] = entry = (self.holds_state(block), self._timestamps[block], block)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entry_of) + 64:
            self._heap = list(self._entry_of.values())
            heapq.heapify(self._heap)

    def withdraw(self, block: int) -> None:
        """The block is no leaf any more, or held again; nothing to do for one that was not offered."""
        self._entry_of.pop(block, None)

    def note_states_changed(self, blocks: Iterable[int]) -> None:
        """These blocks gained or lost their states: the places of the leaves among them follow."""
        entry_of = self._entry_of
        if entry_of and not entry_of.keys().isdisjoint(blocks):
            for block in blocks:
                if block in entry_of:
                    self.offer(block)

    def pop(self, num_blocks: int, parent_left_as_leaf: Callable[[int], int]) -> list[int]:
        """Take the next `num_blocks` blocks out of the order; there must be as many cached ones.

        Args:
            num_blocks: how many to take.
            parent_left_as_leaf: called with each taken block; returns the parent if the parent becomes a leaf
                without the block, else -1. Often the parent is the next to go.
        """
        taken: list[int] = []
        entry_of, holds_state, timestamps = self._entry_of, self.holds_state, self._timestamps
        newest: LeafEntry | None = None
        while len(taken) < num_blocks:
            entry = heapq.heappushpop(self._heap, newest) if newest else heapq.heappop(self._heap)
            held_state, _, block = entry
            if entry is not newest:
                if entry_of.get(block) is not entry:
                    newest = None
                    continue
                if holds_state(block) != held_state:
                    newest = None
                    self.offer(block)
                    continue
            del entry_of[block]
            taken.append(block)
            parent = parent_left_as_leaf(block)
            newest = None
            if parent >= 0:
                newest = entry_of[parent] = (holds_state(parent), timestamps[parent], parent)
        if newest:
            heapq.heappush(self._heap, newest)
        return taken

    def clear(self) -> None:
        self._heap.clear()
        self._entry_of.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError where a leaf's entry is missing from the heap or shows another time."""
        offered = set(map(id, self._heap))
        for block, entry in self._entry_of.items():
            assert id(entry) in offered, "an evictable leaf is not offered"
            assert entry[1:] == (self._timestamps[block], block), "a leaf is offered under another time"
