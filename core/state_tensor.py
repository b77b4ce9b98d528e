"""The tensors of one sequence's state: as a model declares them, as slots lay them out and store them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch

from .parallel_groups import Part
from .validation import INT32_MAX, float_dtype, instance, integer, integers, one_of, set_field, shown

ALIGNMENT = 128
"""Bytes at whose multiples a slot and its tensors begin: a GPU reads memory in lines of this size."""
SCALE_DTYPE = torch.bfloat16
"""A scale is rounded up to this, which adds 1.2 % to the error of random entries. Scales in float32 would add
2.9 % to the bytes of an 8B model's state."""
InputLayout = Literal["ring", "chunk", "by_head"]
Coarsest = Literal["exact", "bfloat16", "int8"]
"""How far a cached copy of a tensor may be rounded: not at all, to bfloat16, or to scaled int8."""


@dataclass(frozen=True)
class InputTensor:
    """One tensor of inputs since the last grid point, in all layers that have the state tensor it belongs to.

    Attributes:
        name: unique in the model.
        shape: of one token in one layer.
        dtype: as stored.
        layout: where tokens lie. With C tokens of a chunk and K drafts of a step at most:
            "ring": [taps + K, *shape], the token at position p lies at p % (taps + K).
            "chunk": [C, *shape], at p % C.
            "by_head": [*shape, C], at p % C of the last dimension.
        taps: of the convolution whose inputs lie in a ring; 0 for other layouts.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: InputLayout = "chunk"
    taps: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise ValueError(f"name is {shown(self.name)}; accepted: a name such as 'conv_in' or 'ssm_x'")
        set_field(self, "shape", tuple(integers("shape", self.shape, 1, INT32_MAX)))
        float_dtype("dtype", self.dtype)
        one_of("layout", self.layout, get_args(InputLayout))
        fewest, most = (1, INT32_MAX) if self.layout == "ring" else (0, 0)
        set_field(self, "taps", integer("taps", self.taps, fewest, most))

    def of_request(self, chunk_size: int, num_drafts: int) -> tuple[int, ...]:
        """The shape of one request in one layer; `num_drafts`: drafts of a step, at most."""
        if self.layout == "ring":
            return (self.taps + num_drafts, *self.shape)
        return (chunk_size, *self.shape) if self.layout == "chunk" else (*self.shape, chunk_size)


@dataclass(frozen=True)
class StateSegment:
    """Consecutive entries of a tensor's first dimension: `part.count` units, heads for example.

    Attributes:
        part: the units that this rank holds, of all that the model has.
        width: entries of one unit.
    """

    part: Part
    width: int = 1

    def __post_init__(self) -> None:
        instance("part", self.part, Part)
        integer("width", self.width, 1, INT32_MAX)

    @property
    def size(self) -> int:
        """Entries on this rank."""
        return self.part.count * self.width


@dataclass(frozen=True)
class StateSplit:
    """Which part of the whole model's tensor this rank holds.

    Attributes:
        layers: the layers.
        segments: the segments of the tensor's first dimension, one after another.
    """

    layers: Part
    segments: tuple[StateSegment, ...]

    def __post_init__(self) -> None:
        instance("layers", self.layers, Part)
        if not isinstance(self.segments, Sequence) or not self.segments:
            raise ValueError(f"segments is {shown(self.segments)}; accepted: one or more StateSegments")
        set_field(self, "segments", tuple(self.segments))
        for index, segment in enumerate(self.segments):
            instance(f"segments[{index}]", segment, StateSegment)


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
            raise ValueError(f"name is {shown(self.name)}; accepted: a name such as 'conv' or 'ssm'")
        set_field(self, "num_layers", integer("num_layers", self.num_layers, 0, INT32_MAX))
        set_field(self, "shape", tuple(integers("shape", self.shape, 1, INT32_MAX)))
        float_dtype("dtype", self.dtype)
        set_field(self, "grid", integer("grid", self.grid, 1, INT32_MAX))
        if not isinstance(self.inputs, Sequence) or not all(
            isinstance(one, InputTensor) for one in self.inputs
        ):
            raise ValueError(f"inputs is {shown(self.inputs)}; accepted: InputTensors")
        set_field(self, "inputs", tuple(self.inputs))
        one_of("coarsest", self.coarsest, get_args(Coarsest))
        if self.coarsest == "int8":
            set_field(self, "scale_axis", integer("scale_axis", self.scale_axis, 1, len(self.shape) - 1))
        elif self.scale_axis is not None:
            raise ValueError(
                f"scale_axis is {shown(self.scale_axis)}; accepted: None unless coarsest is 'int8'"
            )
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
    def bytes_per_layer(self) -> int:
        """Bytes of one sequence in one layer."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence in all layers."""
        return self.num_layers * self.bytes_per_layer


