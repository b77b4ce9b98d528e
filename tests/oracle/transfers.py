"""Exports made by hand, engines to move prefixes between, and what an engine's cache is at a moment."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import mambaslots as ms
import msgspec
import numpy as np
import torch
from mambaslots.inference.contexts.cache.hashing import PUBLIC_ROOT, SaltKey
from mambaslots.model_parts import ModelShard, Part
from mambaslots.net import TransferChannel
from mambaslots.net.transfer.format import PrefixForest, PrefixFormat, Shard, shard_of
from mambaslots.net.transfer.hand_over import SendReport
from mambaslots.net.transfer.placement import ImportReport
from mambaslots.net.transfer.shard import PrefixShard, shapes_of
from mambaslots.state_spec import gated_delta_net_states, mamba2_states, short_conv_states
from oracle.kv_index import eviction_order
from oracle.serving import small_model

VERSION = "weights 1"
SALT_KEY = SaltKey(b"the key of tests")
ROOTS = PUBLIC_ROOT, SALT_KEY.root(b"x")


def engine_of(model: Any = None, **overrides: Any) -> ms.DynamicInferenceEngine:
    """Of `small_model`, or another, with room for everything and a weights version."""
    version = overrides.pop("weights_version", VERSION)
    settings: dict[str, Any] = {
        "block_size_tokens": 8, "max_requests": 4, "max_tokens_per_step": 64, "max_sequence_length": 256,
        "num_kv_blocks": 128, "num_mamba_slots": 64, "salt_key": b"the key of tests",
    }  # fmt: skip
    config = ms.InferenceConfig(**(settings | overrides))
    engine = ms.DynamicInferenceEngine(model or small_model(), config)
    engine.set_weights_version(version)
    return engine


def maps_of(engine: ms.DynamicInferenceEngine) -> dict[str, Any]:
    """What the cache holds where, and who holds it: plain values to compare. Of recency, that of states."""
    kv, slots = engine.context.prefix_cache.kv_blocks, engine.context.prefix_cache.slots
    return {
        "references": list(kv.tree.references),
        "hashes": list(map(kv.tree.hash_of, range(kv.total_count))),
        "blocks": dict(kv.tree.block_of_hash),
        "free blocks": kv.total_avail,
        "parents": list(kv.tree.parents),
        "states": dict(slots.cached_states.slot_of_block),
        "state keys": dict(slots.cached_states.state_block_of_hash),
        "free slots": list(slots.free_slots),
        "reserved": dict(slots.reserved),
        "pins": dict(slots.pins),
        "recency": slots.cached_states.by_recency(),
        "order of eviction": eviction_order(slots),
    }


def tensors_of(engine: ms.DynamicInferenceEngine) -> list[torch.Tensor]:
    memory = engine.context.memory
    return [t.clone() for t in (*memory.state_pool.tensors, memory.kv_cache)]


def send_once(
    engine: Any, store: Any, name: Any, prefixes: Any = None, *, timeout_s: float = 60.0
) -> SendReport:
    """Over a channel that is used once."""
    with TransferChannel(engine, store, name, "source", timeout_s=0.5) as channel:
        return channel.send(prefixes, timeout_s=timeout_s)


def receive_once(engine: Any, store: Any, name: Any, *, timeout_s: float = 60.0) -> ImportReport:
    """Over a channel that is used once."""
    with TransferChannel(engine, store, name, "destination", timeout_s=0.5) as channel:
        return channel.receive(timeout_s=timeout_s)


def random_forest(seed: int, roots: tuple[bytes, ...] = ROOTS, size: int = 4) -> PrefixForest:
    """A dozen blocks in a few trees; every leaf and some others have states, in no order."""
    draw = np.random.default_rng(seed)
    parents = [-1 - i for i in range(len(roots))]
    parents += [int(draw.integers(-len(roots), node)) for node in range(len(roots), 12)]
    tokens = [draw.integers(0, 256, size).astype("<u4").tobytes() for _ in parents]
    leaves = set(range(len(parents))) - set(parents)
    states = draw.permutation(sorted(leaves | set(range(0, len(parents), 3)))).tolist()
    key_id = SALT_KEY.key_id if set(roots) - {PUBLIC_ROOT} else ""
    return PrefixForest(roots, key_id, tuple(parents), tuple(tokens), tuple(states))


@dataclass(frozen=True)
class Declared:
    """The states and KV that a model of any kinds of layer would declare; they are not computed.

    Attributes:
        pattern: a letter a layer: "M" Mamba-2, "G" gated delta net, "C" short convolution, "*" attention; any
            other has no cache.
        heads: of Mamba-2, value heads, and half the channels of a short convolution.
        groups: of Mamba-2, and key heads.
    """

    pattern: str
    heads: int = 2
    groups: int = 2
    kv_heads: int = 2
    dtype: torch.dtype = torch.float32

    def spec(
        self, tensor: tuple[int, int] = (0, 1), pipeline: tuple[int, int] = (0, 1)
    ) -> ms.HybridStateSpec:
        """(rank, size) of the tensor and of the pipeline group -> what the rank declares."""
        first, stop = (len(self.pattern) * stage // pipeline[1] for stage in (pipeline[0], pipeline[0] + 1))

        def layers(letter: str) -> Part:
            before, here = self.pattern[:first].count(letter), self.pattern[first:stop].count(letter)
            return Part(before, before + here, self.pattern.count(letter))

        def part(total: int) -> Part:
            return Part.of_rank(total, *tensor)

        heads, groups, kv_heads = part(self.heads), part(self.groups), part(self.kv_heads)
        attention = layers("*")
        wide = torch.promote_types(self.dtype, torch.float32)
        states = (
            *mamba2_states(layers("M"), heads, 2, groups, 3, 4, self.dtype, wide, 4),
            *gated_delta_net_states(layers("G"), groups, 2, heads, 3, 3, self.dtype, wide, 8),
            *short_conv_states(layers("C"), part(2 * self.heads), 3, self.dtype),
        )
        letters = dict(zip(("conv", "ssm", "gdn_conv", "delta", "short_conv"), "MMGGC", strict=True))
        return ms.HybridStateSpec(
            states=[state for state in states if letters[state.name] in self.pattern],  # type: ignore[arg-type]
            num_attention_layers=attention.count, num_kv_heads=kv_heads.count, head_dim=2,
            kv_dtype=self.dtype, vocab_size=256, device=torch.device("cpu"),
            shard=ModelShard(attention_layers=attention, kv_heads=kv_heads),
        )  # fmt: skip

    def shards(self, tp: int, pp: int) -> list[Shard]:
        """Of each rank, in order."""
        return [shard_of(self.spec((t, tp), (p, pp))) for p in range(pp) for t in range(tp)]


def shard_of_rank(
    config: ms.models.HybridConfig, tensor: tuple[int, int] = (0, 1), pipeline: tuple[int, int] = (0, 1)
) -> Shard:
    """(rank, size) of the tensor and of the pipeline group -> what the rank holds, without any process."""
    groups: Any = SimpleNamespace(
        tensor_rank=tensor[0], tensor_size=tensor[1], pipeline_rank=pipeline[0], pipeline_size=pipeline[1]
    )
    shard = config.shard(groups)
    spec: Any = SimpleNamespace(
        states=config.states(groups), shard=shard, groups=ms.ParallelGroups(),
        num_attention_layers=shard.attention_layers.count, num_kv_heads=shard.kv_heads.count,
    )  # fmt: skip
    return shard_of(spec)


def random_export(spec: ms.HybridStateSpec, seed: int = 0, block_size_tokens: int = 4) -> PrefixShard:
    """Of the part that `spec` declares, with distinct numbers everywhere."""
    form, shard = PrefixFormat.of(spec, block_size_tokens, VERSION), shard_of(spec)
    forest = random_forest(seed, size=block_size_tokens)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=generator, dtype=form.tensors[name].torch_dtype)
        for name, shape in shapes_of(form, forest, shard).items()
    }
    return PrefixShard(form, forest, shard, tensors)


def dense(shard: PrefixShard, name: str) -> torch.Tensor:
    """[layers, states, *shape] of a state tensor, as a pool holds it; or "kv", as the KV cache is."""
    if name == "kv":
        return shard.tensors["kv"].permute(0, 3, 1, 4, 2, 5)
    segments = [shard.tensors[key] for key in shard.format.tensors if key.split(".")[0] == name]
    return torch.cat([tensor.flatten(2, 3) for tensor in segments], 2)


def with_forest(shard: PrefixShard, **changes: Any) -> PrefixShard:
    return replace(shard, forest=msgspec.structs.replace(shard.forest, **changes))
