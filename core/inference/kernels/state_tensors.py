"""The tensors that hold states, and the slots that callers name in them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Indices = Sequence[int] | Tensor
"""Slots, -1 for none: a list of ints on the host, or an int64 tensor on the states' device."""


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


def check_indices(name: str, indices: Indices, states: Tensor) -> None:
    """Check the values of a list, and the dtype, shape and device of a tensor; does not synchronise.

    Args:
        states: [layers, slots, ...].

    Raises:
        ValueError: a listed slot lies outside `states`, or a tensor is not what the kernels read.
    """
    if isinstance(indices, Tensor):
        readable = indices.dtype == torch.int64 and indices.dim() == 1 and indices.is_contiguous()
        if not readable or indices.device != states.device:
            raise ValueError(
                f"{name} is {indices.dtype} {list(indices.shape)} on {indices.device}; accepted: a "
                f"contiguous 1-D int64 tensor on {states.device}"
            )
    elif not -1 <= min(indices) <= max(indices) < states.shape[1]:
        raise ValueError(f"{name} is {list(indices)}; accepted: -1 to {states.shape[1] - 1}")


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


def device_indices(device: torch.device, *indices: Indices) -> list[Tensor]:
    """The same slots as int64 tensors on `device`; does not synchronise.

    Args:
        device: where the tensors among `indices` lie already.
        indices: all lists among them have one length. They cross in one copy, from pinned memory.
    """
    lists = [list(entry) for entry in indices if not isinstance(entry, Tensor)]
    if not lists:
        return [entry for entry in indices if isinstance(entry, Tensor)]
    pinned = torch.tensor(lists, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    crossed = iter(pinned.to(device, non_blocking=True).unbind())
    return [entry if isinstance(entry, Tensor) else next(crossed) for entry in indices]
