"""The index of cached KV blocks: their references, which is evicted next, and what was evicted."""

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterable, KeysView, Sequence
from typing import Literal

from .pool_stats import KV_REMOVAL_CAUSES, KVRemovalCause, Turnover

GhostKind = Literal["block", "continuation", "state", "refused state"]
"""What is gone under a prefix hash: its KV block, a block that continued it, its state, or a state for which
no slot was available."""
_BITS: dict[GhostKind, int] = {"block": 1, "continuation": 2, "state": 4, "refused state": 8}
_STATES = _BITS["state"] | _BITS["refused state"]


class GhostList:
    """A bounded map from the hashes of prefixes to the kinds of ghosts under them; O(1) a hash.

    A block that is registered again stays listed as gone. A state is listed until `remove_states` names it.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._young: dict[int, int] = {}  # hash -> bits
        self._old: dict[int, int] = {}  # cleared when the young one has `capacity` hashes
        self.num_lapses = 0  # how often that was

    def grow(self, capacity: int) -> None:
        """Remember at least so many hashes."""
        self.capacity = max(self.capacity, capacity)

    def add_all(self, hashes: Collection[int], kind: GhostKind) -> None:
        young, old, bit = self._young, self._old, _BITS[kind]
        others = ~_STATES if bit & _STATES else -1
        if young.keys().isdisjoint(hashes) and old.keys().isdisjoint(hashes):
            young.update(dict.fromkeys(hashes, bit))
        else:
            for prefix_hash in hashes:
                young[prefix_hash] = (young.get(prefix_hash) or old.get(prefix_hash, 0)) & others | bit
        if len(young) >= self.capacity:
            self.num_lapses += 1 if self._old or not self.capacity else 0
            self._old, self._young = (young if self.capacity else {}), {}

    def has(self, prefix_hash: int, kind: GhostKind) -> bool:
        return bool((self._young.get(prefix_hash) or self._old.get(prefix_hash, 0)) & _BITS[kind])

    def remove_states(self, hashes: Collection[int]) -> None:
        """The states under these hashes are there."""
        for generation in (self._young, self._old):
            if generation and not generation.keys().isdisjoint(hashes):
                for prefix_hash in generation.keys() & hashes:
                    generation[prefix_hash] &= ~_STATES
                    if not generation[prefix_hash]:
                        del generation[prefix_hash]

    def deepest_state(self, hashes: Sequence[int], start: int, stop: int) -> int:
        """The largest d in (start, stop] where the state under `hashes[d - 1]` is gone, else `start`."""
        young, old = self._young, self._old
        inside = hashes[start:stop][::-1]
        if not inside or (young.keys().isdisjoint(inside) and old.keys().isdisjoint(inside)):
            return start
        gone = ((young.get(prefix_hash) or old.get(prefix_hash, 0)) & _STATES for prefix_hash in inside)
        return next((stop - i for i, bits in enumerate(gone) if bits), start)

    def clear(self) -> None:
        self.num_lapses += 1
        self._young, self._old = {}, {}

    def __len__(self) -> int:
        return len(self._young.keys() | self._old.keys())


LeafEntry = tuple[bool, int, int]
"""(whether the block holds a state, when it was last used, block); the smallest entry goes first."""


class LeafOrder:
    """The order of eviction of leaves, cached blocks that none continues: stateless ones, then by use."""

    def __init__(self, timestamps: list[int]) -> None:
        """`timestamps`: each block's last use."""
        self.timestamps = timestamps
        self.connect(lambda block: False)
        self._heap: list[LeafEntry] = []
        self._entry_of: dict[int, LeafEntry] = {}  # an entry of the heap counts while it is here

    def connect(self, holds_state: Callable[[int], bool]) -> None:
        """Order leaves by `holds_state(block)` from now on: whether a prompt can resume there."""
        self.holds_state = holds_state

    @property
    def blocks(self) -> KeysView[int]:
        """The leaves, as a live view."""
        return self._entry_of.keys()

    @property
    def first(self) -> int:
        """The next leaf to go; -1 without a leaf."""
        while self._heap:
            entry = self._heap[0]
            if self._entry_of.get(entry[2]) is entry:
                return entry[2]
            heapq.heappop(self._heap)
        return -1

    def pop(self) -> int:
        """Remove and return the next leaf to go; there is one."""
        block = self.first
        heapq.heappop(self._heap)
        del self._entry_of[block]
        return block

    def push(self, block: int) -> None:
        """Give a leaf its place in the order; an earlier place of the leaf is void."""
        self._entry_of[block] = entry = (self.holds_state(block), self.timestamps[block], block)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entry_of) + 64:
            self._heap = list(self._entry_of.values())
            heapq.heapify(self._heap)

    def remove(self, block: int) -> None:
        """Remove a block that is held again, or continued; does nothing for a block without a place."""
        self._entry_of.pop(block, None)

    def reorder(self, blocks: Collection[int]) -> None:
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


