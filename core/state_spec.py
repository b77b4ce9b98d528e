"""What a context must know of a model: `HybridStateSpec`, and the state tensors of the kinds of layer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from .parallel_groups import ModelShard, ParallelGroups, Part
from .state_tensor import (
    Coarsest,
    InputTensor,
    SlotLayout,
    StateSegment,
    StateSplit,
    StateTensor,
    durable_tensors,
)
from .validation import INT32_MAX, boolean, device, float_dtype, instance, integer, set_field, shown

Count = int | Part
"""Layers, heads, groups or channels: a number, or the `Part` of the whole model's that this rank holds."""


@dataclass(frozen=True)
class HybridStateSpec:
    """What one sequence of a hybrid model needs in the cache: shapes, dtypes and device.

    Attributes:
        states: the tensors of a state. All of them are reserved, committed, copied and moved as one.
            See `mamba2_states`, `gated_delta_net_states` and `short_conv_states`.
        num_attention_layers, num_kv_heads, head_dim: the KV of one token is
            `num_attention_layers x 2 x num_kv_heads x head_dim` numbers of `kv_dtype`.
        vocab_size: token ids are 0 .. vocab_size - 1.
        device: where states, KV and the step's index tensors live.
        separate_states: whether the model's kernels read a state at one pool index and write the new state at
            others. Other kernels update a state in place: the context copies the state to a live slot before
            the step, and copies boundary states to their slots after the step.
        replays: whether the model replays decodes where `StepInputs.replay` is set; its states have inputs.
            Without effect for kernels that update states in place.
        strided_blocks: whether the model accepts a KV cache whose blocks have gaps between them, so that
            `kv_cache.flatten(2, 3)` is a copy. Where it does not, states and KV of `total_gb` get a fixed
            half each.
        shard: which part of the KV of a split model this rank holds; `StateTensor.split` says the same of the
            states. None where this rank holds all.
        groups: the ranks that hold the other parts. All ranks decide alike.
        model: a name for the model's shape and weights; debug mode compares the names of the ranks.
    """

    states: tuple[StateTensor, ...]
    num_attention_layers: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: torch.dtype
    vocab_size: int
    device: torch.device
    separate_states: bool = True
    replays: bool = False
    strided_blocks: bool = False
    shard: ModelShard | None = None
    groups: ParallelGroups = field(default_factory=ParallelGroups)
    model: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.states, Sequence):
            raise ValueError(f"states is {shown(self.states)}; accepted: StateTensors")
        set_field(self, "states", tuple(self.states))
        for index, tensor in enumerate(self.states):
            instance(f"states[{index}]", tensor, StateTensor)
        if self._grids and math.gcd(*self._grids) < min(self._grids):
            raise ValueError(
                f"states have the grids {', '.join(map(str, self._grids))}; accepted: multiples of the "
                "smallest, because a prefill is cut into chunks at its multiples"
            )
        names = [tensor.name for tensor in self.states]
        if len(set(names)) < len(names):
            raise ValueError(f"states have the names {', '.join(names)}; accepted: each name once")
        layers = integer("num_attention_layers", self.num_attention_layers, 0, INT32_MAX)
        set_field(self, "num_attention_layers", layers)
        for name in ("num_kv_heads", "head_dim", "vocab_size"):
            set_field(self, name, integer(name, getattr(self, name), 1, INT32_MAX))
        float_dtype("kv_dtype", self.kv_dtype)
        set_field(self, "device", device("device", self.device))
        boolean("separate_states", self.separate_states)
        boolean("replays", self.replays)
        boolean("strided_blocks", self.strided_blocks)
        if self.shard is not None:
            instance("shard", self.shard, ModelShard)
        instance("groups", self.groups, ParallelGroups)
        instance("model", self.model, str)

    def without_bytes(self) -> "HybridStateSpec":
        """The same grids and no layers: pools of any size without bytes."""
        empty = tuple(replace(tensor, num_layers=0, split=None) for tensor in self.states)
        return replace(self, states=empty, num_attention_layers=0, shard=None)

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's recurrent state, all tensors and layers."""
        return sum(tensor.state_bytes for tensor in self.states)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot that holds one state: `state_bytes`, and what aligns the tensors."""
        return SlotLayout.of(self.states).slot_bytes

    def durable_slot_bytes(self, dtype: str | None) -> int:
        """Bytes of a durable slot; `dtype`: `InferenceConfig.durable_state_dtype`."""
        return SlotLayout.of(durable_tensors(self.states, dtype)).slot_bytes

    @property
    def chunk_size(self) -> int | None:
        """Tokens of one chunk of a prefill: the smallest grid, which divides every other; None: no grid.

        Prefills are cut into chunks at its multiples, for all kinds of layer alike.
        """
        return min(self._grids, default=None)

    def chunk_tokens(self, block_size_tokens: int) -> int:
        """`chunk_size`; without one, a KV block: every boundary is then the end of a chunk."""
        return self.chunk_size or block_size_tokens

    @property
    def grid(self) -> int:
        """A KV block is a multiple of this, and so of every grid; 1 where no tensor has a grid."""
        return math.lcm(*self._grids)

    @property
    def _grids(self) -> list[int]:
        return [tensor.grid for tensor in self.states if tensor.grid > 1]

    def kv_block_bytes(self, block_size_tokens: int) -> int:
        """Bytes of one KV block of `block_size_tokens` tokens, all layers."""
        numbers = self.num_attention_layers * 2 * self.num_kv_heads * self.head_dim
        return numbers * integer("block_size_tokens", block_size_tokens, 1) * self.kv_dtype.itemsize


# ---- the state tensors of the kinds of layer, for `HybridStateSpec.states`


def mamba2_states(
    layers: Count,
    heads: Count,
    head_dim: int,
    groups: Count,
    state_dim: int,
    conv_kernel: int,
    conv_dtype: torch.dtype,
    ssm_dtype: torch.dtype,
    grid: int,
) -> tuple[StateTensor, StateTensor]:
    """Mamba-2 (arXiv 2405.21060): "conv" [x, B and C, taps - 1] and "ssm" [heads, head dim, state dim].

    `grid`: tokens of an SSD chunk.
    """
    heads, groups = _part(heads), _part(groups)
    channels = (
        StateSegment(heads, head_dim),
        StateSegment(groups, state_dim),
        StateSegment(groups, state_dim),
    )
    inputs = (
        InputTensor("ssm_x", (heads.count, head_dim), conv_dtype),
        InputTensor("ssm_B", (groups.count, state_dim), conv_dtype),
        InputTensor("ssm_gates", (2, heads.count), _gate_dtype(conv_dtype), "by_head"),
    )
    return (
        _window("conv", layers, channels, conv_kernel, conv_dtype),
        _tensor(
            "ssm", layers, (StateSegment(heads),), (head_dim, state_dim), ssm_dtype, grid, inputs,
            "int8", 1,
        ),
    )  # fmt: skip


def gated_delta_net_states(
    layers: Count,
    key_heads: Count,
    key_dim: int,
    value_heads: Count,
    value_dim: int,
    conv_kernel: int,
    conv_dtype: torch.dtype,
    state_dtype: torch.dtype,
    grid: int = 64,
) -> tuple[StateTensor, StateTensor]:
    """Gated delta net (arXiv 2412.06464): "gdn_conv" [q, k and v, taps - 1], "delta" [heads, key, value].

    `grid`: tokens of a chunk of the scan.
    """
    key_heads, value_heads = _part(key_heads), _part(value_heads)
    channels = (
        StateSegment(key_heads, key_dim),
        StateSegment(key_heads, key_dim),
        StateSegment(value_heads, value_dim),
    )
    gates = _gate_dtype(conv_dtype)
    inputs = (
        InputTensor("delta_k", (key_heads.count, key_dim), conv_dtype),
        InputTensor("delta_v", (value_heads.count, value_dim), conv_dtype),
        InputTensor("delta_g", (value_heads.count,), gates),
        InputTensor("delta_beta", (value_heads.count,), gates),
    )
    return (
        _window("gdn_conv", layers, channels, conv_kernel, conv_dtype),
        _tensor(
            "delta", layers, (StateSegment(value_heads),), (key_dim, value_dim), state_dtype, grid, inputs,
            "int8", 2,
        ),
    )  # fmt: skip


def short_conv_states(
    layers: Count, channels: Count, conv_kernel: int, dtype: torch.dtype
) -> tuple[StateTensor]:
    """A short convolution (LFM2): "short_conv" [channels, taps - 1], and nothing else."""
    segments = (StateSegment(_part(channels)),)
    return (_window("short_conv", layers, segments, conv_kernel, dtype),)


def _window(
    name: str, layers: Count, segments: tuple[StateSegment, ...], conv_kernel: int, dtype: torch.dtype
) -> StateTensor:
    """The last inputs of a convolution."""
    channels = sum(segment.size for segment in segments)
    ring = InputTensor(f"{name}_in", (channels,), dtype, "ring", taps=conv_kernel)
    return _tensor(name, layers, segments, (conv_kernel - 1,), dtype, 1, (ring,), "bfloat16")


def _gate_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _tensor(
    name: str,
    layers: Count,
    segments: tuple[StateSegment, ...],
    inner: tuple[int, ...],
    dtype: torch.dtype,
    grid: int,
    inputs: tuple[InputTensor, ...],
    coarsest: Coarsest,
    scale_axis: int | None = None,
) -> StateTensor:
    split = StateSplit(_part(layers), segments)
    shape = sum(segment.size for segment in segments), *inner
    return StateTensor(name, split.layers.count, shape, dtype, grid, split, inputs, coarsest, scale_axis)


def _part(count: Count) -> Part:
    return count if isinstance(count, Part) else Part(0, count, count)
