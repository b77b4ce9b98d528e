"""What a context must know of a model: `HybridStateSpec`, and the state tensors of the kinds of layer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, get_args

import torch

from .model_parts import ModelShard, Part, StateSegment, StateSplit
from .parallel_groups import ParallelGroups
from .validation import (
    INT32_MAX,
    boolean,
    ceil_div,
    check_fields,
    device,
    float_dtype,
    instance,
    integer,
    integers,
    one_of,
    refused,
    set_field,
)

STATE_ALIGNMENT = 128
"""Bytes at whose multiples a slot and its tensors begin: a GPU reads memory in lines of this size."""
SCALE_DTYPE = torch.bfloat16
"""A scale is rounded up to this, which adds 1.2 % to the error of random entries. Scales in float32 would add
2.9 % to the bytes of an 8B model's state."""
SCALES = "_scales"
Coarsest = Literal["exact", "bfloat16", "int8"]
"""How far a cached copy of a tensor may be rounded: not at all, to bfloat16, or to scaled int8."""


@dataclass(frozen=True)
class InputTensor:
    """One tensor of inputs since the last grid point, in all layers that have the state tensor it belongs to.

    With C tokens of a chunk and K drafts of a step at most, the token at position p lies at p % (taps + K)
    of a "ring" [taps + K, *shape], at p % C of a "chunk" [C, *shape], or of the end of "by_head" [*shape, C].
    A "block" [P, *shape], in the memory of a KV block, has P tokens: p lies in input block p % C // P.
    """

    name: str
    shape: tuple[int, ...]  # of one token in one layer
    dtype: torch.dtype
    layout: Literal["ring", "block", "chunk", "by_head"] = "chunk"
    taps: int = 0  # of the convolution whose inputs lie in a ring

    def of_request(self, chunk_size: int, num_drafts: int) -> tuple[int, ...]:
        """The shape of one request in one layer; `num_drafts`: drafts of a step, at most."""
        if self.layout == "ring":
            return (self.taps + num_drafts, *self.shape)
        return (*self.shape, chunk_size) if self.layout == "by_head" else (chunk_size, *self.shape)


