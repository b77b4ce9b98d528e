"""What became of every prompt token, and how full the pools are."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from .inference.contexts.cache.compute_reasons import COMPUTE_REASONS, ComputeReason, TokenLedger
from .inference.contexts.cache.departures import (
    TIER_LEAVE_CAUSES,
    AgeCounts,
    KVLeaveCause,
    StateLeaveCause,
    TierLeaveCause,
)

__all__ = [
    "COMPUTE_REASONS", "ComputeReason", "CacheStats", "EngineStats", "PoolStats", "SpeculationStats",
    "TierStats",
]  # fmt: skip


@dataclass(frozen=True)
class SpeculationStats:
    """What drafts were worth, so far. Counted are decodes: one a step and request that decodes in it.

    `num_tokens` counts the tokens that decodes generated. Each decode generates its accepted drafts and one
    token more; a drafted stop token ends the answer, so such a decode generates its accepted drafts alone.
    """

    num_decodes: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def acceptance(self) -> float:
        """Accepted of drafted; 0 where nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def tokens_per_decode(self) -> float:
        return self.num_tokens / self.num_decodes if self.num_decodes else 0.0


def _no_copies() -> Mapping[TierLeaveCause, int]:
    return dict.fromkeys(TIER_LEAVE_CAUSES, 0)


@dataclass(frozen=True)
class TierStats:
    """How full host memory and the disk are, and how many states went there and came back.

    Attributes:
        num_host_slots, num_host_states: states that host memory can hold, and holds.
        num_states_spilled: states that were copied to host memory, or read from the disk, since the beginning
            or `reset`; as are the counts that follow.
        num_states_fetched: states that came back to the device, those from the disk included.
        num_failed_stores: copies from the device, or to the disk, that raised an error.
        host_copies_left_by_cause: copies that left host memory; `TierLeaveCause` explains each cause.
        num_disk_slots, num_disk_states, num_states_fetched_from_disk, disk_copies_left_by_cause: the same of
            the disk.
    """

    num_host_slots: int = 0
    num_host_states: int = 0
    num_states_spilled: int = 0
    num_states_fetched: int = 0
    num_failed_stores: int = 0
    host_copies_left_by_cause: Mapping[TierLeaveCause, int] = field(default_factory=_no_copies)
    num_disk_slots: int = 0
    num_disk_states: int = 0
    num_states_fetched_from_disk: int = 0
    disk_copies_left_by_cause: Mapping[TierLeaveCause, int] = field(default_factory=_no_copies)


@dataclass(frozen=True)
class PoolStats:
    """How full the two pools of a `PrefixCache` are, and how many states came and went.

    Attributes:
        num_free_slots, num_reserved_slots, num_committed_slots, num_live_slots: state slots by what they are
            for now; together all there are. Live slots hold states of running requests; where these have a
            pool of their own, they are not counted.
        num_pinned_slots: of the committed ones, those that pins and running requests keep from eviction, and
            slots that are read while their block has left.
        num_states_committed: states, since the beginning or `reset`; as are the counts of states that follow.
        num_states_evicted: states that left for a new state, or for the state of a running request.
        num_states_refused: states that were not taken for want of a slot.
        num_states_evicted_unused: states that left for want of memory, and from which nobody had resumed.
        states_left_by_cause: all states that left; `StateLeaveCause` explains each cause.
        state_ages: of states that left for want of memory; times, in which equal snapshots may differ.
        num_free_kv_blocks: blocks that store nothing.
        num_cached_kv_blocks: registered blocks that nobody holds.
        num_held_kv_blocks: blocks that requests or pins hold.
        num_kv_blocks_registered: blocks, since the beginning or `reset`.
        kv_blocks_left_by_cause: registered blocks that left; `KVLeaveCause` explains each cause.
        kv_block_ages: of blocks that left for want of memory; times as well.
        tiers: copies of states in host memory and on the disk.
    """

    num_free_slots: int
    num_reserved_slots: int
    num_committed_slots: int
    num_live_slots: int
    num_pinned_slots: int
    num_states_committed: int
    num_states_evicted: int
    num_states_refused: int
    num_states_evicted_unused: int
    states_left_by_cause: Mapping[StateLeaveCause, int]
    state_ages: AgeCounts = field(compare=False)
    num_free_kv_blocks: int
    num_cached_kv_blocks: int
    num_held_kv_blocks: int
    num_kv_blocks_registered: int
    kv_blocks_left_by_cause: Mapping[KVLeaveCause, int]
    kv_block_ages: AgeCounts = field(compare=False)
    tiers: TierStats = field(default_factory=TierStats)

    def __str__(self) -> str:
        """How full the pools are, as a part of a line."""
        return _pools(self)


