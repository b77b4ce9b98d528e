"""Which block's state is in which committed slot, and under which prefix hash it is found."""

from collections.abc import Iterable

import torch


class StateIndex:
    """The maps of committed slots, in plain Python, mirrored in the CPU tensors that hosts index.

    Attributes:
        block_to_slot: [blocks] int32, -1 for blocks without a state.
        slot_to_block: [slots] int32, -1 for slots without one.
        hash_to_block_id: dict from prefix hash to the block whose slot holds the state after that prefix.
        departures: states that have left since the beginning; what was looked up before may not hold.
    """

    def __init__(self, num_blocks: int, num_slots: int) -> None:
        self.block_to_slot = torch.full((num_blocks,), -1, dtype=torch.int32)
        self.slot_to_block = torch.full((num_slots,), -1, dtype=torch.int32)
        self.hash_to_block_id: dict[int, int] = {}
        # Numpy views of the tensors: the same memory, an order of magnitude cheaper to index.
        self._block_to_slot = self.block_to_slot.numpy()
        self._slot_to_block = self.slot_to_block.numpy()
        self._slot_of: dict[int, int] = {}
        self._key_of: dict[int, int] = {}
        self.departures = 0

    def __contains__(self, block: int) -> bool:
        return block in self._slot_of

    def __len__(self) -> int:
        return len(self._slot_of)

    def slot_of(self, block: int) -> int:
        """The block's slot, or -1."""
        return self._slot_of.get(block, -1)

    def block_of(self, slot: int) -> int:
        """The slot's block, or -1."""
        return int(self._slot_to_block[slot])

    def key_of(self, block: int) -> int:
        """The hash under which the block's state is found, or -1."""
        return self._key_of.get(block, -1)

    def enter(self, block: int, slot: int) -> None:
        self._slot_of[block] = slot
        self._block_to_slot[block] = slot
        self._slot_to_block[slot] = block

    def name(self, block: int, key: int) -> bool:
        """Make the block's state findable; False where the hash names another block's state already."""
        if self.hash_to_block_id.setdefault(key, block) != block:
            return False
        former = self._key_of.get(block, key)
        if former != key:
            del self.hash_to_block_id[former]
        self._key_of[block] = key
        return True

    def leave(self, block: int) -> int:
        """Forget the block's state and its hash; the slot it was in."""
        slot = self._slot_of.pop(block)
        self.departures += 1
        self._block_to_slot[block] = -1
        self._slot_to_block[slot] = -1
        key = self._key_of.pop(block, None)
        if key is not None:
            del self.hash_to_block_id[key]
        return slot

    def clear(self) -> None:
        self.block_to_slot.fill_(-1)
        self.slot_to_block.fill_(-1)
        self.hash_to_block_id.clear()
        self.departures += len(self._slot_of)
        self._slot_of.clear()
        self._key_of.clear()

    @property
    def slots(self) -> Iterable[int]:
        return self._slot_of.values()

    def check_integrity(self, block_hashes: torch.Tensor) -> None:
        """Raise AssertionError where maps, mirrors or the KV hashes [blocks] contradict each other."""
        assert len(set(self._slot_of.values())) == len(self._slot_of), "two blocks share a slot"
        by_block = {int(b): int(s) for b, s in enumerate(self._block_to_slot) if s >= 0}
        by_slot = {int(b): int(s) for s, b in enumerate(self._slot_to_block) if b >= 0}
        assert by_block == by_slot == self._slot_of, "block_to_slot and slot_to_block are not inverse"
        assert {key: block for block, key in self._key_of.items()} == self.hash_to_block_id
        for key, block in self.hash_to_block_id.items():
            assert block in self._slot_of, f"hash {key} names block {block}, which has no state"
            assert int(block_hashes[block]) == key, (
                f"block {block} is indexed under a hash that is not its own"
            )
