"""What the cache of one megatron-core context has done so far."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..inference.contexts.cache.durable_slots import SlotCounts
from ..inference.contexts.cache.reasons import ComputeReason
from .host_record import NO_SLOTS, HostRecord, record_of
from .slot_allocator import HostSlotAllocator


@dataclass(frozen=True)
class HostStats:
    """A snapshot of one context. Token counts count prompt tokens.

    Attributes:
        num_requests: requests that were added.
        num_hits: chunks that resumed from a state.
        num_prompt_tokens: num_resumed_tokens + num_computed_tokens.
        computed_by_reason: why tokens were computed; see `cache_stats.COMPUTE_REASONS`.
        num_recomputed_tokens: tokens computed again after a request was evicted and restarted; no other count
            includes them.
        num_dropped_checkpoints: planned boundaries whose states could not be stored.
    """

    num_requests: int
    num_hits: int
    num_prompt_tokens: int
    num_resumed_tokens: int
    num_computed_tokens: int
    computed_by_reason: Mapping[ComputeReason, int]
    num_recomputed_tokens: int
    num_free_slots: int
    num_reserved_slots: int
    num_committed_slots: int
    num_states_committed: int
    num_states_evicted: int
    num_dropped_checkpoints: int

    @classmethod
    def of(cls, record: HostRecord, slots: SlotCounts, num_dropped: int) -> "HostStats":
        """Put together what a context and its allocator count."""
        ledger, retired = record.ledger, record.retired
        return cls(
            num_requests=record.requests,
            num_hits=record.hits,
            num_prompt_tokens=ledger.num_prompt_tokens,
            num_resumed_tokens=ledger.resumed,
            num_computed_tokens=ledger.num_computed_tokens,
            computed_by_reason=ledger.by_reason(),
            num_recomputed_tokens=ledger.recomputed,
            num_free_slots=slots.free,
            num_reserved_slots=slots.reserved,
            num_committed_slots=slots.committed,
            num_states_committed=retired["committed"] + slots.committed_total,
            num_states_evicted=retired["evicted"] + slots.evicted_total,
            num_dropped_checkpoints=retired["dropped"] + num_dropped,
        )

    @property
    def hit_rate(self) -> float:
        """Resumed of all prompt tokens; 0 where there were none."""
        return self.num_resumed_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0


def stats(context: Any) -> HostStats:
    """The counts of a context that was built after `install`; ValueError for any other."""
    if "mamba_slot_allocator" not in getattr(context, "__dict__", ()):
        raise ValueError(f"context is {type(context).__name__}; accepted: a DynamicInferenceContext")
    slots = context.mamba_slot_allocator
    if slots is None:
        return HostStats.of(record_of(context), NO_SLOTS, 0)
    if not isinstance(slots, HostSlotAllocator):
        raise ValueError("context is on megatron-core's own allocator; accepted: one built after install()")
    return HostStats.of(record_of(context), slots.slots.counts, slots.dropped_checkpoints)
