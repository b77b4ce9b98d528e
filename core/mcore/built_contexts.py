"""The contexts that were built under the drop-in: their counts, and why one caches nothing."""

import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..inference.contexts.cache.pool_stats import ComputeReason
from .host_record import HostRecord, record_of
from .overrides import override
from .slot_allocator import HostSlotAllocator
from .versions import DYNAMIC_CONTEXT, DYNAMIC_ENGINE

_logger = logging.getLogger(__package__)
SETTINGS = (
    "pass enable_prefix_caching=True, a prefix_caching_mamba_gb and PrefixCachingEvictionPolicy.LRU to its "
    "InferenceConfig"
)
SHORT_LIVED = (
    "prefix_caching_eviction_policy is REF_ZERO, megatron-core's default, so a state is kept only while a "
    "request uses its block; pass PrefixCachingEvictionPolicy.LRU"
)
_SERVING = ("add_request", "initialize_attention_state")


@dataclass(frozen=True)
class HostStats:
    """A snapshot of one context. Token counts count prompt tokens.

    Attributes:
        num_requests: requests that were added; one that is evicted and restarts is added twice.
        num_hits: chunks that resumed from a state.
        num_prompt_tokens: num_resumed_tokens + num_computed_tokens.
        computed_by_reason: why tokens were computed; see `COMPUTE_REASONS`.
        num_dropped_checkpoints: planned boundaries whose states could not be stored.
    """

    num_requests: int
    num_hits: int
    num_prompt_tokens: int
    num_resumed_tokens: int
    num_computed_tokens: int
    computed_by_reason: Mapping[ComputeReason, int]
    num_free_slots: int
    num_reserved_slots: int
    num_committed_slots: int
    num_states_committed: int
    num_states_evicted: int
    num_dropped_checkpoints: int

    @classmethod
    def of(cls, record: HostRecord) -> "HostStats":
        """The counts of the context with this record."""
        ledger = record.ledger
        slots = record.slots
        return cls(
            num_requests=record.num_requests,
            num_hits=record.num_hits,
            num_prompt_tokens=ledger.num_prompt_tokens,
            num_resumed_tokens=ledger.resumed,
            num_computed_tokens=ledger.computed.total(),
            computed_by_reason=ledger.by_reason(),
            num_free_slots=slots.free,
            num_reserved_slots=slots.reserved,
            num_committed_slots=slots.committed,
            num_states_committed=slots.committed_total,
            num_states_evicted=slots.evicted_total,
            num_dropped_checkpoints=record.num_dropped,
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
    if not isinstance(slots, HostSlotAllocator | None):
        raise ValueError("context is on megatron-core's own allocator; accepted: one built after install()")
    if slots is not None:
        slots.save_counts()
    return HostStats.of(record_of(context))


class BuiltContext:
    """One context, which may be gone; `idle_reason` says why it caches no state, "" where it does.

    `is_short_lived`: whether no state outlives the requests that use its block.
    """

    def __init__(self, context: Any, number: int) -> None:
        self.number = number
        self.idle_reason = idle_reason(context)
        policy = getattr(context, "prefix_caching_eviction_policy", None)
        self.is_short_lived = not self.idle_reason and getattr(policy, "name", policy) == "REF_ZERO"
        self._context = weakref.ref(context)
        self._record = record_of(context)

    @property
    def context(self) -> Any:
        """The context, or None once it is gone."""
        return self._context()

    @property
    def stats(self) -> HostStats:
        """The context's counts; of a context that is gone the counts of slots are those of its last step."""
        if (context := self.context) is not None:
            return stats(context)
        return HostStats.of(self._record)


built_contexts: list[BuiltContext] = []
"""All contexts that were built since the last `install`, in their order."""


def idle_reason(context: Any) -> str:
    """Why no state of this context is cached, with what to change, or "" where states are cached."""
    if not context.enable_prefix_caching:
        return f"enable_prefix_caching is False, so mambaslots has nothing to do; {SETTINGS}"
    if not context.is_hybrid_model:
        return "its model has no Mamba layers, so megatron-core's own KV cache serves it"
    if context.mamba_slot_allocator is None:
        budget = context.config.prefix_caching_mamba_gb
        return (
            f"prefix_caching_mamba_gb is {budget}, so every prompt token is computed, and only KV blocks are "
            f"shared; {SETTINGS}"
        )
    return ""


@override(DYNAMIC_CONTEXT, "initialize_all_tensors", any_source=True)
def initialize_all_tensors(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Note that the context is built; a warning says why it caches nothing."""
    original(self, *args, **kwargs)
    if all(built.context is not self for built in built_contexts):
        context = BuiltContext(self, len(built_contexts) + 1)
        built_contexts.append(context)
        if context.idle_reason:
            _logger.warning("context %d caches no states: %s", context.number, context.idle_reason)
        elif context.is_short_lived:
            _logger.warning("context %d: %s", context.number, SHORT_LIVED)


@override(DYNAMIC_ENGINE, "_add_request", any_source=True)
def add_request(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Let the context know whose queue it serves; else no state is stored where waiting prompts part."""
    record_of(self.context).engine = weakref.ref(self)
    return original(self, *args, **kwargs)


def refuse_to_serve() -> None:
    """Let every context raise RuntimeError where it is to serve: the host's own methods misread its cache."""
    for context in filter(None, (built.context for built in built_contexts)):
        for name in _SERVING:
            setattr(context, name, _refuse)


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        "this context was built while mambaslots.mcore was installed, and uninstall() has been called since: "
        "megatron-core's own methods would answer wrongly from its cache; build a new context and engine"
    )