@dataclass(frozen=True)
class CacheStats:
    """A snapshot of a context's cache. Token counts are of prompt tokens; generated tokens are not counted.

    A prompt token is counted when its step has been launched. `COMPUTE_REASONS` lists the reasons, and
    `ComputeReason` explains each.

    `num_prompt_tokens = num_resumed_tokens + num_computed_tokens`, and `num_computed_tokens` is the sum of
    `computed_by_reason`. `num_recomputed_tokens`, tokens computed again after a request was preempted, come
    on top. The fields from `num_free_slots` on are those of `PoolStats`.
    """

    num_requests: int
    num_prompt_tokens: int
    num_resumed_tokens: int
    num_computed_tokens: int
    computed_by_reason: Mapping[ComputeReason, int]
    num_recomputed_tokens: int
    num_free_slots: int
    num_reserved_slots: int
    num_committed_slots: int
    num_live_slots: int
    num_pinned_slots: int
    num_states_committed: int
    num_states_evicted: int
    num_states_refused: int
    num_states_evicted_unused: int
    states_left_by_cause: Mapping[StateLeaveCause, int]
    state_ages: AgeCounts = field(compare=False)
    num_free_kv_blocks: int
    num_cached_kv_blocks: int
    num_held_kv_blocks: int
    num_kv_blocks_registered: int
    kv_blocks_left_by_cause: Mapping[KVLeaveCause, int]
    kv_block_ages: AgeCounts = field(compare=False)
    tiers: TierStats = field(default_factory=TierStats)

    def __repr__(self) -> str:
        """One line: what was resumed, why the rest was computed, and how full the pools are."""
        computed = ", ".join(
            f"{reason} {tokens}" for reason, tokens in self.computed_by_reason.items() if tokens
        )
        return (
            f"<CacheStats: {self.num_requests} requests, {self.num_resumed_tokens} of "
            f"{self.num_prompt_tokens} prompt tokens resumed, computed: {computed or 'none'}; {_pools(self)}>"
        )

    @classmethod
    def of(cls, num_requests: int, ledger: TokenLedger, pools: PoolStats) -> "CacheStats":
        """Put together what a context counts: requests, prompt tokens, and the use of its pools."""
        return cls(
            num_requests=num_requests,
            num_prompt_tokens=ledger.num_prompt_tokens,
            num_resumed_tokens=ledger.resumed,
            num_computed_tokens=ledger.num_computed_tokens,
            computed_by_reason=ledger.by_reason(),
            num_recomputed_tokens=ledger.recomputed,
            **vars(pools),
        )


@dataclass(frozen=True)
class EngineStats:
    """A snapshot of an engine: its cache, its drafts and its queue.

    Attributes:
        cache: what became of prompt tokens, and how full the pools are.
        speculation: what drafts were worth.
        num_running: requests that hold memory, paused ones included.
        num_paused: of the running requests, those that waited for a KV block in the last step.
        num_waiting: requests in the queue.
        num_rebuilds: how often an interrupted call cost all cached prefixes.
    """

    cache: CacheStats
    speculation: SpeculationStats
    num_running: int
    num_paused: int
    num_waiting: int
    num_rebuilds: int = 0

    def __repr__(self) -> str:
        """One line: the queue, and the line of the cache."""
        queue = f"{self.num_running} running ({self.num_paused} paused), {self.num_waiting} waiting"
        return f"<EngineStats: {queue}; {self.cache!r}>"


def _pools(stats: PoolStats | CacheStats) -> str:
    num_slots = (
        stats.num_free_slots + stats.num_reserved_slots + stats.num_committed_slots + stats.num_live_slots
    )
    live = f" and {stats.num_live_slots} are live" if stats.num_live_slots else ""
    num_blocks = stats.num_free_kv_blocks + stats.num_cached_kv_blocks + stats.num_held_kv_blocks
    return (
        f"{stats.num_committed_slots} of {num_slots} slots hold a state{live}, of {num_blocks} KV blocks "
        f"{stats.num_held_kv_blocks} held and {stats.num_cached_kv_blocks} cached"
    )
