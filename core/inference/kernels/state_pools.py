"""Pools of states, as whole states are copied and encoded."""

from typing import NamedTuple

from torch import Tensor


class ConvAndSsm(NamedTuple):
    """Two tensors of states, conv [layers, slots, ...] and ssm [layers, slots, ...]; one may be empty."""

    conv: Tensor
    ssm: Tensor


class CodedTensor(NamedTuple):
    """One state tensor in the pool of live slots and in the store of durable slots, of contiguous slots."""

    states: Tensor  # [layers, slots, *shape]
    numbers: Tensor  # [layers, durable slots, *shape]
    scales: Tensor | None = None  # [layers, durable slots, *shape without `scale_axis`] bfloat16; for int8
    scale_axis: int | None = None  # an axis of `shape`
