"""The index of KV blocks for tests of state slots alone, and the order in which states are evicted."""

from mambaslots.inference.contexts.cache.prefix_tree import PrefixTree
from mambaslots.inference.contexts.cache.state_slots import StateSlots


def host_tree(offset: int = 1) -> PrefixTree:
    """The tree of a host whose KV blocks have their number and `offset` as hash."""
    return PrefixTree(4096, lambda block: block + offset)


def eviction_order(slots: StateSlots) -> list[int]:
    """All committed slots, the first to be evicted first."""
    return slots.policy.victims(slots.num_slots, lambda slot: True)
