"""What the cache of one megatron-core context has done so far."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..inference.policies.compute_reasons import ComputeReason
from .host_record import record_of
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


def stats(context: Any) -> HostStats:
    """The counts of a context that was built after `install`; ValueError for any other."""
    if "mamba_slot_allocator" not in getattr(context, "__dict__", ()):
        raise ValueError(f"context is {type(context).__name__}; accepted: a DynamicInferenceContext")
    slots = context.mamba_slot_allocator
    if slots is not None and not isinstance(slots, HostSlotAllocator):
        raise ValueError("context is on megatron-core's own allocator; accepted: one built after install()")
    record, ledger = record_of(context), record_of(context).ledger
    retired = record.retired
    return HostStats(
        num_requests=record.requests,
        num_hits=record.hits,
        num_prompt_tokens=ledger.num_prompt_tokens,
        num_resumed_tokens=ledger.resumed,
        num_computed_tokens=ledger.num_computed_tokens,
        computed_by_reason=ledger.by_reason(),
        num_recomputed_tokens=ledger.recomputed,
        num_free_slots=slots.free_count if slots else 0,
        num_reserved_slots=slots.reserved_count if slots else 0,
        num_committed_slots=slots.committed_count if slots else 0,
        num_states_committed=retired["committed"] + (slots.committed_total if slots else 0),
        num_states_evicted=retired["evicted"] + (slots.evicted_total if slots else 0),
        num_dropped_checkpoints=retired["dropped"] + (slots.dropped_checkpoints if slots else 0),
    )
