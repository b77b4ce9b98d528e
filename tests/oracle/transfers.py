"""Exports made by hand, engines to move prefixes between, and what an engine's cache is at a moment."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mambaslots as ms
import numpy as np
import torch
from mambaslots.distributed.transfer.forest import PrefixForest
from mambaslots.distributed.transfer.format import PrefixFormat
from mambaslots.distributed.transfer.shard import SPLITS, PrefixShard, dtype_of, shape_of
from mambaslots.inference.policies.prefix_hash import PUBLIC_ROOT
from mambaslots.inference.policies.salt_key import SaltKey
from mambaslots.model_shard import ModelShard
from oracle.serving import small_model

VERSION = "weights 1"
SALT_KEY = SaltKey(b"the key of tests")
ROOTS = PUBLIC_ROOT, SALT_KEY.root(b"x")


def engine_of(model: ms.models.HybridLM | None = None, **overrides: Any) -> ms.DynamicInferenceEngine:
    """Of `small_model`, or another, with room for everything and a weights version."""
    version = overrides.pop("weights_version", VERSION)
    settings: dict[str, Any] = {
        "block_size_tokens": 8, "max_requests": 4, "max_tokens": 64, "max_sequence_length": 256,
        "num_kv_blocks": 128, "num_mamba_slots": 64, "salt_key": b"the key of tests",
    }  # fmt: skip
    config = ms.InferenceConfig(**(settings | overrides))
    engine = ms.DynamicInferenceEngine(model or small_model(), config)
    engine.set_weights_version(version)
    return engine


def maps_of(engine: ms.DynamicInferenceEngine) -> dict[str, Any]:
    """What the cache holds where, and who holds it: plain values to compare. Not recency."""
    kv, slots = engine.context.kv_block_allocator, engine.context.mamba_slot_allocator
    assert slots is not None
    return {
        "references": kv.block_ref_counts.tolist(),
        "hashes": kv.block_hashes.tolist(),
        "blocks": dict(kv.kv_hash_to_block_id),
        "free blocks": kv.total_avail,
        "parents": list(kv.tree.parents),
        "states": slots.block_to_slot.tolist(),
        "state keys": dict(slots.hash_to_block_id),
        "free slots": list(slots.slots.free),
        "reserved": dict(slots.slots.reserved),
        "pins": dict(slots.slots.pins),
        "order": slots.slots.by_use(),
    }


def tensors_of(engine: ms.DynamicInferenceEngine) -> list[torch.Tensor]:
    pool = engine.context.memory.state_pool
    return [t.clone() for t in (pool["conv"], pool["ssm"], engine.context.memory.kv_cache)]


def random_forest(seed: int, roots: tuple[bytes, ...] = ROOTS, size: int = 4) -> PrefixForest:
    """A dozen blocks in a few trees; every leaf and some others have states, in no order."""
    draw = np.random.default_rng(seed)
    parents = [-1 - i for i in range(len(roots))]
    parents += [int(draw.integers(-len(roots), node)) for node in range(len(roots), 12)]
    tokens = [draw.integers(0, 256, size).astype("<u4").tobytes() for _ in parents]
    leaves = set(range(len(parents))) - set(parents)
    states = draw.permutation(sorted(leaves | set(range(0, len(parents), 3)))).tolist()
    key_id = SALT_KEY.key_id if set(roots) - {PUBLIC_ROOT} else ""
    return PrefixForest(size, roots, key_id, tuple(parents), tuple(tokens), tuple(states))


def format_of(config: ms.models.HybridConfig, block_size_tokens: int = 4) -> PrefixFormat:
    return PrefixFormat(
        weights_version=VERSION, block_size_tokens=block_size_tokens, ssd_chunk_size=config.ssd_chunk_size,
        vocab_size=config.vocab_size, conv_dtype=config.dtype, ssm_dtype=config.compute_dtype,
        kv_dtype=config.dtype, head_dim=config.head_dim, mamba_head_dim=config.mamba_head_dim,
        mamba_state_dim=config.mamba_state_dim, conv_width=config.conv_kernel - 1,
        mamba_layers=config.pattern.count("M"), mamba_heads=config.mamba_num_heads,
        mamba_groups=config.mamba_num_groups, attention_layers=config.pattern.count("*"),
        kv_heads=config.num_kv_heads,
    )  # fmt: skip


def shard_of_rank(
    config: ms.models.HybridConfig, tensor: tuple[int, int] = (0, 1), pipeline: tuple[int, int] = (0, 1)
) -> ModelShard:
    """(rank, size) of the tensor and of the pipeline group -> what the rank holds, without any process."""
    groups: Any = SimpleNamespace(
        tensor_rank=tensor[0], tensor_size=tensor[1], pipeline_rank=pipeline[0], pipeline_size=pipeline[1]
    )
    return config.shard(groups)


def random_export(config: ms.models.HybridConfig, seed: int = 0) -> PrefixShard:
    """Of a whole model, with distinct numbers everywhere."""
    form, forest, shard = format_of(config), random_forest(seed), shard_of_rank(config)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(
            shape_of(name, form, forest, shard), generator=generator, dtype=dtype_of(name, form)
        )
        for name in SPLITS
    }
    return PrefixShard(form, forest, shard, (1, 1), tensors)


def conv_of(shard: PrefixShard) -> torch.Tensor:
    """[layers, states, channels, window], as a pool holds it."""
    return torch.cat([shard.tensors[name].flatten(2, 3) for name in ("conv_x", "conv_B", "conv_C")], 2)


def with_forest(shard: PrefixShard, **changes: Any) -> PrefixShard:
    return replace(shard, forest=replace(shard.forest, **changes))
