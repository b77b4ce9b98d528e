"""The index of cached prefixes: registered KV blocks, the states at their ends, and what was evicted."""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from itertools import islice

from .ghosts import GhostList
from .leaf_order import LeafOrder
from .pool_stats import (
    EVICTIONS,
    KV_REMOVAL_CAUSES,
    STATE_EVICTIONS,
    STATE_REMOVAL_CAUSES,
    KVRemovalCause,
    StateRemovalCause,
    Turnover,
)
from .tier import HostTier

Parent = int | bytes
"""What precedes a registered block: the block before it, or the root digest of a prefix's first block."""
_MAX_CHANGES = 4096


class PrefixTree:
    """What is cached under each prefix: a KV block, perhaps the state at its end, and why either is gone.

    A registered block lies below the block before it; a prefix's first block below the *origin*, which counts
    as a block that is always held. Arguments are numbers of blocks: `KVBlockAllocator` checks that.
    """

    def __init__(self, num_blocks: int) -> None:
        self._origin = num_blocks  # one more than the last block
        self.block_of_key: dict[int, int] = {}
        self.ghosts = GhostList(2 * num_blocks)
        self.offloaded: HostTier | frozenset[int] = frozenset()  # hashes with a copy in a tier
        self.slot_of_block: dict[int, int] = {}  # of the state at its end, in the order of commits
        self.state_block_of_key: dict[int, int] = {}  # prefix hash -> the block whose state it finds
        self.used: set[int] = set()  # slots from which a request resumed since their commit
        self._block_of_slot: list[int] = []  # for each slot its last block; stale without a state
        self._key_of_slot: list[int] = []  # for each slot the hash that finds its state, or 0; stale without
        self._last_used_ns: list[int] = []  # for each slot, by `_latest_ns`; stale without a state
        self._latest_ns = 0  # no two changes happen at one time, also where the caller's clock stands
        self.leaves = LeafOrder([0] * num_blocks, self.holds_state)
        self.turnover = Turnover[KVRemovalCause](KV_REMOVAL_CAUSES)
        self.state_turnover = Turnover[StateRemovalCause](STATE_REMOVAL_CAUSES)
        self.block_version = self.state_version = self.num_changes = 0  # of blocks, of states; never set back
        self._changed = deque[int](maxlen=_MAX_CHANGES)  # the hashes of the last changes
        self._serials = [0] * num_blocks  # for each block `block_version` at its registration
        self.references = [0] * num_blocks + [1]  # the origin's come last
        self.parents = [-1] * num_blocks  # -1: not registered
        self.num_children = [0] * (num_blocks + 1)
        self._num_held_children = [0] * (num_blocks + 1)
        # The last registration of each block; meaningless once the block is deregistered.
        self._keys = [-1] * num_blocks
        self._tokens = [b""] * num_blocks
        self._root_digests: dict[int, bytes] = {}

    def clear(self) -> None:
        """Remove every block and ghost; `clear_states` removes the states."""
        num_blocks, num_registered = self._origin, len(self.block_of_key)
        self.block_of_key.clear()
        self.ghosts.clear()
        self.block_version += 1
        self.parents[:] = [-1] * num_blocks
        self.num_children[:] = [0] * (num_blocks + 1)
        self._num_held_children[:] = [0] * (num_blocks + 1)
        self._root_digests.clear()
        self.leaves.clear()
        self.turnover.by_cause["reset"] += num_registered

    def __contains__(self, block: int) -> bool:
        """Whether the block is registered."""
        return self.parents[block] >= 0

    def key_of(self, block: int) -> int:
        """The key of the block: the hash that it is registered under, or -1."""
        return self._keys[block] if self.parents[block] >= 0 else -1

    def content_of(self, block: int) -> tuple[Parent, bytes]:
        """A registered block's parent (the block before it, or the root digest), and its token ids."""
        parent = self.parents[block]
        return self._root_digests[block] if parent == self._origin else parent, self._tokens[block]

    def keys_to(self, block: int) -> list[int]:
        """The hashes of the registered blocks of a prefix, up to `block`, first block first; O(blocks)."""
        keys: list[int] = []
        parents, own_keys = self.parents, self._keys
        while 0 <= block != self._origin and len(keys) <= self._origin:
            keys.append(own_keys[block])
            block = parents[block]
        return keys[::-1]

    def is_current(self, block: int, since: int) -> bool:
        """Whether a block registered at version `since` still is. Then every ancestor is, too."""
        return self.parents[block] >= 0 and self._serials[block] <= since

    def was_continued(self, key: int) -> bool:
        """Whether a registered block continues the prefix with this hash, or one did that was evicted."""
        block = self.block_of_key.get(key, -1)
        return (block >= 0 and self.num_children[block] > 0) or self.ghosts.has(key, "continuation")

    def match(self, parent: Parent, keys: Sequence[int], tokens: Sequence[bytes]) -> list[int]:
        """The registered blocks that continue `parent`, up to the first unknown one; token ids count."""
        matched: list[int] = []
        parents, contents, block_of_key = self.parents, self._tokens, self.block_of_key
        for key, content in zip(keys, tokens, strict=True):
            block = block_of_key.get(key, -1)
            if block < 0 or contents[block] != content:
                break
            before = parents[block]
            if before != parent and not (before == self._origin and self._root_digests[block] == parent):
                break
            matched.append(block)
            parent = block
        return matched

    def register(
        self, parent: Parent, blocks: Sequence[int], keys: Sequence[int], tokens: Sequence[bytes]
    ) -> list[int]:
        """Enter consecutive, held blocks below `parent`; see `KVBlockAllocator.register_chain`."""
        canonical = self.match(parent, keys, tokens)
        num_known = len(canonical)
        before = canonical[-1] if canonical else self._origin if isinstance(parent, bytes) else parent
        block_of_key, parents, num_held = self.block_of_key, self.parents, self._num_held_children
        own_keys, contents, num_children = self._keys, self._tokens, self.num_children
        serials = self._serials
        self.block_version = version = self.block_version + 1
        if before == self._origin and isinstance(parent, bytes) and blocks and keys[0] not in block_of_key:
            self._root_digests[blocks[0]] = parent
        for block, key, content in zip(blocks[num_known:], keys[num_known:], tokens[num_known:], strict=True):
            if key in block_of_key:  # the key of another prefix, which `match` did not accept
                break
            block_of_key[key] = block
            own_keys[block] = key
            contents[block] = content
            serials[block] = version
            parents[block] = before
            num_children[before] += 1
            num_held[before] += 1
            canonical.append(block)
            before = block
        if 0 < num_known < len(canonical):  # the duplicate is continued now, and so is no leaf
            self.leaves.discard(canonical[num_known - 1])
        self.turnover.num_entered += len(canonical) - num_known
        return canonical

    # ---- references

    def set_references(self, blocks: Iterable[int], count: int) -> None:
        """Note that these unregistered blocks are held so often."""
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
                self.leaves.discard(block)
                num_held[parents[block]] += 1
            references[block] += 1
        return num_cached

    def release(self, blocks: Sequence[int], now_ns: int) -> tuple[list[int], list[int]]:
        """Remove a reference from each of these blocks, and note their last use.

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
            self._note_child_taken(self.parents[block])
        return taken

    def take_leaf(self, block: int) -> bool:
        """Take this cached block; False, with nothing done, where another block continues it."""
        is_leaf = not self.num_children[block]
        if is_leaf:
            self.leaves.discard(block)
            self._note_child_taken(self.parents[block])
        return is_leaf

    def _note_child_taken(self, parent: int) -> None:
        self.num_children[parent] = num_children = self.num_children[parent] - 1
        if not num_children and not self.references[parent]:
            self.leaves.push(parent)

    def put_back(self, blocks: list[int]) -> None:
        """Put blocks back that were taken, and were not deregistered."""
        for block in blocks:
            self.num_children[self.parents[block]] += 1
            self.leaves.discard(self.parents[block])
        for block in blocks:
            if not self.num_children[block]:
                self.leaves.push(block)

    def deregister(self, blocks: Sequence[int], cause: KVRemovalCause) -> list[int]:
        """Remove blocks that were taken as leaves; returns their keys."""
        own_keys, parents, block_of_key = self._keys, self.parents, self.block_of_key
        keys = [own_keys[block] for block in blocks]
        for key in keys:
            del block_of_key[key]
        self.ghosts.add_all(keys, "block")
        before = {parents[block] for block in blocks}
        before.discard(self._origin)
        self.ghosts.add_all([own_keys[block] for block in before], "continuation")
        self.block_version += 1
        for block in blocks:
            parents[block] = -1
        self.turnover.by_cause[cause] += len(keys)
        return keys

    # ---- states

    def add_slots(self, num_slots: int, num_ghosts: int) -> None:
        """States are in slots 0 .. num_slots - 1; at least so many ghosts are remembered."""
        self._block_of_slot = [-1] * num_slots
        self._key_of_slot = [0] * num_slots
        self._last_used_ns = [0] * num_slots
        self.ghosts.capacity = max(self.ghosts.capacity, num_ghosts)

    def slot_of(self, block: int) -> int:
        """The slot of the block's state, or -1."""
        return self.slot_of_block.get(block, -1)

    def block_of(self, slot: int) -> int:
        """The block whose state the slot holds, or -1."""
        block = self._block_of_slot[slot]
        return block if self.slot_of_block.get(block) == slot else -1

    def blocks_of(self, slots: Iterable[int]) -> list[int]:
        """The blocks of slots that hold states."""
        return [self._block_of_slot[slot] for slot in slots]

    def state_key_of(self, block: int) -> int:
        """The hash under which the block's state is found, or -1."""
        slot = self.slot_of_block.get(block, -1)
        return self._key_of_slot[slot] or -1 if slot >= 0 else -1

    def holds_state(self, block: int) -> bool:
        """Whether the registered block's state is in a slot, or has a copy in a tier."""
        return block in self.slot_of_block or self._keys[block] in self.offloaded

    def states_by_recency(self) -> list[int]:
        """The slots of all states, least recently used first: the same on all ranks, under all policies."""
        return sorted(self.slot_of_block.values(), key=self._last_used_ns.__getitem__)

    def insert_states(self, blocks: Sequence[int], slots: Sequence[int], now_ns: int) -> None:
        """The slots hold the blocks' states; no hash finds these states yet."""
        slot_of_block, block_of_slot = self.slot_of_block, self._block_of_slot
        key_of_slot, last_used_ns = self._key_of_slot, self._last_used_ns
        now_ns = self._latest_ns = max(self._latest_ns + 1, now_ns)
        for block, slot in zip(blocks, slots, strict=True):
            slot_of_block[block] = slot
            block_of_slot[slot] = block
            key_of_slot[slot] = 0
            last_used_ns[slot] = now_ns
        self.state_turnover.num_entered += len(blocks)
        self._note_states_changed(blocks)

    def register_states(self, blocks: Sequence[int], slots: Sequence[int], keys: Sequence[int]) -> None:
        """Make the blocks' states, in these slots, findable; a hash in use keeps finding its older state."""
        block_of_key, key_of_slot = self.state_block_of_key, self._key_of_slot
        self.note_changes(keys)
        for block, slot, key in zip(blocks, slots, keys, strict=True):
            if block_of_key.setdefault(key, block) == block:
                if (former := key_of_slot[slot]) and former != key:
                    self.note_changes([former])
                    del block_of_key[former]
                key_of_slot[slot] = key
        self.ghosts.discard_states(keys)
        self.state_version += 1

    def note_changes(self, keys: Collection[int]) -> None:
        """There may be a state, or a copy of one, under each of these hashes, or none any more."""
        self.num_changes += len(keys)
        self._changed.extend(keys)

    def changed_since(self, num_changes: int) -> Iterable[int] | None:
        """The hashes of the changes after the first `num_changes`; None where they are too many."""
        count = self.num_changes - num_changes
        return islice(reversed(self._changed), count) if count <= len(self._changed) else None

    def note_state_used(self, slot: int, now_ns: int) -> None:
        """A request resumed from this slot."""
        self._last_used_ns[slot] = self._latest_ns = max(self._latest_ns + 1, now_ns)
        self.used.add(slot)

    def note_refused(self, keys: Sequence[int]) -> None:
        """No slot was available for the states under these prefix hashes."""
        if keys:
            self.state_turnover.num_refused += len(keys)
            self.ghosts.add_all(keys, "refused state")
            self.state_version += 1

    def note_copies_lost(self, keys: Collection[int]) -> None:
        """The tier has no copy under these hashes any more."""
        self.note_changes(keys)
        block_of_key = self.block_of_key
        self.leaves.note_states_changed([block_of_key[key] for key in keys if key in block_of_key])

    def remove_states(self, blocks: Sequence[int], cause: StateRemovalCause, now_ns: int) -> list[int]:
        """Remove the states of these blocks, as far as they have one; returns the slots of these states."""
        slot_of_block, key_of_slot = self.slot_of_block, self._key_of_slot
        removed = blocks
        try:
            slots = [slot_of_block[block] for block in blocks]
        except KeyError:  # some have no state
            removed = [block for block in blocks if block in slot_of_block]
            slots = [slot_of_block[block] for block in removed]
        keys = [key for slot in slots if (key := key_of_slot[slot])]
        if cause in STATE_EVICTIONS:
            self.ghosts.add_all(keys, "state")
        self.note_changes(keys)
        for key in keys:  # the key goes first, because it is what makes a state findable
            self.state_block_of_key.pop(key, None)
        for block in removed:
            del slot_of_block[block]
        turnover = self.state_turnover
        turnover.by_cause[cause] += len(slots)
        if slots and cause in EVICTIONS:
            last_used_ns = self._last_used_ns
            turnover.note_ages(max(self._latest_ns, now_ns), [last_used_ns[slot] for slot in slots])
            turnover.num_unused += sum(slot not in self.used for slot in slots)
        if self.used:
            self.used.difference_update(slots)
        if removed:
            self._note_states_changed(removed)
        return slots

    def clear_states(self) -> None:
        """Remove every state and ghost."""
        num_removed = len(self.slot_of_block)
        self.num_changes += 1
        self._changed.clear()  # there are too many changes to list
        self.state_block_of_key.clear()
        self.slot_of_block.clear()
        self.used.clear()
        self.ghosts.clear()
        self.state_version += 1
        self.state_turnover.by_cause["reset"] += num_removed

    def _note_states_changed(self, blocks: Iterable[int]) -> None:
        """Note that states of these blocks were added or removed."""
        self.state_version += 1
        self.leaves.note_states_changed(blocks)

    # ---- the whole

    def check_integrity(self, held: set[int]) -> None:
        """Raise AssertionError where the maps contradict each other; `held`: the blocks that are held."""
        registered = {block for block, parent in enumerate(self.parents) if parent >= 0}
        self.turnover.check_integrity(len(registered), "KV blocks")
        assert {self._keys[b]: b for b in registered} == self.block_of_key, "a block's hash is another"
        for counts, blocks in ((self.num_children, registered), (self._num_held_children, registered & held)):
            counted = Counter(self.parents[block] for block in blocks)
            assert counts == [counted[b] for b in range(self._origin + 1)], "a count of children is off"
            assert counted.keys() <= registered | {self._origin}, (
                "a registered block's parent is not registered"
            )
        for block in registered:
            parent = self.parents[block]
            older = parent == self._origin or self._serials[parent] <= self._serials[block]
            assert older, "a block is older than its parent"
            assert self._serials[block] <= self.block_version, "a block is newer than the version"
        held_parents = {self.parents[block] for block in registered & held}
        assert held_parents <= held | {self._origin}, "a block is held, its parent is not"
        leaves = {block for block in registered - held if not self.num_children[block]}
        assert leaves == self.leaves.blocks, "the cached leaves are others"
        self.leaves.check_integrity()

    def check_states(self) -> None:
        """Raise AssertionError where the maps of states contradict each other or the hashes of blocks."""
        slots = {slot: block for block, slot in self.slot_of_block.items()}
        assert len(slots) == len(self.slot_of_block), "two blocks share a slot"
        assert self.blocks_of(slots) == list(self.slot_of_block), "a slot's block is another"
        assert all(self._last_used_ns[slot] <= self._latest_ns for slot in slots), "a use is in the future"
        assert self.used <= slots.keys(), "a slot without a state counts as used"
        keys = {key: block for slot, block in slots.items() if (key := self._key_of_slot[slot])}
        assert keys == self.state_block_of_key, "a state's hash is another"
        for key, block in keys.items():
            assert self.key_of(block) == key, f"block {block} is indexed under a hash that is not its own"
        self.state_turnover.check_integrity(len(slots), "states")
