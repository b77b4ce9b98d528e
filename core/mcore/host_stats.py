"""What the cache of one megatron-core context has done so far."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..cache_stats import ComputeReason
from .host_record import record_of
from .slot_allocator import HostSlotAllocator


@dataclass(frozen=True)
class HostStats:
    """A snapshot of one context; token counts are of prompt tokens.

    Attributes:
        requests: requests added, each once.
        hits: chunks that resumed from a state.
        prompt_tokens: resumed_tokens + computed_tokens.
        computed_by_reason: why tokens were computed; see `cache_stats.COMPUTE_REASONS`.
        recomputed_tokens: computed again after a request was evicted and restarted; they come on top.
        dropped_checkpoints: boundaries that were planned and could not be taken.
    """

    requests: int
    hits: int
    prompt_tokens: int
    resumed_tokens: int
    computed_tokens: int
    computed_by_reason: Mapping[ComputeReason, int]
    recomputed_tokens: int
    slots_free: int
    slots_reserved: int
    slots_committed: int
    states_committed_total: int
    states_evicted_total: int
    dropped_checkpoints: int


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
        requests=record.requests,
        hits=record.hits,
        prompt_tokens=ledger.prompt,
        resumed_tokens=ledger.resumed,
        computed_tokens=ledger.computed_tokens,
        computed_by_reason=ledger.by_reason(),
        recomputed_tokens=ledger.recomputed,
        slots_free=slots.free_count if slots else 0,
        slots_reserved=slots.reserved_count if slots else 0,
        slots_committed=slots.committed_count if slots else 0,
        states_committed_total=retired["committed"] + (slots.committed_total if slots else 0),
        states_evicted_total=retired["evicted"] + (slots.evicted_total if slots else 0),
        dropped_checkpoints=retired["dropped"] + (slots.dropped_checkpoints if slots else 0),
    )
