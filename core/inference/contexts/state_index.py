"""Which block's state is in which committed slot, and under which prefix hash it is found."""

from collections.abc import Callable, Iterable, Sequence, ValuesView

import torch


class StateIndex:
    """The maps of committed slots, in plain Python, and the CPU tensors that hosts index.

    A tensor is brought up to date when its attribute is read, in O(blocks + slots) after a change and O(1)
    without one. It is the same tensor at every read: one that a host keeps shows the last read's state.

    Attributes:
        block_to_slot: [blocks] int32, -1 for blocks without a state.
        slot_to_block: [slots] int32, -1 for slots without one.
        hash_to_block_id: dict from prefix hash to the block whose slot holds the state after that prefix.
        slot_by_block: dict from each block that has a state to its slot; only this class writes it.
        departures: states that have left since the beginning; what was looked up before may not hold.
    """

    def __init__(self, num_blocks: int, num_slots: int) -> None:
        self._block_to_slot = torch.full((num_blocks,), -1, dtype=torch.int32)
        self._slot_to_block = torch.full((num_slots,), -1, dtype=torch.int32)
        self._mirrored = True  # the two tensors are up to date
        self.hash_to_block_id: dict[int, int] = {}
        self.slot_by_block: dict[int, int] = {}
        # Of each slot: the block that came last, and the hash that finds it or 0. They outlast its leaving.
        self._last_block = [-1] * num_slots
        self._last_key = [0] * num_slots
        self.departures = 0

    @property
    def block_to_slot(self) -> torch.Tensor:
        self._mirror()
        return self._block_to_slot

    @property
    def slot_to_block(self) -> torch.Tensor:
        self._mirror()
        return self._slot_to_block

    def _mirror(self) -> None:
        if self._mirrored:
            return
        blocks, slots = list(self.slot_by_block.keys()), list(self.slot_by_block.values())
        for mirror, keys, values in (
            (self._block_to_slot.numpy(), blocks, slots),
            (self._slot_to_block.numpy(), slots, blocks),
        ):
            mirror.fill(-1)
            mirror[keys] = values
        self._mirrored = True

    def __contains__(self, block: int) -> bool:
        return block in self.slot_by_block

    def __len__(self) -> int:
        return len(self.slot_by_block)

    def slot_of(self, block: int) -> int:
        """The block's slot, or -1."""
        return self.slot_by_block.get(block, -1)

    def slots_of(self, blocks: Iterable[int]) -> list[int]:
        """The slots of blocks that have one; KeyError without."""
        slot_by_block = self.slot_by_block
        return [slot_by_block[block] for block in blocks]

    def block_of(self, slot: int) -> int:
        """The slot's block, or -1."""
        block = self._last_block[slot]
        return block if self.slot_by_block.get(block) == slot else -1

    def blocks_of(self, slots: Iterable[int]) -> list[int]:
        """The blocks of slots that hold states."""
        last_block = self._last_block
        return [last_block[slot] for slot in slots]

    def key_of(self, block: int) -> int:
        """The hash under which the block's state is found, or -1."""
        slot = self.slot_by_block.get(block, -1)
        return self._last_key[slot] or -1 if slot >= 0 else -1

    def keys_of(self, slots: Iterable[int]) -> list[int]:
        """The hashes under which the states in these slots are found, of those that have one."""
        last_key = self._last_key
        return [key for slot in slots if (key := last_key[slot])]

    def enter(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        self._mirrored = False
        slot_by_block, last_block, last_key = self.slot_by_block, self._last_block, self._last_key
        for block, slot in zip(blocks, slots, strict=True):
            slot_by_block[block] = slot
            last_block[slot] = block
            last_key[slot] = 0

    def name(self, blocks: Sequence[int], slots: Sequence[int], keys: Sequence[int]) -> None:
        """Make the blocks' states, in these slots, findable; a hash that names another's keeps naming it."""
        block_named, last_key = self.hash_to_block_id, self._last_key
        for block, slot, key in zip(blocks, slots, keys, strict=True):
            if block_named.setdefault(key, block) == block:
                former = last_key[slot]
                if former and former != key:
                    del block_named[former]
                last_key[slot] = key

    def leave(self, blocks: Sequence[int]) -> list[int]:
        """Forget the states of those blocks that have one, and their hashes; the slots they were in."""
        self._mirrored = False
        pop = self.slot_by_block.pop
        slots = [slot for block in blocks if (slot := pop(block, -1)) >= 0]
        self.departures += len(slots)
        block_named, last_key = self.hash_to_block_id, self._last_key
        for slot in slots:
            if key := last_key[slot]:
                del block_named[key]
        return slots

    def clear(self) -> None:
        self._mirrored = False
        self.hash_to_block_id.clear()
        self.departures += len(self.slot_by_block)
        self.slot_by_block.clear()

    @property
    def slots(self) -> ValuesView[int]:
        """The committed slots in the order in which they came: a view of what is now."""
        return self.slot_by_block.values()

    def check_integrity(self, kv_hash: Callable[[int], int]) -> None:
        """Raise AssertionError where maps, tensors or the KV hashes of blocks contradict each other."""
        assert len(set(self.slot_by_block.values())) == len(self.slot_by_block), "two blocks share a slot"
        if self._mirrored:
            by_block = {b: s for b, s in enumerate(self._block_to_slot.tolist()) if s >= 0}
            by_slot = {b: s for s, b in enumerate(self._slot_to_block.tolist()) if b >= 0}
            assert by_block == self.slot_by_block, "block_to_slot shows others"
            assert by_slot == self.slot_by_block, "slot_to_block shows others"
        slots = list(self.slot_by_block.values())
        assert self.blocks_of(slots) == list(self.slot_by_block), "a slot's block is another"
        keys = {self._last_key[slot]: block for block, slot in self.slot_by_block.items()}
        assert {key: keys[key] for key in keys if key} == self.hash_to_block_id, "a state's hash is another"
        for key, block in self.hash_to_block_id.items():
            assert block in self.slot_by_block, f"hash {key} names block {block}, which has no state"
            assert kv_hash(block) == key, f"block {block} is indexed under a hash that is not its own"
