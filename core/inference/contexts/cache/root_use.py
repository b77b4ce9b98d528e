"""What a prefix cache holds of each salt."""

from collections import Counter
from typing import NamedTuple

from .prefix_cache import PrefixCache


class RootUse(NamedTuple):
    """What is cached of sequences with one root digest, that is: with one salt.

    Attributes:
        num_states: committed states.
        num_kv_blocks: registered KV blocks.
        num_held_kv_blocks: of these blocks, those that requests or pins hold.
    """

    num_states: int
    num_kv_blocks: int
    num_held_kv_blocks: int


def use_by_root(cache: PrefixCache) -> dict[bytes, RootUse]:
    """What is cached of sequences with each root digest; O(pools).

    Reads only, and so may be called in another thread while the books change. The counts may then be off by
    what changes meanwhile.
    """
    tree, kv = cache.kv_blocks.tree, cache.kv_blocks
    registered = list(tree.block_of_hash.values())
    held = kv.references
    blocks = tree.count_by_root(registered)
    held_blocks = tree.count_by_root([block for block in registered if block in held])
    states: Counter[bytes] = tree.count_by_root(list(cache.slots.map.slot_by_block))
    return {root: RootUse(states[root], number, held_blocks[root]) for root, number in blocks.items()}
