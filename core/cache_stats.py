"""What became of every prompt token, and how full the pools are."""

from collections.abc import Mapping
from dataclasses import dataclass

from .inference.contexts.cache.pool_stats import ComputeReason, PoolStats


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


@dataclass(frozen=True, kw_only=True, repr=False)
class CacheStats(PoolStats):
    """A snapshot of a context's cache. Token counts are of prompt tokens; generated tokens are not counted.

    A prompt token is counted when its step has been launched. `COMPUTE_REASONS` lists the reasons, and
    `ComputeReason` explains each.

    `num_prompt_tokens = num_resumed_tokens + num_computed_tokens`, and `num_computed_tokens` is the sum of
    `computed_by_reason`. `num_recomputed_tokens`, tokens computed again after a request was preempted, come
    on top.
    """

    num_requests: int
    num_prompt_tokens: int
    num_resumed_tokens: int
    num_computed_tokens: int
    computed_by_reason: Mapping[ComputeReason, int]
    num_recomputed_tokens: int

    def __repr__(self) -> str:
        """One line: what was resumed, why the rest was computed, and how full the pools are."""
        reasons = self.computed_by_reason.items()
        computed = ", ".join(f"{reason} {tokens}" for reason, tokens in reasons if tokens)
        return (
            f"<CacheStats: {self.num_requests} requests, {self.num_resumed_tokens} of "
            f"{self.num_prompt_tokens} prompt tokens resumed, computed: {computed or 'none'}; {self}>"
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
