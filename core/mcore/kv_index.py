"""Corrections of the KV block index: the first block to register a prefix keeps it."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .host_record import KV_ALLOCATOR, MAMBA_METADATA, check_lengths
from .overrides import override


@override(KV_ALLOCATOR, "register_kv_block_hashes", part="admission", faults=(5,))
def register_kv_block_hashes(
    original: Callable[..., None],
    self: Any,
    block_ids: list[int],
    block_hashes: list[int],
    parent_hashes: list[int] | None = None,
) -> None:
    """Register blocks whose hash nobody has registered; the others stay private, or as they are.

    The stock method re-points the map to the newer block, which has no state, and counts the children of a
    block that is registered again twice, so that their parent can never be evicted.
    """
    check_lengths(block_ids, block_hashes=block_hashes, parent_hashes=parent_hashes)
    named = self.kv_hash_to_block_id
    first: dict[int, int] = {}
    for i, key in enumerate(block_hashes):
        if key not in named:
            first.setdefault(key, i)
    chosen = list(first.values())
    rest = [] if parent_hashes is None else [[parent_hashes[i] for i in chosen]]
    original(self, [block_ids[i] for i in chosen], [block_hashes[i] for i in chosen], *rest)


@override(KV_ALLOCATOR, "release_memory_blocks", part="admission", faults=(13,))
def release_memory_blocks(original: Callable[..., None], self: Any, blocks: Tensor) -> None:
    """Drop one reference for each time a block is named; mended in megatron-core 0.19.

    The stock method of 0.18 drops one in all where requests that share a block finish in the same step:
    the block is then held for ever.
    """
    left = Counter(blocks.tolist())
    while left:
        original(self, blocks.new_tensor(list(left)))
        left -= Counter(dict.fromkeys(left, 1))


@override(MAMBA_METADATA, "allocate_slot", part="live slots", faults=(8,))
def allocate_slot(original: Callable[..., Tensor | None], self: Any) -> Tensor | None:
    """A copy of the slot number; the stock method returns a view of the free stack, which changes later."""
    slot = original(self)
    return slot if slot is None else slot.clone()


@override(MAMBA_METADATA, "batch_allocate_slots", part="live slots", faults=(8,))
def batch_allocate_slots(original: Callable[..., Tensor | None], self: Any, num_slots: int) -> Tensor | None:
    """A copy of the slot numbers; the stock method returns a view of the free stack."""
    slots = original(self, num_slots)
    return slots if slots is None else slots.clone()
