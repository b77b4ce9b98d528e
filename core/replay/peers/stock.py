"""Prefix caching of megatron-core 0.19.2, as the installed package has it."""

from dataclasses import dataclass

from ..setting import Progress, ReplayResult, ReplaySetting
from ..trace import Trace
from .block_cache import BlockCache
from .blocks import block_index
from .loop import RequestLoop, RunningRequest
from .rows import num_kv_blocks, num_state_slots
from .states import KVRecencySlots

OFFSETS_PER_REQUEST = 3
"""`MAX_INTERMEDIATE_OFFSETS_PER_REQUEST` of megatron-core."""


@dataclass(frozen=True)
class StockStates:
    """The three boundaries of `MambaSlotAllocator.compute_and_store_offsets`.

    They are the end of the KV that was cached, the last boundary of the prompt, and the boundary before
    the end of the step. A state is taken only strictly inside a step, or where the prompt ends on a
    boundary.
    """

    decode: bool = False
    every: bool = False

    def of_prefill(self, request: RunningRequest, start: int, end: int, block: int) -> list[int]:
        """See `StatePlan.of_prefill`."""
        wanted = {request.target // block, (end + block - 1) // block - 1}
        if start < request.matched * block:
            wanted.add(request.matched)
        inside = {depth for depth in wanted if start < depth * block < end}
        if end == request.target and end % block == 0:
            inside.add(end // block)
        return sorted(inside)


def num_scratch_slots(setting: ReplaySetting) -> int:
    """States that a step may put aside; stock takes their memory from the same budget."""
    of_tokens = -(-setting.max_tokens // setting.block_size_tokens)
    return min(of_tokens, OFFSETS_PER_REQUEST * setting.max_requests)


@dataclass(frozen=True)
class StockRow:
    """megatron-core's own prefix cache, with `prefix_caching_eviction_policy` LRU.

    KV blocks and states are cached of prompts only: generated tokens are not hashed. A state goes with
    the KV block whose last use is longest ago and that no request holds; a match uses all blocks of its
    path. Where no state may go, megatron-core raises RuntimeError; here the new state is not stored.
    Where the scratch leaves no slot, megatron-core refuses to start; here nothing is resumed. Left out:
    requests that wait a step for blocks that another request is about to write, and the captured sizes of
    CUDA graphs, to which steps are cut.
    """

    name: str = "megatron-core"
    source: str = (
        "megatron-core 0.19.2: three boundaries, LRU by use of KV, no answers, scratch within the budget"
    )

    def replay(self, trace: Trace, setting: ReplaySetting, progress: Progress) -> ReplayResult:
        """See `ReplayRow.replay`."""
        index = block_index(trace, setting.block_size_tokens)
        slots = KVRecencySlots(index, max(0, num_state_slots(setting) - num_scratch_slots(setting)))
        kv_blocks = num_kv_blocks(setting, index.block_size)
        cache = BlockCache(index, kv_blocks, slots, StockStates(), answers=False, stateless_first=False)
        return RequestLoop(trace, index.paths, cache, setting, progress).run()
