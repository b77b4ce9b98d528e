"""The index of cached states: in which slots they are, what finds them, and what changed last."""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import islice

from .block_tree import BlockTree
from .eviction import EvictionPolicy
from .pool_stats import EVICTIONS, STATE_EVICTIONS, STATE_REMOVAL_CAUSES, Clock, StateRemovalCause, Turnover
from .tier import HostTier

_MAX_CHANGES = 4096


class CachedStates:
    """Which slot holds the state at the end of which block, which hash finds it, and when it was last used.

    The eviction policy and the order of the tree's leaves are notified of each change.
    """

    def __init__(
        self, num_slots: int, tree: BlockTree, policy: EvictionPolicy, clock: Clock, tier: HostTier | None
    ) -> None:
        self.tree = tree
        self.policy = policy
        self.offloaded: HostTier | frozenset[int] = frozenset() if tier is None else tier  # hashes there
        self.slot_of_block: dict[int, int] = {}  # of the state at its end, in the order of commits
        self.block_of_key: dict[int, int] = {}  # prefix hash -> the block whose state it finds
        self.used: set[int] = set()  # slots from which a request resumed since their commit
        self.turnover = Turnover[StateRemovalCause](STATE_REMOVAL_CAUSES)
        self.version = 0  # counts changes of what a hash finds, and never falls
        self._changed = deque[int](maxlen=_MAX_CHANGES)  # the hashes of the last changes
        # For each slot the last state's block, hash (0: none) and last use; stale without a state.
        self._block_of_slot = [0] * num_slots
        self._key_of_slot = [0] * num_slots
        self._last_used_ns = [0] * num_slots
        self._clock = clock
        self._latest_ns = 0  # no two changes happen at one time, also where the clock stands
        tree.leaves.holds_state = self.holds_state

    # ---- lookup

    def slot_of(self, block: int) -> int:
        """The slot of the block's state, or -1."""
        return self.slot_of_block.get(block, -1)

    def block_of(self, slot: int) -> int:
        """The block whose state the slot holds, or -1."""
        block = self._block_of_slot[slot]
        return block if self.slot_of_block.get(block) == slot else -1

    def key_of(self, slot: int) -> int:
        """The hash that finds the state in this slot, or 0."""
        return self._key_of_slot[slot] if self.block_of(slot) >= 0 else 0

    def holds_state(self, block: int) -> bool:
        """Whether the registered block's state is in a slot, or has a copy in a tier."""
        return block in self.slot_of_block or self.tree.key_of(block) in self.offloaded

    def by_recency(self) -> list[int]:
        """The slots of all states, least recently used first: the same on all ranks, under all policies."""
        return sorted(self.slot_of_block.values(), key=self._last_used_ns.__getitem__)

    # ---- changes

    def insert(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Index the states of these blocks, which the slots hold; no hash finds the states yet."""
        slot_of_block, block_of_slot = self.slot_of_block, self._block_of_slot
        key_of_slot, last_used_ns = self._key_of_slot, self._last_used_ns
        now_ns = self._now_ns()
        for block, slot in zip(blocks, slots, strict=True):
            slot_of_block[block] = slot
            block_of_slot[slot] = block
            key_of_slot[slot] = 0
            last_used_ns[slot] = now_ns
        self.turnover.num_entered += len(blocks)
        self.tree.leaves.note_states_changed(blocks)
        self.policy.insert(slots)

    def set_keys(self, blocks: Sequence[int], slots: Sequence[int], keys: Sequence[int]) -> None:
        """Make the blocks' states, in these slots, findable; a hash in use keeps finding its older state."""
        block_of_key, key_of_slot = self.block_of_key, self._key_of_slot
        self.note_changes(keys)
        for block, slot, key in zip(blocks, slots, keys, strict=True):
            if block_of_key.setdefault(key, block) == block:
                if (former := key_of_slot[slot]) and former != key:
                    self.note_changes([former])
                    del block_of_key[former]
                key_of_slot[slot] = key
        self.tree.ghosts.discard_states(keys)
        self.policy.set_keys(slots, keys, lambda i: self.tree.keys_to(blocks[i]))

    def note_use(self, slot: int) -> None:
        """A request resumed from this slot, or an import brought its state again."""
        self.policy.use(slot)
        self._last_used_ns[slot] = self._now_ns()
        self.used.add(slot)

    def remove(self, blocks: Sequence[int], cause: StateRemovalCause) -> list[int]:
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
            self.tree.ghosts.add_all(keys, "state")
        self.note_changes(keys)
        for key in keys:  # the key goes first, because it is what makes a state findable
            self.block_of_key.pop(key, None)
        for block in removed:
            del slot_of_block[block]
        turnover = self.turnover
        turnover.by_cause[cause] += len(slots)
        if slots and cause in EVICTIONS:
            last_used_ns, now_ns = self._last_used_ns, max(self._latest_ns, self._clock())
            turnover.note_ages(now_ns, [last_used_ns[slot] for slot in slots])
            turnover.num_unused += sum(slot not in self.used for slot in slots)
        if self.used:
            self.used.difference_update(slots)
        self.tree.leaves.note_states_changed(removed)
        self.policy.remove(slots, cause in EVICTIONS)
        return slots

    def clear(self) -> None:
        """Remove every state and ghost."""
        num_removed = len(self.slot_of_block)
        self.version += 1
        self._changed.clear()  # there are too many changes to list
        self.block_of_key.clear()
        self.slot_of_block.clear()
        self.used.clear()
        self.tree.ghosts.clear()
        self.turnover.by_cause["reset"] += num_removed
        self.policy.clear()

    def _now_ns(self) -> int:
        self._latest_ns = now_ns = max(self._latest_ns + 1, self._clock())
        return now_ns

    # ---- what changed under which hash

    def note_changes(self, keys: Collection[int]) -> None:
        """There may be a state, or a copy of one, under each of these hashes, or none any more."""
        self.version += len(keys)
        self._changed.extend(keys)

    def changed_since(self, version: int) -> Iterable[int] | None:
        """The hashes that changed after this version; None where they are too many."""
        count = self.version - version
        return islice(reversed(self._changed), count) if count <= len(self._changed) else None

    def note_refused(self, keys: Sequence[int]) -> None:
        """No slot was available for the states under these hashes."""
        self.turnover.num_refused += len(keys)
        self.tree.ghosts.add_all(keys, "refused state")
        self.note_changes(keys)

    def note_copies_lost(self, keys: Collection[int]) -> None:
        """The tier has no copy under these hashes any more."""
        block_of_key = self.tree.block_of_key
        self.note_changes(keys)
        self.tree.leaves.note_states_changed([block_of_key[key] for key in keys if key in block_of_key])

    def check_integrity(self) -> None:
        """Raise AssertionError where the maps contradict each other or the hashes of blocks."""
        slots = {slot: block for block, slot in self.slot_of_block.items()}
        assert len(slots) == len(self.slot_of_block), "two blocks share a slot"
        assert all(self._block_of_slot[slot] == slots[slot] for slot in slots), "a slot's block is another"
        assert all(self._last_used_ns[slot] <= self._latest_ns for slot in slots), "a use is in the future"
        assert self.used <= slots.keys(), "a slot without a state counts as used"
        keys = {key: block for slot, block in slots.items() if (key := self._key_of_slot[slot])}
        assert keys == self.block_of_key, "a state's hash is another"
        for key, block in keys.items():
            assert self.tree.key_of(block) == key, f"block {block} has a state of another hash"
        self.turnover.check_integrity(len(slots), "states")
        self.policy.check_integrity(slots)
