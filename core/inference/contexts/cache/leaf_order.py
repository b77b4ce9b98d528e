"""Which cached block is evicted next."""

import heapq
from collections.abc import Callable, Iterable, KeysView

LeafEntry = tuple[bool, int, int]
"""(whether the block holds a state, when it was last used, block); the smallest entry goes first."""


class LeafOrder:
    """The order of eviction of leaves, cached blocks that none continues: stateless ones, then by use."""

    def __init__(
        self, timestamps: list[int], holds_state: Callable[[int], bool] = lambda block: False
    ) -> None:
        """`timestamps`: each block's last use; `holds_state(block)`: whether a prompt can resume there."""
        self.timestamps = timestamps
        self.holds_state = holds_state
        self._heap: list[LeafEntry] = []
        self._entry_of: dict[int, LeafEntry] = {}  # an entry of the heap counts while it is here

    @property
    def blocks(self) -> KeysView[int]:
        """The leaves, as a live view."""
        return self._entry_of.keys()

    @property
    def first(self) -> LeafEntry | None:
        """The entry of the next leaf to go; None without a leaf."""
        while self._heap:
            entry = self._heap[0]
            if self._entry_of.get(entry[2]) is entry:
                return entry
            heapq.heappop(self._heap)
        return None

    def pop(self) -> int:
        """Remove and return the next leaf to go; there is one."""
        while True:
            entry = heapq.heappop(self._heap)
            if self._entry_of.get(entry[2]) is entry:
                del self._entry_of[entry[2]]
                return entry[2]

    def push(self, block: int) -> None:
        """Give a leaf its place in the order; an earlier place of the leaf is void."""
        self._entry_of[block] = entry = (self.holds_state(block), self.timestamps[block], block)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entry_of) + 64:
            self._heap = list(self._entry_of.values())
            heapq.heapify(self._heap)

    def discard(self, block: int) -> None:
        """Remove a block that is held again, or continued; does nothing for a block without a place."""
        self._entry_of.pop(block, None)

    def note_states_changed(self, blocks: Iterable[int]) -> None:
        """Give the leaves among these blocks new places: the blocks gained or lost a state."""
        entry_of = self._entry_of
        if entry_of and not entry_of.keys().isdisjoint(blocks):
            for block in blocks:
                if block in entry_of:
                    self.push(block)

    def clear(self) -> None:
        self._heap.clear()
        self._entry_of.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError where a leaf's entry is missing from the heap or is of another time."""
        entries = set(map(id, self._heap))
        for block, entry in self._entry_of.items():
            assert id(entry) in entries, "an evictable leaf is not in the heap"
            expected = (self.holds_state(block), self.timestamps[block], block)
            assert entry == expected, "a leaf has the entry of another time, or of another state"
