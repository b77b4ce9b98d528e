"""The order in which cached KV blocks are evicted."""

import heapq
from collections.abc import Callable, Iterable, KeysView

LeafEntry = tuple[bool, int, int]
"""(whether the block holds a state, when it was last used, block); the smallest entry goes first."""


class LeafOrder:
    """The order of eviction of leaves: cached blocks that no registered block continues.

    Leaves without a state go first, because nothing can resume there; then the least recently used. A heap
    holds the entries; an entry counts only while `_entry_of` names it: a change costs O(log leaves).
    """

    def __init__(self, timestamps: list[int], holds_state: Callable[[int], bool]) -> None:
        """`timestamps`: each block's last use; `holds_state(block)`: whether a prompt can resume there."""
        self.timestamps = timestamps
        self.holds_state = holds_state
        self._heap: list[LeafEntry] = []
        self._entry_of: dict[int, LeafEntry] = {}

    @property
    def blocks(self) -> KeysView[int]:
        """The leaves, as a live view."""
        return self._entry_of.keys()

    @property
    def first_is_stateless(self) -> bool:
        """Whether the next leaf to go holds no state; False where there is none."""
        while self._heap:
            entry = self._heap[0]
            if self._entry_of.get(entry[2]) is not entry:
                heapq.heappop(self._heap)
            elif self.holds_state(entry[2]) != entry[0]:
                heapq.heappop(self._heap)
                self.offer(entry[2])
            else:
                return not entry[0]
        return False

    def offer(self, block: int) -> None:
        """Give a leaf its place in the order; an earlier place of the leaf is void."""
        self._entry_of[block] = entry = (self.holds_state(block), self.timestamps[block], block)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entry_of) + 64:
            self._heap = list(self._entry_of.values())
            heapq.heapify(self._heap)

    def withdraw(self, block: int) -> None:
        """Remove a block that is held again, or continued; does nothing for a block without a place."""
        self._entry_of.pop(block, None)

    def note_states_changed(self, blocks: Iterable[int]) -> None:
        """Give the leaves among these blocks new places: the blocks gained or lost a state."""
        entry_of = self._entry_of
        if entry_of and not entry_of.keys().isdisjoint(blocks):
            for block in blocks:
                if block in entry_of:
                    self.offer(block)

    def pop(self, num_blocks: int, leaf_parent: Callable[[int], int]) -> list[int]:
        """Remove the next blocks; `leaf_parent(block)`: the parent that becomes a leaf then, or -1."""
        taken: list[int] = []
        entry_of, holds_state, timestamps = self._entry_of, self.holds_state, self.timestamps
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
            parent = leaf_parent(block)
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
            assert entry[1:] == (self.timestamps[block], block), "a leaf is offered under another time"
