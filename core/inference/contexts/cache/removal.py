"""Which cached KV block is removed next, and what was removed under which hash."""

import heapq
from collections.abc import Callable, Collection, Iterable, KeysView, Sequence
from typing import Literal

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
    def first(self) -> LeafEntry | None:
        """The entry of the next leaf to go; None without a leaf."""
        while self._heap:
            entry = self._heap[0]
            if self._entry_of.get(entry[2]) is entry:
                return entry
            heapq.heappop(self._heap)
        return None

    def take(self) -> int:
        """Remove and return the next leaf to go; there is one."""
        while True:
            entry = heapq.heappop(self._heap)
            if self._entry_of.get(entry[2]) is entry:
                del self._entry_of[entry[2]]
                return entry[2]

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

    def clear(self) -> None:
        self._heap.clear()
        self._entry_of.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError where a leaf's entry is missing from the heap or is of another time."""
        offered = set(map(id, self._heap))
        for block, entry in self._entry_of.items():
            assert id(entry) in offered, "an evictable leaf is not offered"
            expected = (self.holds_state(block), self.timestamps[block], block)
            assert entry == expected, "a leaf is offered under another time, or as with another state"


GoneFact = Literal["block", "continuation", "state", "refused state"]
"""What is gone under a prefix hash: its KV block, a block that continued it, its state, or a state for which
no slot was available."""
_BITS: dict[GoneFact, int] = {"block": 1, "continuation": 2, "state": 4, "refused state": 8}
_STATES = _BITS["state"] | _BITS["refused state"]


class GhostList:
    """A bounded map from the hashes of prefixes to what is gone under them; O(1) a hash.

    Two generations: once the younger one has `capacity` hashes, the older one is forgotten at once;
    `num_lapses` counts that. What is there again (a block that is registered, a state of a host that is not
    named yet) may still be listed.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._young: dict[int, int] = {}  # hash -> bits
        self._old: dict[int, int] = {}
        self.num_lapses = 0

    def add_all(self, keys: Collection[int], fact: GoneFact) -> None:
        young, old, bit = self._young, self._old, _BITS[fact]
        others = ~_STATES if bit & _STATES else -1
        if young.keys().isdisjoint(keys) and old.keys().isdisjoint(keys):
            young.update(dict.fromkeys(keys, bit))
        else:
            for key in keys:
                young[key] = (young.get(key) or old.get(key, 0)) & others | bit
        if len(young) >= self.capacity:
            self.num_lapses += bool(self._old) or not self.capacity
            self._old, self._young = (young if self.capacity else {}), {}

    def has(self, key: int, fact: GoneFact) -> bool:
        return bool((self._young.get(key) or self._old.get(key, 0)) & _BITS[fact])

    def discard_states(self, keys: Iterable[int]) -> None:
        """Note that the states under these hashes are there."""
        for generation in (self._young, self._old):
            if generation and not generation.keys().isdisjoint(keys):
                for key in generation.keys() & keys:
                    generation[key] &= ~_STATES
                    if not generation[key]:
                        del generation[key]

    def deepest_state(self, keys: Sequence[int], start: int, stop: int) -> int:
        """The largest d in (start, stop] where the state under `keys[d - 1]` is gone, else `start`."""
        young, old = self._young, self._old
        inside = keys[start:stop][::-1]
        if not inside or (young.keys().isdisjoint(inside) and old.keys().isdisjoint(inside)):
            return start
        gone = ((young.get(key) or old.get(key, 0)) & _STATES for key in inside)
        return next((stop - i for i, bits in enumerate(gone) if bits), start)

    def clear(self) -> None:
        self.num_lapses += 1
        self._young, self._old = {}, {}

    def __len__(self) -> int:
        return len(self._young.keys() | self._old.keys())
