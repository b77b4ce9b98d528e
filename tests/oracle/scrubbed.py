"""Whether memory without an owner is zero, and newly allocated memory, too: judged by bytes and indices."""

from collections.abc import Sequence

import mambaslots as ms
import torch
from mambaslots.inference.contexts.dynamic_request import ScheduledRequest
from mambaslots.inference.contexts.tier_copies import HostCopies
from oracle.faulty_copies import FaultyCopies
from oracle.memory_poison import free_memory


def assert_scrubbed(engine: ms.DynamicInferenceEngine) -> None:
    """Between two calls: all memory without an owner is zero."""
    context = engine.context
    memory, cache = context.memory, context.prefix_cache
    if cache.tiers is not None and isinstance(cache.tiers.copies, HostCopies | FaultyCopies):
        host = cache.tiers.host
        used = {slot for slot, _ in host.entries.values()}
        free = sorted(set(range(host.num_slots)) - used)
        _assert_zero(cache.tiers.copies.memory, free, "a slot of host memory")
    if not memory.is_allocated:
        assert not memory.kv_cache.numel()
        assert not memory.state_pool.memory.numel()
        return
    slots, blocks = free_memory(context)
    held = [
        slot for request in context.requests if request.allocation for slot in request.allocation.live_slots
    ]
    pinned = set(cache.slots.reserved) if memory.durable_pool is memory.state_pool else set()
    free = [slot for slot in slots.tolist() if slot not in {*held, *pinned}]
    _assert_zero(memory.state_pool.memory, free, "a state slot")
    if memory.durable_pool is not memory.state_pool:
        owned = {*cache.slots.cached_states.slot_of_block.values(), *cache.slots.reserved}
        free = sorted(set(range(memory.durable_pool.num_durable)) - owned)
        _assert_zero(memory.durable_pool.memory, free, "a slot of an encoded state")
    kv = memory.kv_cache.movedim(2, 0)
    for block in blocks.tolist():
        assert not kv[block].any(), f"KV block {block} is free and not zero"
    rows = {request.allocation.row for request in context.requests if request.allocation is not None}
    for inputs in (memory.input_pool[name] for name in memory.shapes_in_rows):
        idle = sorted(set(range(inputs.shape[1])) - rows)
        _assert_zero(inputs.movedim(1, 0).flatten(1).view(torch.uint8), idle, "inputs of a row")


def _assert_zero(memory: torch.Tensor, entries: Sequence[int], what: str) -> None:
    if entries and memory.numel():
        found = [entry for entry in entries if memory[entry].any()]
        assert not found, f"{what} is free and not zero: {found}"


class NewOwners:
    """Observes a context: what a request has got since its last step is zero when its step begins.

    Attributes:
        num_checked: blocks and slots that were looked at.
    """

    def __init__(self, engine: ms.DynamicInferenceEngine) -> None:
        self.num_checked = 0
        self._context = engine.context
        self._seen: dict[int, tuple[object, set[int]]] = {}  # row -> its allocation, and its blocks
        engine.context.observers.append(self)

    def step_begun(self, batch: Sequence[ScheduledRequest], inputs: object) -> None:
        memory = self._context.memory
        for scheduled in batch:
            allocation = scheduled.allocation
            known, blocks = self._seen.get(allocation.row, (None, set()))
            is_new = known is not allocation
            own = allocation.path.blocks[allocation.path.num_registered :] + allocation.input_blocks
            for block in own if is_new else set(own) - blocks:
                assert not memory.kv_cache[:, :, block].any(), f"row {allocation.row} got a block with bytes"
                self.num_checked += 1
            before = set() if is_new else blocks
            self._seen[allocation.row] = (
                allocation,
                {*allocation.path.blocks, *allocation.input_blocks, *before},
            )
            pool = memory.durable_pool
            for slot in scheduled.destinations.values():
                assert not pool.memory[pool.durable_index(slot)].any(), f"slot {slot} has bytes of others"
                self.num_checked += 1
            for slot in allocation.live_slots if is_new else ():
                if slot != allocation.state_index:
                    assert not memory.state_pool.memory[slot].any(), f"live slot {slot} has bytes of others"
                    self.num_checked += 1
            if is_new:
                for name in memory.shapes_in_rows:
                    assert not memory.input_pool[name][:, allocation.row].any(), "a row has inputs of others"

    def step_ended(self, batch: Sequence[ScheduledRequest]) -> None:
        """Nothing is to be done."""
