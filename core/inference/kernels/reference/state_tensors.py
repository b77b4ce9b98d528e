"""The tensors that hold states, and the slots that callers name in them."""

from typing import NamedTuple

from torch import Tensor


class StateTensors(NamedTuple):
    """Two tensors of states, conv [layers, slots, ...] and ssm [layers, slots, ...]; one may be empty."""

    conv: Tensor
    ssm: Tensor


SMALLEST = 2.0**-110
"""Groups without an entry of this size are stored as zeros; their scales stay normal float32 numbers."""
LARGEST_NUMBER = 127
INVERSE_OF_LARGEST = 1.0 / LARGEST_NUMBER


class CodedTensor(NamedTuple):
    """One state tensor in the pool of live slots, and in the store of durable slots.

    Attributes:
        states: [layers, slots, *shape], a slot of a layer contiguous.
        numbers: [layers, durable slots, *shape], a slot of a layer contiguous.
        scales: [layers, durable slots, *shape without `scale_axis`] bfloat16; None where `numbers` are
            floats.
        scale_axis: an axis of `shape`; None without scales.
    """

    states: Tensor
    numbers: Tensor
    scales: Tensor | None = None
    scale_axis: int | None = None


def check_slots(**pools: Tensor) -> None:
    """Raise a ValueError that names a pool [slots, ...] whose slots have gaps."""
    for name, pool in pools.items():
        if not pool[:1].is_contiguous():
            raise ValueError(f"{name} has strides {pool.stride()}; accepted: contiguous slots of any stride")


def check_last_stride(**tensors: Tensor) -> None:
    """Raise a ValueError that names a tensor whose last dimension is not dense."""
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} has strides {tensor.stride()}; accepted: a last stride of 1")
