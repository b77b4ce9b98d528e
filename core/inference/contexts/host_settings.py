"""What a host of the slot allocator states about itself, under megatron-core's names."""

from dataclasses import dataclass
from typing import Any

from ...validation import INT32_MAX, instance, integer, shown
from .cache.checkpoint_plan import CheckpointPlan
from .cache.eviction import PolicyChoice, checked_policy
from .cache.kv_block_allocator import KVBlockAllocator

MAX_INTERMEDIATE_OFFSETS_PER_REQUEST = 3
"""Offsets per request where the host does not state `max_intermediate_offsets_per_request`."""


@dataclass(frozen=True)
class HostSettings:
    """Settings from the attributes of megatron-core's context, each read where it exists.

    Attributes:
        num_blocks: blocks of `kv_block_allocator`: its `total_count`, or `pool_size` in newer hosts.
        eviction_policy: `prefix_caching_eviction_policy`: a name, an enumeration, an `EvictionPolicy`; "lru"
            without one.
        plan: `checkpoint_plan`; the default plan without one.
        max_requests: rows of requests.
        max_offsets_per_request: states inside a prefill that a request can store in one step.
        max_intermediate_states: scratch rows for the states of one step
            (`max_mamba_intermediate_states_per_step`); 0 where the host states none.
        block_size_tokens: tokens of a KV block; 0 where the host states none.
        ssd_chunk_size: `ssm_chunk_alignment` or `mamba_chunk_size`. Kernels can store states inside a prefill
            at multiples of this number only.
    """

    num_blocks: int
    eviction_policy: PolicyChoice
    plan: CheckpointPlan
    max_requests: int
    max_offsets_per_request: int
    max_intermediate_states: int
    block_size_tokens: int
    ssd_chunk_size: int

    @classmethod
    def of(cls, context: Any) -> "HostSettings":
        """Read a host's settings; ValueError for an object that is no host, and for impossible settings."""
        plan = getattr(context, "checkpoint_plan", None)
        return cls(
            num_blocks=_block_count(context),
            eviction_policy=_eviction_policy(getattr(context, "prefix_caching_eviction_policy", "lru")),
            plan=instance(
                "context.checkpoint_plan", CheckpointPlan() if plan is None else plan, CheckpointPlan
            ),
            max_requests=_size(context, "max_requests", 0),
            max_offsets_per_request=_size(
                context, "max_intermediate_offsets_per_request", MAX_INTERMEDIATE_OFFSETS_PER_REQUEST
            ),
            max_intermediate_states=_size(context, "max_mamba_intermediate_states_per_step", 0),
            block_size_tokens=_size(context, "block_size_tokens", 0, minimum=1),
            ssd_chunk_size=_size(context, "ssm_chunk_alignment", 0)
            or _size(context, "mamba_chunk_size", 0)
            or 1,
        )


def _eviction_policy(policy: object) -> PolicyChoice:
    """The policy that a host states.

    megatron-core's "ref_zero" is about KV blocks: the host frees them with their last request, and their
    states with them. The states of blocks in use are evicted as under "lru".
    """
    policy = getattr(policy, "value", policy)
    if isinstance(policy, str):
        policy = "lru" if policy.lower() == "ref_zero" else policy.lower()
    return checked_policy("context.prefix_caching_eviction_policy", policy)


def _size(context: Any, name: str, default: int, minimum: int = 0) -> int:
    """The size that the host states, or `default`."""
    value = getattr(context, name, None)
    return default if value is None else integer(f"context.{name}", value, minimum, INT32_MAX)


def _block_count(context: object) -> int:
    """The number of KV blocks of a host; a ValueError for an object that is no host."""
    kv = getattr(context, "kv_block_allocator", None)
    if kv is None:
        raise ValueError(f"context is {shown(context)}; accepted: a host that has a kv_block_allocator")
    name = next((name for name in ("total_count", "pool_size") if hasattr(kv, name)), "")
    if not name or not (isinstance(kv, KVBlockAllocator) or hasattr(kv, "block_hashes")):
        raise ValueError(
            f"context.kv_block_allocator is {shown(kv)}; accepted: what has block_hashes, and total_count or "
            "pool_size"
        )
    return integer(f"context.kv_block_allocator.{name}", getattr(kv, name), 0, INT32_MAX)
