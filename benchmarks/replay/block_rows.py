"""Rows that keep KV blocks and states apart, each within its own memory."""

from collections.abc import Callable
from dataclasses import dataclass

from block_cache import BlockCache, KVRecencySlots, PathCapSlots, StatePlan, StateSlots
from blocks import BlockIndex, block_index
from loop import RequestLoop, RunningRequest
from mambaslots.devices import GIGABYTE
from mambaslots.replay.setting import ReplayResult, ReplaySetting
from mambaslots.replay.trace import Trace

MAX_BLOCKS = 1 << 40
StatesFactory = Callable[[BlockIndex, int], StateSlots]


def num_state_slots(setting: ReplaySetting) -> int:
    """Cached states that `state_gb` holds; live ones come beside it."""
    gigabytes = setting.state_gb if setting.state_gb is not None else _half(setting)
    return int(gigabytes * GIGABYTE) // setting.shape.durable_state_bytes


def num_kv_blocks(setting: ReplaySetting, block_size: int) -> int:
    """Blocks that `kv_gb` holds; without attention they are names only, and as many as wanted."""
    if not setting.shape.kv_bytes_per_token:
        return MAX_BLOCKS
    gigabytes = setting.kv_gb if setting.kv_gb is not None else _half(setting)
    return int(gigabytes * GIGABYTE) // (setting.shape.kv_bytes_per_token * block_size)


def missing_memory(setting: ReplaySetting) -> ValueError:
    """The error of a setting that gives no memory."""
    return ValueError(
        f"state_gb is {setting.state_gb} and kv_gb is {setting.kv_gb}; accepted: both, or total_gb"
    )


def _half(setting: ReplaySetting) -> float:
    if setting.total_gb is None:
        raise missing_memory(setting)
    live_gb = setting.max_requests * setting.shape.state_bytes / GIGABYTE
    return max(0.0, setting.total_gb - live_gb) / 2


def capped_slots(index: BlockIndex, capacity: int) -> StateSlots:
    """LRU by use of the state, with at most 3 states a path."""
    return PathCapSlots(index, capacity, 3)


@dataclass(frozen=True)
class BlockRow:
    """A row of the table: a plan, slots with a policy, and KV blocks.

    Of a total, live states come first; states and KV have half each of the rest.
    """

    name: str
    plan: StatePlan
    slots: StatesFactory = StateSlots

    def replay(self, trace: Trace, setting: ReplaySetting) -> ReplayResult:
        """See `ComparedCache.replay`."""
        index = block_index(trace, setting.block_size_tokens)
        states = self.slots(index, num_state_slots(setting))
        cache = BlockCache(index, num_kv_blocks(setting, index.block_size), states, self.plan)
        return RequestLoop(trace, index.paths, cache, setting).run()


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
    of_tokens = -(-setting.max_tokens_per_step // setting.block_size_tokens)
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

    def replay(self, trace: Trace, setting: ReplaySetting) -> ReplayResult:
        """See `ComparedCache.replay`."""
        index = block_index(trace, setting.block_size_tokens)
        slots = KVRecencySlots(index, max(0, num_state_slots(setting) - num_scratch_slots(setting)))
        kv_blocks = num_kv_blocks(setting, index.block_size)
        cache = BlockCache(index, kv_blocks, slots, StockStates(), answers=False, stateless_first=False)
        return RequestLoop(trace, index.paths, cache, setting).run()
