"""Correction: when a paused request goes on."""

from collections.abc import Callable
from typing import Any

from .host_record import DYNAMIC_CONTEXT
from .overrides import override


@override(DYNAMIC_CONTEXT, "resume_paused_requests", part="pause", faults=(24,))
def resume_paused_requests(
    original: Callable[..., Any], self: Any, active_request_count: int, newly_paused_request_ids: Any
) -> Any:
    """Evict cached blocks that nobody uses, so that paused requests get the blocks they wait for.

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
