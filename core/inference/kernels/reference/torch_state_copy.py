"""Whole states copied, encoded and decoded by fancy indexing, in torch.

The int8 encoding. Entries along `scale_axis` share a scale: their largest absolute value / 127, rounded up to
bfloat16. A number is the entry / scale, rounded to the nearest integer, ties to even. So

- an entry is off by at most half its scale: 1/254 of the largest in its group, and 0.8 % of that more for
  the rounded scale;
- zeros stay zeros, and -0.0 becomes 0.0;
- a group whose largest entry is below `SMALLEST` becomes zeros;
- a group with a NaN or an infinity has the scale NaN: all its entries are NaN when they are decoded.

The bfloat16 encoding rounds to the nearest, ties to even. It keeps -0.0, NaN and infinities.
"""

import torch
from torch import Tensor

from ..state_pools import CodedTensor, ConvAndSsm

SMALLEST = 2.0**-110
"""Groups without an entry of this size are stored as zeros; their scales stay normal float32 numbers."""
INVERSE_OF_LARGEST = 1.0 / 127  # the largest int8


def copy_states(source: ConvAndSsm, read: Tensor, destination: ConvAndSsm, write: Tensor) -> None:
    """Copy states `source[:, read]` to `destination[:, write]`."""
    for source_pool, destination_pool in zip(source, destination, strict=True):
        destination_pool[:, write] = source_pool[:, read]


def code_tensor(tensor: CodedTensor, sources: Tensor, destinations: Tensor, *, encodes: bool) -> None:
    """Encode states `sources` of one tensor as durable states `destinations`, or decode them."""
    scales, axis = tensor.scales, tensor.scale_axis
    if not encodes:
        states = tensor.numbers[:, sources]
        if scales is not None and axis is not None:
            states = dequantise(states, scales[:, sources], axis + 2)
        tensor.states[:, destinations] = states.to(tensor.states.dtype)
    elif scales is None or axis is None:
        tensor.numbers[:, destinations] = tensor.states[:, sources].to(tensor.numbers.dtype)
    else:
        numbers, new_scales = quantise(tensor.states[:, sources], axis + 2)
        tensor.numbers[:, destinations], scales[:, destinations] = numbers, new_scales


def quantise(values: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """`values` as int8 and their bfloat16 scales, one scale for the entries along `axis`."""
    values = values.float()
    largest = values.abs().amax(axis)
    # Added below its 16 upper bits, which are a bfloat16, 0xFFFF rounds a positive float32 up.
    rounded_up = ((largest * INVERSE_OF_LARGEST).view(torch.int32) + 0xFFFF) & ~0xFFFF
    scales = torch.where(largest >= SMALLEST, rounded_up.view(torch.float32), 0.0)
    inverses = torch.where(scales > 0, 1.0 / scales, 0.0)
    scales = torch.where(largest.isfinite(), scales, float("nan"))
    inverses = torch.where(largest.isfinite(), inverses, 0.0)
    numbers = (values * inverses.unsqueeze(axis)).nan_to_num(0.0, 0.0, 0.0).round()
    return numbers.to(torch.int8), scales.to(torch.bfloat16)


def dequantise(numbers: Tensor, scales: Tensor, axis: int) -> Tensor:
    """The float32 values that `quantise` rounded to: exact products of 8 bits by 8 bits."""
    return numbers.float() * scales.float().unsqueeze(axis)
