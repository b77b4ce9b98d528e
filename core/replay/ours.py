"""The rows of this package's own cache."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..config import InferenceConfig
from ..inference.contexts.cache.slot_eviction import EVICTION_POLICIES
from ..pool_sizes import GIGABYTE
from ..state_spec import HybridStateSpec
from ..state_tensor import StateTensor
from .engine_replay import EngineReplay
from .prompt_hashes import chains_of
from .setting import ModelShape, Progress, ReplayResult, ReplaySetting
from .trace import Trace

_DEFAULT_POLICY = InferenceConfig.prefix_caching_eviction_policy


@dataclass(frozen=True)
class PoolCounts:
    """How many states and KV blocks a setting buys for cached prefixes and running requests."""

    num_slots: int
    num_kv_blocks: int


def pool_counts(setting: ReplaySetting) -> PoolCounts:
    """The pools of an engine in this setting.

    Where states and KV are given apart, the live states of running requests are beside both. Out of a total,
    live states come first; the rest is halved.

    Raises:
        ValueError: the memory buys no cached state or no KV block.
    """
    shape = setting.shape
    live_bytes = setting.max_requests * shape.state_bytes
    if setting.total_gb is not None:
        half = (setting.total_gb * GIGABYTE - live_bytes) / 2
        named, state_bytes, kv_bytes = f"total_gb is {setting.total_gb}", half, half
    elif setting.state_gb is None or setting.kv_gb is None:
        raise ValueError(
            f"state_gb is {setting.state_gb} and kv_gb is {setting.kv_gb}; accepted: both, or total_gb"
        )
    else:
        named = f"state_gb is {setting.state_gb} and kv_gb is {setting.kv_gb}"
        state_bytes, kv_bytes = setting.state_gb * GIGABYTE, setting.kv_gb * GIGABYTE
    block_bytes = shape.kv_bytes_per_token * setting.block_size_tokens
    num_slots = int(state_bytes // shape.durable_state_bytes)
    num_blocks = int(kv_bytes // block_bytes) if block_bytes else _MOST_NAMES
    if num_slots < 1 or num_blocks < 1:
        raise ValueError(
            f"{named}; accepted for {shape.name}: one state of {shape.durable_state_bytes} bytes and "
            f"one KV block of {block_bytes} bytes"
        )
    return PoolCounts(num_slots, num_blocks)


_MOST_NAMES = 1 << 20
"""KV blocks of a model without attention: they are names of prefixes only."""


def spec_of(shape: ModelShape) -> HybridStateSpec:
    """A spec with the bytes and the grid of `shape`, for books alone.

    Where the shape's cached states are encoded, the spec's can be, too.
    """
    grid, size = shape.grid_tokens, shape.state_bytes
    state = (
        StateTensor("state", 1, (max(1, size // 4),), torch.float32, grid, coarsest="bfloat16")
        if shape.encodes
        else StateTensor("state", 1, (max(1, size // 2),), torch.bfloat16, grid)
    )
    return HybridStateSpec(
        states=(state,),
        num_attention_layers=1 if shape.kv_bytes_per_token else 0,
        num_kv_heads=1,
        head_dim=max(1, shape.kv_bytes_per_token // 4),
        kv_dtype=torch.bfloat16,
        vocab_size=(1 << 31) - 1,
        device=torch.device("cpu"),
        strided_blocks=True,
        model=shape.name,
    )


def config_of(trace: Trace, setting: ReplaySetting, changes: Mapping[str, Any]) -> InferenceConfig:
    """The configuration of an engine in this setting, with `changes`, for all requests of the trace.

    Out of a total, states and KV share one memory, as far as live and cached states have one encoding. Where
    they have not, the slots of idle rows hold no cached states.
    """
    if setting.shape.encodes:
        changes = {"durable_state_dtype": "bfloat16"} | dict(changes)  # which encoding makes no difference
    if setting.total_gb is None or setting.shape.encodes:
        return _config(trace, setting, pool_counts(setting), changes)
    return _config(trace, setting, None, {"total_gb": setting.total_gb} | dict(changes))


def _config(
    trace: Trace, setting: ReplaySetting, counts: PoolCounts | None, changes: Mapping[str, Any]
) -> InferenceConfig:
    sizes: dict[str, Any] = {
        "block_size_tokens": setting.block_size_tokens,
        "max_requests": setting.max_requests,
        "max_tokens": setting.max_tokens,
        "max_sequence_length": max(trace.longest, setting.block_size_tokens + 1),
    }
    if counts is not None:
        sizes |= {"num_kv_blocks": counts.num_kv_blocks, "num_mamba_slots": counts.num_slots}
    if setting.host_gb:  # in the bytes of live states, by which an engine without memory counts; not for
        # more states than the trace has blocks
        shape = setting.shape
        most_gb = (trace.num_tokens // setting.block_size_tokens + 2) * shape.durable_state_bytes / GIGABYTE
        sizes["host_cache_gb"] = min(setting.host_gb, most_gb) * shape.state_bytes / shape.durable_state_bytes
        sizes["host_cache_min_tokens"] = 1
    return InferenceConfig(**(sizes | dict(changes)))


@dataclass(frozen=True)
class OursRow:
    """The engine's own scheduler and cache.

    Attributes:
        name: what the table calls it.
        source: what it is, in one line.
        changes: fields of `InferenceConfig` that differ from the defaults.
    """

    name: str
    source: str
    changes: Mapping[str, Any] = field(default_factory=dict)

    def replay(
        self, trace: Trace, setting: ReplaySetting, progress: Progress = lambda num_served, num_all: None
    ) -> ReplayResult:
        """Serve the trace; ValueError for memory that buys no state."""
        config = config_of(trace, setting, self.changes)
        return EngineReplay(trace, spec_of(setting.shape), config, setting.cost).run(progress)


OURS = (
    OursRow("ours", "this engine with its defaults"),
    *(
        OursRow(
            f"ours-{policy}",
            f'this engine with prefix_caching_eviction_policy="{policy}"',
            {"prefix_caching_eviction_policy": policy},
        )
        for policy in EVICTION_POLICIES
        if policy not in (_DEFAULT_POLICY, "ref_zero")
    ),
)


@dataclass(frozen=True)
class UnlimitedRow:
    """The engine's own cache with a slot and a KV block for every prefix of the trace.

    Attributes:
        name, source: see `ReplayRow`.
    """

    name: str = "unlimited"
    source: str = "this engine with memory for everything"

    def replay(
        self, trace: Trace, setting: ReplaySetting, progress: Progress = lambda num_served, num_all: None
    ) -> ReplayResult:
        """Serve the trace; the memory in `setting` is ignored."""
        size = setting.block_size_tokens
        num_prefixes = len(set().union(*(chain.keys for chain in chains_of(trace, size))))
        num_held = setting.max_requests * (trace.longest // size + 1)
        config = _config(trace, setting, PoolCounts(num_prefixes + 1, num_prefixes + num_held), {})
        return EngineReplay(trace, spec_of(setting.shape), config, setting.cost).run(progress)


UNLIMITED = UnlimitedRow()
