"""The index of KV blocks for tests of state slots alone, and the order in which states are evicted."""

from collections.abc import Callable

from mambaslots.inference.contexts.cache.block_tree import BlockTree
from mambaslots.inference.contexts.cache.state_slots import StateSlots


class HashedTree(BlockTree):
    """The tree of a host whose KV blocks are not registered in it."""

    def __init__(self, num_blocks: int, hash_of: Callable[[int], int]) -> None:
        super().__init__(num_blocks)
        self._hash = hash_of

    def hash_of(self, block: int) -> int:
        return self._hash(block)

    def hashes_to(self, block: int) -> list[int]:
        return [self._hash(block)]


def host_tree(offset: int = 1) -> BlockTree:
    """The tree of a host whose KV blocks have their number and `offset` as hash."""
    return HashedTree(4096, lambda block: block + offset)


def eviction_order(slots: StateSlots) -> list[int]:
    """All committed slots, the first to be evicted first."""
    return slots.policy.victims(slots.num_slots, lambda slot: True)
