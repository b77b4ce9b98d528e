"""Corrections: the KV index keeps the first block of a prefix, slot numbers stay, paused requests go on."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .host_record import DYNAMIC_CONTEXT, KV_ALLOCATOR, MAMBA_METADATA, check_lengths
from .overrides import override


@override(KV_ALLOCATOR, "register_kv_block_hashes", part="admission", faults=(5,))
def register_kv_block_hashes(
    original: Callable[..., None],
    self: Any,
    block_ids: list[int],
    block_hashes: list[int],
    parent_hashes: list[int] | None = None,
) -> None:
    """Register blocks whose hash is not registered; the others stay private, or as they are.

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
    parents = None if parent_hashes is None else [parent_hashes[i] for i in chosen]
    original(self, [block_ids[i] for i in chosen], [block_hashes[i] for i in chosen], parents)


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


@override(DYNAMIC_CONTEXT, "resume_paused_requests", part="pause", faults=(24,))
def resume_paused_requests(
    original: Callable[..., Any], self: Any, active_request_count: int, newly_paused_request_ids: Any
) -> Any:
    """Evict unreferenced cached blocks, so that paused requests get the blocks they wait for.

    The stock method resumes at most as many requests as there are free blocks, and cached blocks are not
    free. Where cached blocks fill the pool, a request that needs a block waits for ever, and a step in which
    all requests wait raises.
    """
    kv = self.kv_block_allocator
    if self.paused_request_count and self.enable_prefix_caching:
        missing = min(self.paused_request_count, int(kv.get_active_avail())) - kv.total_avail
        if missing > 0 and kv.prefix_caching_eviction_policy.name == "LRU":
            kv.evict_lru_blocks(min(missing, int(kv.get_evictable_block_count())))
    return original(self, active_request_count, newly_paused_request_ids)
