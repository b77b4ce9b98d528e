"""Which block's state is in which committed slot, and under which prefix hash it is found."""

from collections.abc import Callable, Iterable, Sequence, ValuesView

from .pool_stats import STATE_REMOVAL_CAUSES, StateRemovalCause, Turnover

Watcher = Callable[[Iterable[int] | None], None]


class SlotMap:
    """The maps of committed slots. Arguments are trusted.

    Attributes:
        hash_to_block_id: prefix hash -> the block whose slot holds the state after that prefix.
        slot_by_block: block -> the slot of its state; only this class writes it.
        turnover: how many states were committed, and how many removed, by cause and age.
        watchers: called with hashes before they begin to find a state, or cease to; None for all hashes.
    """

    def __init__(self, num_slots: int) -> None:
        self.hash_to_block_id: dict[int, int] = {}
        self.slot_by_block: dict[int, int] = {}
        self.turnover = Turnover[StateRemovalCause](STATE_REMOVAL_CAUSES, remembers=True)
        self.watchers: tuple[Watcher, ...] = ()
        # For each slot its last block, and the hash that finds the state, or 0. Stale without a state.
        self._last_block = [-1] * num_slots
        self._last_key = [0] * num_slots

    def __contains__(self, block: int) -> bool:
        return block in self.slot_by_block

    def __len__(self) -> int:
        return len(self.slot_by_block)

    @property
    def slots(self) -> ValuesView[int]:
        """The committed slots in the order of their commits, as a live view."""
        return self.slot_by_block.values()

    def mend_counts(self) -> None:
        """Repair `turnover` after an interrupted change; O(1)."""
        self.turnover.mend(len(self))

    def slot_of(self, block: int) -> int:
        """The block's slot, or -1."""
        return self.slot_by_block.get(block, -1)

    def slots_of(self, blocks: Iterable[int]) -> list[int]:
        """The slots of these blocks; KeyError if a block has none."""
        return [self.slot_by_block[block] for block in blocks]

    def block_of(self, slot: int) -> int:
        """The block whose state the slot holds, or -1."""
        block = self._last_block[slot]
        return block if self.slot_by_block.get(block) == slot else -1

    def blocks_of(self, slots: Iterable[int]) -> list[int]:
        """The blocks of slots that hold states."""
        return [self._last_block[slot] for slot in slots]

    def key_of(self, block: int) -> int:
        """The hash under which the block's state is found, or -1."""
        slot = self.slot_by_block.get(block, -1)
        return self._last_key[slot] or -1 if slot >= 0 else -1

    def keys_of(self, slots: Iterable[int]) -> list[int]:
        """The hashes that find the states in these slots; slots without a hash are skipped."""
        return [key for slot in slots if (key := self._last_key[slot])]

    def enter(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """The slots hold the blocks' states; no hash finds these states yet."""
        slot_by_block, last_block, last_key = self.slot_by_block, self._last_block, self._last_key
        for block, slot in zip(blocks, slots, strict=True):
            slot_by_block[block] = slot
            last_block[slot] = block
            last_key[slot] = 0

    def name(self, blocks: Sequence[int], slots: Sequence[int], keys: Sequence[int]) -> None:
        """Make the blocks' states, in these slots, findable; a hash in use keeps finding its older state."""
        block_named, last_key = self.hash_to_block_id, self._last_key
        for watcher in self.watchers:
            watcher((*keys, *self.keys_of(slots)))
        for block, slot, key in zip(blocks, slots, keys, strict=True):
            if block_named.setdefault(key, block) == block:
                former = last_key[slot]
                if former and former != key:
                    del block_named[former]
                last_key[slot] = key

    def remove(self, blocks: Sequence[int]) -> list[int]:
        """Forget the states of these blocks, as far as they have one; returns the slots of these states."""
        slot_by_block, block_named, last_key = self.slot_by_block, self.hash_to_block_id, self._last_key
        removed = [block for block in blocks if block in slot_by_block]
        for watcher in self.watchers:
            watcher(self.keys_of(map(slot_by_block.__getitem__, removed)))
        for block in removed:  # the hash goes first, because it is what makes a state findable
            if key := last_key[slot_by_block[block]]:
                block_named.pop(key, None)
        return [slot for block in removed if (slot := slot_by_block.pop(block, -1)) >= 0]

    def clear(self) -> None:
        for watcher in self.watchers:
            watcher(None)
        self.hash_to_block_id.clear()
        self.slot_by_block.clear()

    def check_integrity(self, hash_of: Callable[[int], int]) -> None:
        """Raise AssertionError where the maps, or the KV hashes of blocks, contradict each other."""
        slots = list(self.slot_by_block.values())
        assert len(set(slots)) == len(slots), "two blocks share a slot"
        assert self.blocks_of(slots) == list(self.slot_by_block), "a slot's block is another"
        keys = {self._last_key[slot]: block for block, slot in self.slot_by_block.items()}
        assert {key: keys[key] for key in keys if key} == self.hash_to_block_id, "a state's hash is another"
        for key, block in self.hash_to_block_id.items():
            assert block in self.slot_by_block, f"hash {key} names block {block}, which has no state"
            assert hash_of(block) == key, f"block {block} is indexed under a hash that is not its own"