Parent = int | bytes
"""What precedes a registered block: the block before it, or the root digest of a prefix's first block."""


class BlockTree:
    """Which KV block is cached under each prefix, who holds it, and what was evicted.

    A registered block lies below the block before it; a prefix's first block below the *origin*, which counts
    as a block that is always held. Arguments are numbers of blocks: `KVBlockAllocator` checks that.
    """

    def __init__(self, num_blocks: int) -> None:
        self._origin = num_blocks  # one more than the last block
        self.block_of_hash: dict[int, int] = {}
        self.ghosts = GhostList(2 * num_blocks)
        self.leaves = LeafOrder([0] * num_blocks)
        self.turnover = Turnover[KVRemovalCause](KV_REMOVAL_CAUSES)
        self.version = 0  # counts changes, and never falls
        self._serials = [0] * num_blocks  # for each block `version` at its registration
        self.references = [0] * num_blocks + [1]  # the origin's come last
        self.parents = [-1] * num_blocks  # -1: not registered
        self.num_children = [0] * (num_blocks + 1)
        self._num_held_children = [0] * (num_blocks + 1)
        # The last registration of each block; meaningless once the block is deregistered.
        self._hashes = [0] * num_blocks
        self._tokens = [b""] * num_blocks
        self._predecessors: list[Parent] = [-1] * num_blocks  # `parents`, with root digests for the origin

    def clear(self) -> None:
        """Remove every block and ghost."""
        num_blocks, num_registered = self._origin, len(self.block_of_hash)
        self.block_of_hash.clear()
        self.ghosts.clear()
        self.version += 1
        self.parents[:] = [-1] * num_blocks
        self.num_children[:] = [0] * (num_blocks + 1)
        self._num_held_children[:] = [0] * (num_blocks + 1)
        self.leaves.clear()
        self.turnover.by_cause["reset"] += num_registered

    def __contains__(self, block: int) -> bool:
        """Whether the block is registered."""
        return self.parents[block] >= 0

    def hash_of(self, block: int) -> int:
        """The hash that the block is registered under, or 0, which is no hash."""
        return self._hashes[block] if self.parents[block] >= 0 else 0

    def content_of(self, block: int) -> tuple[Parent, bytes]:
        """A registered block's parent (the block before it, or the root digest), and its token ids."""
        return self._predecessors[block], self._tokens[block]

    def hashes_to(self, block: int) -> list[int]:
        """The hashes of the registered blocks of a prefix, up to `block`, first block first; O(blocks)."""
        hashes: list[int] = []
        parents, own_hashes = self.parents, self._hashes
        while 0 <= block != self._origin and len(hashes) <= self._origin:
            hashes.append(own_hashes[block])
            block = parents[block]
        return hashes[::-1]

    def is_current(self, block: int, since: int) -> bool:
        """Whether a block registered at version `since` still is. Then every ancestor is, too."""
        return self.parents[block] >= 0 and self._serials[block] <= since

    def was_continued(self, prefix_hash: int) -> bool:
        """Whether a registered block continues the prefix with this hash, or one did that was evicted."""
        block = self.block_of_hash.get(prefix_hash, -1)
        return (block >= 0 and self.num_children[block] > 0) or self.ghosts.has(prefix_hash, "continuation")

    def match(self, parent: Parent, hashes: Sequence[int], tokens: Sequence[bytes]) -> list[int]:
        """The registered blocks that continue `parent`, up to the first unknown one; token ids count."""
        matched: list[int] = []
        predecessors, contents, block_of_hash = self._predecessors, self._tokens, self.block_of_hash
        for prefix_hash, content in zip(hashes, tokens, strict=True):
            block = block_of_hash.get(prefix_hash, -1)
            if block < 0 or contents[block] != content or predecessors[block] != parent:
                break
            matched.append(block)
            parent = block
        return matched

    def register(
        self, parent: Parent, blocks: Sequence[int], hashes: Sequence[int], tokens: Sequence[bytes]
    ) -> list[int]:
        """Enter consecutive, held blocks below `parent`; see `KVBlockAllocator.register_chain`."""
        canonical = self.match(parent, hashes, tokens)
        num_known = len(canonical)
        parent = canonical[-1] if canonical else parent
        before = self._origin if isinstance(parent, bytes) else parent
        block_of_hash, parents, num_held = self.block_of_hash, self.parents, self._num_held_children
        own_hashes, contents, num_children = self._hashes, self._tokens, self.num_children
        serials, predecessors = self._serials, self._predecessors
        self.version = version = self.version + 1
        new = slice(num_known, None)
        for block, prefix_hash, content in zip(blocks[new], hashes[new], tokens[new], strict=True):
            if prefix_hash in block_of_hash:  # the hash of another prefix, which `match` did not accept
                break
            block_of_hash[prefix_hash] = block
            own_hashes[block] = prefix_hash
            contents[block] = content
            serials[block] = version
            predecessors[block] = parent
            parents[block] = before
            num_children[before] += 1
            num_held[before] += 1
            canonical.append(block)
            parent, before = block, block
        if 0 < num_known < len(canonical):  # the duplicate is continued now, and so is no leaf
            self.leaves.remove(canonical[num_known - 1])
        self.turnover.num_entered += len(canonical) - num_known
        return canonical

    # ---- references

    def set_references(self, blocks: Iterable[int], count: int) -> None:
        """These unregistered blocks are held so often."""
        references = self.references
        for block in blocks:
            references[block] = count

    def clear_references(self) -> None:
        """No block is held, or was used; none may be registered."""
        self.set_references(range(self._origin), 0)
        self.leaves.timestamps[:] = [0] * self._origin

    def hold(self, blocks: Sequence[int]) -> int:
        """Add a reference to each of these held or registered blocks, parents first; how many were cached."""
        references, parents, num_held = self.references, self.parents, self._num_held_children
        seen: set[int] = set()
        for block in blocks:
            seen.add(block)
            if references[block]:
                continue
            parent = parents[block]
            if parent < 0:
                raise ValueError(
                    f"block_ids names {block}; accepted: held or registered blocks, this one is free"
                )
            if not references[parent] and parent not in seen:
                raise ValueError(
                    f"block_ids names {block}; accepted: after its parent {parent}, which is not held"
                )
        num_cached = 0
        for block in blocks:
            if references[block] == 0:
                num_cached += 1
                self.leaves.remove(block)
                num_held[parents[block]] += 1
            references[block] += 1
        return num_cached

    def release(self, blocks: Sequence[int], now_ns: int) -> tuple[list[int], list[int]]:
        """Remove a reference from each of these blocks, and set their last use.

        Returns the blocks without a reference now: registered ones and others, both from the last one on.
        """
        references, parents, num_held = self.references, self.parents, self._num_held_children
        remaining = [references[block] - 1 for block in blocks]
        unheld = blocks
        if any(remaining):
            if -1 in remaining:
                block = blocks[remaining.index(-1)]
                raise ValueError(f"block_ids names {block}; accepted: held blocks")
            unheld = [block for block, count in zip(blocks, remaining, strict=True) if not count]
        if len(set(blocks)) < len(blocks):
            raise ValueError(f"block_ids is {blocks}; accepted: distinct blocks")
        cached = [block for block in reversed(unheld) if parents[block] >= 0]
        for block in cached:
            num_held[parents[block]] -= 1
        if sum([num_held[block] for block in cached]):
            continued = next(block for block in reversed(cached) if num_held[block])
            for block in cached:
                num_held[parents[block]] += 1
            raise ValueError(f"block_ids names {continued}; accepted: with the held blocks that continue it")
        for block, count in zip(blocks, remaining, strict=True):
            references[block] = count
        leaves, num_children = self.leaves, self.num_children
        timestamps = leaves.timestamps
        for block in cached:
            timestamps[block] = now_ns
            if not num_children[block]:
                leaves.push(block)
        if len(cached) == len(unheld):
            return cached, []
        return cached, [block for block in reversed(unheld) if parents[block] < 0]

    # ---- eviction

    def take_leaves(self, num_blocks: int) -> list[int]:
        """Take the next blocks to evict, which are there; parents follow their children."""
        taken: list[int] = []
        for _ in range(num_blocks):
            taken.append(block := self.leaves.pop())
            self._decrement_children(self.parents[block])
        return taken

    def take_leaf(self, block: int) -> bool:
        """Take this cached block; False, with nothing done, where another block continues it."""
        is_leaf = not self.num_children[block]
        if is_leaf:
            self.leaves.remove(block)
            self._decrement_children(self.parents[block])
        return is_leaf

    def _decrement_children(self, parent: int) -> None:
        self.num_children[parent] = num_children = self.num_children[parent] - 1
        if not num_children and not self.references[parent]:
            self.leaves.push(parent)

    def put_back(self, blocks: list[int]) -> None:
        """Put blocks back that were taken, and were not deregistered."""
        for block in blocks:
            self.num_children[self.parents[block]] += 1
            self.leaves.remove(self.parents[block])
        for block in blocks:
            if not self.num_children[block]:
                self.leaves.push(block)

    def deregister(self, blocks: Sequence[int], cause: KVRemovalCause) -> list[int]:
        """Remove blocks that were taken as leaves; returns their hashes."""
        own_hashes, parents, block_of_hash = self._hashes, self.parents, self.block_of_hash
        hashes = [own_hashes[block] for block in blocks]
        for prefix_hash in hashes:
            del block_of_hash[prefix_hash]
        self.ghosts.add_all(hashes, "block")
        before = {parents[block] for block in blocks}
        before.discard(self._origin)
        self.ghosts.add_all([own_hashes[block] for block in before], "continuation")
        self.version += 1
        for block in blocks:
            parents[block] = -1
        self.turnover.by_cause[cause] += len(hashes)
        return hashes

    def check_integrity(self, held: set[int]) -> None:
        """Raise AssertionError where the maps contradict each other; `held`: the blocks that are held."""
        registered = {block for block, parent in enumerate(self.parents) if parent >= 0}
        self.turnover.check_integrity(len(registered), "KV blocks")
        assert {self._hashes[b]: b for b in registered} == self.block_of_hash, "a block's hash is another"
        for counts, blocks in ((self.num_children, registered), (self._num_held_children, registered & held)):
            counted = Counter(self.parents[block] for block in blocks)
            assert counts == [counted[b] for b in range(self._origin + 1)], "a count of children is off"
            assert counted.keys() <= registered | {self._origin}, "a block's parent is not registered"
        for block in registered:
            parent = self.parents[block]
            older = parent == self._origin or self._serials[parent] <= self._serials[block]
            assert older, "a block is older than its parent"
            assert self._serials[block] <= self.version, "a block is newer than the version"
        held_parents = {self.parents[block] for block in registered & held}
        assert held_parents <= held | {self._origin}, "a block is held, its parent is not"
        leaves = {block for block in registered - held if not self.num_children[block]}
        assert leaves == self.leaves.blocks, "the cached leaves are others"
        self.leaves.check_integrity()
