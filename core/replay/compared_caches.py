"""The caches that a table compares: the engine's own, with any policies, and an unlimited one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..config import InferenceConfig
from ..devices import GIGABYTE
from ..inference.contexts.pool_sizes import MAX_NAMES
from ..named_policies import cache_changes
from ..state_spec import HybridStateSpec, StateTensor
from .engine_replay import EngineReplay, chains_of
from .setting import ModelShape, ReplayResult, ReplaySetting
from .trace import Trace


class ComparedCache(Protocol):
    """A cache with its policies, which a table compares with others under its `name`."""

    @property
    def name(self) -> str: ...

    def replay(self, trace: Trace, setting: ReplaySetting) -> ReplayResult:
        """Serve the trace. Two calls give equal results; ValueError for memory that buys no state."""


def pool_counts(setting: ReplaySetting) -> tuple[int, int]:
    """Cached states and KV blocks that a setting buys, of a total half each; ValueError for none."""
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
    num_blocks = int(kv_bytes // block_bytes) if block_bytes else MAX_NAMES
    if num_slots < 1 or num_blocks < 1:
        raise ValueError(
            f"{named}; accepted for {shape.name}: one state of {shape.durable_state_bytes} bytes and "
            f"one KV block of {block_bytes} bytes"
        )
    return num_slots, num_blocks


def spec_of(shape: ModelShape) -> HybridStateSpec:
    """A spec with the bytes and the grid of `shape`, for bookkeeping alone."""
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
    """An engine's configuration in this setting: of a total, encoded states and KV have fixed parts."""
    memory: dict[str, Any] = {}
    if setting.shape.encodes:
        memory["durable_state_dtype"] = "bfloat16"  # which encoding makes no difference
    if setting.total_gb is not None and not setting.shape.encodes:
        memory["total_gb"] = setting.total_gb
    else:
        memory["num_mamba_slots"], memory["num_kv_blocks"] = pool_counts(setting)
    return _config(trace, setting, memory | dict(changes))


def _config(trace: Trace, setting: ReplaySetting, settings: dict[str, Any]) -> InferenceConfig:
    """A configuration with the limits of the setting; `settings` are of its memory and policies."""
    if setting.host_gb:  # in the bytes of live states, by which an engine without memory counts; not for
        # more states than the trace has blocks
        shape = setting.shape
        most_gb = (trace.num_tokens // setting.block_size_tokens + 2) * shape.durable_state_bytes / GIGABYTE
        host_gb = min(setting.host_gb, most_gb) * shape.state_bytes / shape.durable_state_bytes
        settings = {"host_cache_gb": host_gb} | settings
    return InferenceConfig(
        block_size_tokens=setting.block_size_tokens,
        max_requests=setting.max_requests,
        max_tokens_per_step=setting.max_tokens_per_step,
        max_sequence_length=max(trace.longest, setting.block_size_tokens + 1),
        **settings,
    )


@dataclass(frozen=True)
class OwnCache:
    """The engine's own cache; policy: a name, plan: as `--plan`, or "FILE.py:Class"; None for the default."""

    policy: str | None = None
    plan: str | None = None

    @property
    def name(self) -> str:
        """ "ours", "ours-lru", or "ours-Class"."""
        return "ours" if self.policy is None else f"ours-{self.policy.rpartition(':')[2]}"

    def replay(self, trace: Trace, setting: ReplaySetting) -> ReplayResult:
        config = config_of(trace, setting, cache_changes(self.policy, self.plan))
        return EngineReplay(trace, spec_of(setting.shape), config, setting.cost).run()


@dataclass(frozen=True)
class UnlimitedCache:
    """The engine's own cache with a slot and a KV block for every prefix of the trace."""

    name: str = "unlimited"

    def replay(self, trace: Trace, setting: ReplaySetting) -> ReplayResult:
        """Serve the trace; the memory in `setting` is ignored."""
        size = setting.block_size_tokens
        num_prefixes = len(set().union(*(chain.hashes for chain in chains_of(trace, size))))
        num_held = setting.max_requests * (trace.longest // size + 1)
        memory = {"num_mamba_slots": num_prefixes + 1, "num_kv_blocks": num_prefixes + num_held}
        config = _config(trace, setting, memory)
        return EngineReplay(trace, spec_of(setting.shape), config, setting.cost).run()


DEFAULT_CACHE, UNLIMITED = OwnCache(), UnlimitedCache()


def replay(trace: Trace, shape: ModelShape, **setting: Any) -> ReplayResult:
    """What the engine's cache resumes of a trace, without a model.

    Args:
        trace: from `generate`, `read_trace`.
        shape: of `model_shape`.
        setting: fields of `ReplaySetting`: `state_gb` and `kv_gb`, or `total_gb`; `max_requests`, ...

    Raises:
        ValueError: the memory buys no state or no KV block.

    Example:
        `replay(generate("chat", 5), model_shape("nemotron-h-8b"), state_gb=16, kv_gb=20).share` is 0.948.
    """
    return DEFAULT_CACHE.replay(trace, ReplaySetting(shape, **setting))