class SlotLayout(NamedTuple):
    """Where the tensors of a state lie in a slot: one after another, each with all its layers.

    Attributes:
        offsets: bytes from the start of the slot to each tensor.
        slot_bytes: the size of a slot.
    """

    offsets: tuple[int, ...]
    slot_bytes: int

    @classmethod
    def of(cls, states: Sequence[StateTensor]) -> "SlotLayout":
        """The layout of slots that hold these tensors."""
        offsets, end = [], 0
        for tensor in states:
            offsets.append(end)
            end += -(-tensor.state_bytes // ALIGNMENT) * ALIGNMENT
        return cls(tuple(offsets), end)


# ---- how durable slots store states


@dataclass(frozen=True)
class EncodedTensor(StateTensor):
    """One tensor of a durable slot, split as the live tensor is; it may be of int8."""

    def __post_init__(self) -> None:
        """No checks: the fields come from a StateTensor."""


class TensorEncoding(NamedTuple):
    """How a durable slot stores one state tensor."""

    state: StateTensor  # as live slots have it
    numbers: EncodedTensor  # of the shape of `state`: as in the live slot, in bfloat16, or in int8
    scales: EncodedTensor | None  # for int8: factors of `numbers`, of the shape without `state.scale_axis`

    @property
    def tensors(self) -> tuple[EncodedTensor, ...]:
        """`numbers`, and `scales` where there are any."""
        return (self.numbers,) if self.scales is None else (self.numbers, self.scales)


def encodings_of(states: Sequence[StateTensor], dtype: str | None) -> tuple[TensorEncoding, ...]:
    """How durable slots store `states`; empty if as live slots do. `dtype`: `durable_state_dtype`.

    A tensor that is declared "bfloat16" becomes bfloat16, one that is declared "int8" becomes `dtype`. No
    tensor has more bytes a number than before: float16 stays float16.
    """
    if dtype is None:
        return ()
    encodings = tuple(_encoding(state, dtype) for state in states)
    changed = any(found.scales is not None or found.numbers.dtype != found.state.dtype for found in encodings)
    return encodings if changed else ()


def durable_tensors(states: Sequence[StateTensor], dtype: str | None) -> tuple[StateTensor, ...]:
    """The tensors of a durable slot: `states` themselves, or those of their encodings."""
    encodings = encodings_of(states, dtype)
    if not encodings:
        return tuple(states)
    return tuple(tensor for encoding in encodings for tensor in encoding.tensors)


def _encoding(state: StateTensor, dtype: str) -> TensorEncoding:
    if state.coarsest == "int8" and dtype == "int8":
        axis = state.scale_axis
        assert axis is not None
        scales = _stored(state, f"{state.name}_scales", state.shape[:axis] + state.shape[axis + 1 :])
        return TensorEncoding(state, _stored(state, state.name, state.shape, torch.int8), scales)
    narrows = state.coarsest != "exact" and state.dtype.itemsize > 2
    return TensorEncoding(
        state, _stored(state, state.name, state.shape, torch.bfloat16 if narrows else state.dtype), None
    )


def _stored(
    state: StateTensor, name: str, shape: tuple[int, ...], dtype: torch.dtype = SCALE_DTYPE
) -> EncodedTensor:
    return EncodedTensor(name, state.num_layers, shape, dtype, state.grid, state.split)
