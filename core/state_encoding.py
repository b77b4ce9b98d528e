"""How a durable slot stores each state tensor in fewer bytes than a live slot does."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .state_tensor import StateTensor

SCALE_DTYPE = torch.bfloat16
"""A scale is rounded up to this, which adds 1.2 % to the error of random entries. Scales in float32 would add
2.9 % to the bytes of an 8B model's state."""


@dataclass(frozen=True)
class EncodedTensor(StateTensor):
    """One tensor of a durable slot; unlike a live tensor it may be of int8.

    Its first dimension has the heads or channels of the live tensor, so that both are split alike.
    """

    def __post_init__(self) -> None:
        """Nothing is checked: the fields come from a StateTensor."""


class TensorEncoding(NamedTuple):
    """What a durable slot keeps of one state tensor.

    Attributes:
        state: the tensor as live slots have it.
        numbers: of the shape of `state`: as in the live slot, in bfloat16, or in int8.
        scales: for int8: the factors of `numbers`, of the shape of `state` without `state.scale_axis`; else
            None.
    """

    state: StateTensor
    numbers: EncodedTensor
    scales: EncodedTensor | None

    @property
    def tensors(self) -> tuple[EncodedTensor, ...]:
        """`numbers`, and `scales` where there are any."""
        return (self.numbers,) if self.scales is None else (self.numbers, self.scales)


def encodings_of(states: Sequence[StateTensor], dtype: str | None) -> tuple[TensorEncoding, ...]:
    """How durable slots store `states`; empty where they store them as live slots do.

    A tensor that is declared "bfloat16" becomes bfloat16, one that is declared "int8" becomes `dtype`. No
    tensor takes more bytes a number than before: float16 stays float16. Other tensors stay as they are.

    Args:
        dtype: "bfloat16", "int8", or None: all tensors stay as they are.
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
