"""Which block's state is in which committed slot, and under which prefix hash it is found."""

from collections.abc import Iterable, Sequence

import torch


class StateIndex:
    """The maps of committed slots, in plain Python, mirrored in the CPU tensors that hosts index.

    Attributes:
        block_to_slot: [blocks] int32, -1 for blocks without a state.
        slot_to_block: [slots] int32, -1 for slots without one.
        hash_to_block_id: dict from prefix hash to the block whose slot holds the state after that prefix.
        slot_by_block: dict from each block that has a state to its slot; only this class writes it.
        departures: states that have left since the beginning; what was looked up before may not hold.
    """

    def __init__(self, num_blocks: int, num_slots: int) -> None:
        self.block_to_slot = torch.full((num_blocks,), -1, dtype=torch.int32)
        self.slot_to_block = torch.full((num_slots,), -1, dtype=torch.int32)
        self.hash_to_block_id: dict[int, int] = {}
        self.slot_by_block: dict[int, int] = {}
        # Views of the tensors' memory, which cost a fortieth of indexing the tensor.
        self._block_to_slot = memoryview(self.block_to_slot.numpy())
        self._slot_to_block = memoryview(self.slot_to_block.numpy())
        self._key_of: dict[int, int] = {}
        self.departures = 0

    def __contains__(self, block: int) -> bool:
        return block in self.slot_by_block

    def __len__(self) -> int:
        return len(self.slot_by_block)

    def slot_of(self, block: int) -> int:
        """The block's slot, or -1."""
        return self.slot_by_block.get(block, -1)

    def block_of(self, slot: int) -> int:
        """The slot's block, or -1."""
        return self._slot_to_block[slot]

    def blocks_of(self, slots: Iterable[int]) -> list[int]:
        """The slots' blocks, -1 where there is none."""
        return list(map(self._slot_to_block.__getitem__, slots))

    def key_of(self, block: int) -> int:
        """The hash under which the block's state is found, or -1."""
        return self._key_of.get(block, -1)

    def keys_of(self, blocks: Iterable[int]) -> list[int]:
        """The hashes under which the blocks' states are found, of those that have one."""
        return [self._key_of[block] for block in blocks if block in self._key_of]

    def enter(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        block_to_slot, slot_to_block = self._block_to_slot, self._slot_to_block
        slot_by_block = self.slot_by_block
        for block, slot in zip(blocks, slots, strict=True):
            slot_by_block[block] = block_to_slot[block] = slot
            slot_to_block[slot] = block

    def name(self, blocks: Sequence[int], keys: Sequence[int]) -> None:
        """Make the blocks' states findable; a hash that names another block's state keeps naming it."""
        block_named, key_of = self.hash_to_block_id, self._key_of
        for block, key in zip(blocks, keys, strict=True):
            if block_named.setdefault(key, block) == block:
                former = key_of.get(block, key)
                if former != key:
                    del block_named[former]
                key_of[block] = key

    def leave(self, blocks: Sequence[int]) -> list[int]:
        """Forget the blocks' states and their hashes; the slots they were in."""
        slots = list(map(self.slot_by_block.pop, blocks))
        self.departures += len(slots)
        block_to_slot, slot_to_block = self._block_to_slot, self._slot_to_block
        key_of, block_named = self._key_of, self.hash_to_block_id
        for block, slot in zip(blocks, slots, strict=True):
            block_to_slot[block] = slot_to_block[slot] = -1
            if block in key_of:
                del block_named[key_of.pop(block)]
        return slots

    def clear(self) -> None:
        self.block_to_slot.fill_(-1)
        self.slot_to_block.fill_(-1)
        self.hash_to_block_id.clear()
        self.departures += len(self.slot_by_block)
        self.slot_by_block.clear()
        self._key_of.clear()

    @property
    def slots(self) -> Iterable[int]:
        return self.slot_by_block.values()

    def check_integrity(self, block_hashes: torch.Tensor) -> None:
        """Raise AssertionError where maps, mirrors or the KV hashes [blocks] contradict each other."""
        assert len(set(self.slot_by_block.values())) == len(self.slot_by_block), "two blocks share a slot"
        by_block = {b: s for b, s in enumerate(self._block_to_slot) if s >= 0}
        by_slot = {b: s for s, b in enumerate(self._slot_to_block) if b >= 0}
        assert by_block == by_slot == self.slot_by_block, "block_to_slot and slot_to_block are not inverse"
        assert {key: block for block, key in self._key_of.items()} == self.hash_to_block_id
        for key, block in self.hash_to_block_id.items():
            assert block in self.slot_by_block, f"hash {key} names block {block}, which has no state"
            assert int(block_hashes[block]) == key, (
                f"block {block} is indexed under a hash that is not its own"
            )