@dataclass(frozen=True)
class StateTensor:
    """One tensor of a state, in all layers that have the tensor.

    Attributes:
        name: unique in the model; `StateTensor`s of two kinds of layer have two names.
        num_layers: the layers that have the tensor, on this rank.
        shape: of one sequence in one layer.
        dtype: as stored.
        grid: inside a prefill the tensor exists at positions that are multiples of this; at 1 it exists after
            each token.
        split: which part of a split model this is; None where this rank holds the whole.
        inputs: what a running request keeps of its tokens since the last grid point, so that decodes can
            replay them. Without inputs the tensor cannot be replayed.
        coarsest: the coarsest encoding of a cached copy, where `InferenceConfig.durable_state_dtype` asks for
            one. A tensor that declares nothing is stored as it is. Windows of convolutions are "bfloat16",
            matrices of scans "int8".
        scale_axis: for "int8": the axis of `shape` whose entries share a scale, not the first.
    """

    name: str
    num_layers: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    grid: int = 1
    split: StateSplit | None = None
    inputs: tuple[InputTensor, ...] = ()
    coarsest: Coarsest = "exact"
    scale_axis: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise refused("name", self.name, "a name such as 'conv' or 'ssm'")
        check_fields(self, integer, num_layers=(0, INT32_MAX), grid=(1, INT32_MAX))
        check_fields(self, float_dtype, dtype=())
        check_fields(self, one_of, coarsest=(get_args(Coarsest),))
        set_field(self, "shape", tuple(integers("shape", self.shape, 1, INT32_MAX)))
        if not isinstance(self.inputs, Sequence) or not all(
            isinstance(item, InputTensor) for item in self.inputs
        ):
            raise refused("inputs", self.inputs, "InputTensors")
        set_field(self, "inputs", tuple(self.inputs))
        if self.coarsest == "int8":
            check_fields(self, integer, scale_axis=(1, len(self.shape) - 1))
        elif self.scale_axis is not None:
            raise refused("scale_axis", self.scale_axis, "None unless coarsest is 'int8'")
        if self.split is not None:
            instance("split", self.split, StateSplit)
            here = self.split.layers.count, sum(segment.size for segment in self.split.segments)
            if here != (self.num_layers, self.shape[0] if self.shape else 1):
                raise ValueError(
                    f"split is of {here[0]} layers of {here[1]} entries; accepted: "
                    f"{self.num_layers} layers of the first dimension of {self.shape}"
                )

    @property
    def parts(self) -> StateSplit:
        """`split`, or the whole of the tensor as one segment."""
        if self.split is not None:
            return self.split
        layers, entries = self.num_layers, self.shape[0] if self.shape else 1
        return StateSplit(Part(0, layers, layers), (StateSegment(Part(0, entries, entries)),))

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence in all layers."""
        return self.num_layers * math.prod(self.shape) * self.dtype.itemsize


class SlotLayout(NamedTuple):
    """Where the tensors of a state lie in a slot: one after another, each with all its layers."""

    offsets: tuple[int, ...]  # bytes from the start of the slot to each tensor
    slot_bytes: int

    @classmethod
    def of(cls, states: Sequence[StateTensor]) -> "SlotLayout":
        """The layout of slots that hold these tensors."""
        offsets, end = [], 0
        for tensor in states:
            offsets.append(end)
            end += ceil_div(tensor.state_bytes, STATE_ALIGNMENT) * STATE_ALIGNMENT
        return cls(tuple(offsets), end)


# ---- how durable slots store states


@dataclass(frozen=True)
class EncodedTensor(StateTensor):
    """One tensor of a durable slot, split as the live tensor is; it may be of int8."""

    def __post_init__(self) -> None:
        """No checks: the fields come from a StateTensor."""


def durable_tensors(states: tuple[StateTensor, ...], dtype: str | None) -> tuple[StateTensor, ...]:
    """The tensors of a durable slot. `dtype`: `InferenceConfig.durable_state_dtype`.

    A tensor declared "bfloat16" becomes bfloat16, one declared "int8" becomes `dtype`; int8 numbers have a
    second tensor of scales, named + `SCALES`, without the state's `scale_axis`. No tensor has more bytes a
    number than before: float16 stays float16. `states` themselves where none changes.
    """
    stored: list[StateTensor] = []
    for state in states:
        axis = state.scale_axis
        if axis is not None and dtype == "int8":
            without = state.shape[:axis] + state.shape[axis + 1 :]
            stored.append(_encoded(state, state.name, state.shape, torch.int8))
            stored.append(_encoded(state, state.name + SCALES, without, SCALE_DTYPE))
        elif dtype is not None and state.coarsest != "exact" and state.dtype.itemsize > 2:
            stored.append(_encoded(state, state.name, state.shape, torch.bfloat16))
        else:
            stored.append(state)
    return tuple(stored)


def _encoded(state: StateTensor, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> EncodedTensor:
    return EncodedTensor(name, state.num_layers, shape, dtype, state.grid, state.split)


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
        supports_replay: whether the model replays decodes where `StepInputs.replay` is set; its states have
            inputs. Without effect for kernels that update states in place.
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
    supports_replay: bool = False
    strided_blocks: bool = False
    shard: ModelShard | None = None
    groups: ParallelGroups = field(default_factory=ParallelGroups)
    model: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.states, Sequence):
            raise refused("states", self.states, "a sequence of StateTensor")
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
        positive = 1, INT32_MAX
        check_fields(
            self, integer, num_attention_layers=(0, INT32_MAX), num_kv_heads=positive, head_dim=positive,
            vocab_size=positive,
        )  # fmt: skip
        check_fields(self, float_dtype, kv_dtype=())
        check_fields(self, device, device=())
        check_fields(self, boolean, separate_states=(), supports_replay=(), strided_blocks=())
        check_fields(self, instance, or_none=True, shard=(ModelShard,))
        check_fields(self, instance, groups=(ParallelGroups,), model=(str,))

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
    shared = StateSegment(groups, state_dim)
    window = _window("conv", layers, (StateSegment(heads, head_dim), shared, shared), conv_kernel, conv_dtype)
    inputs = (
        InputTensor("ssm_x", (heads.count, head_dim), conv_dtype, "block"),
        InputTensor("ssm_B", (groups.count, state_dim), conv_dtype, "block"),
        InputTensor("ssm_dt", (2, heads.count), torch.promote_types(conv_dtype, torch.float32), "by_head"),
    )
    split = StateSplit(_part(layers), (StateSegment(heads),))
    shape = heads.count, head_dim, state_dim
    ssm = StateTensor("ssm", split.layers.count, shape, ssm_dtype, grid, split, inputs, "int8", 1)
    return window, ssm


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
    keys = StateSegment(key_heads, key_dim)
    channels = keys, keys, StateSegment(value_heads, value_dim)
    window = _window("gdn_conv", layers, channels, conv_kernel, conv_dtype)
    gates = torch.promote_types(conv_dtype, torch.float32)
    inputs = [
        InputTensor("delta_k", (key_heads.count, key_dim), conv_dtype, "block"),
        InputTensor("delta_v", (value_heads.count, value_dim), conv_dtype, "block"),
        InputTensor("delta_g", (value_heads.count,), gates),
        InputTensor("delta_beta", (value_heads.count,), gates),
    ]
    if conv_dtype.itemsize == 2:
        # New values, and the inverse of a chunk's triangular system in blocks on and below its diagonal.
        inputs.append(InputTensor("delta_new_v", (value_heads.count, value_dim), conv_dtype, "block"))
        blocks = value_heads.count, (grid + 16) // 2
        inputs.append(InputTensor("delta_inverse", blocks, torch.float32, "by_head"))
    split = StateSplit(_part(layers), (StateSegment(value_heads),))
    shape = value_heads.count, key_dim, value_dim
    delta = StateTensor(
        "delta", split.layers.count, shape, state_dtype, grid, split, tuple(inputs), "int8", 2
    )
    return window, delta


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
    split = StateSplit(_part(layers), segments)
    channels = sum(segment.size for segment in segments)
    ring = InputTensor(f"{name}_in", (channels,), dtype, "ring", taps=conv_kernel)
    shape = channels, conv_kernel - 1
    return StateTensor(name, split.layers.count, shape, dtype, 1, split, (ring,), "bfloat16")


def _part(count: Count) -> Part:
    return count if isinstance(count, Part) else Part(0, count, count)
