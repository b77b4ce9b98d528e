"""Argument checks of tensors, dtypes and devices."""

import math
from collections.abc import Sequence

import torch

from .validation import described, holds_data, shown

_FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGER_DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip
_MAX_BYTES = 2**63 - 1


def float_dtype(name: str, value: object) -> torch.dtype:
    """`value`, a dtype in which states and weights can be computed; else a ValueError."""
    if not isinstance(value, torch.dtype) or value not in _FLOAT_DTYPES:
        raise ValueError(f"{name} is {shown(value)}; accepted: torch.float16, bfloat16, float32 or float64")
    return value


def numbers(name: str, value: object, shape: Sequence[int]) -> torch.Tensor:
    """`value`, a tensor of this shape whose real numbers can be copied into a state; else a ValueError."""
    if (
        not isinstance(value, torch.Tensor)
        or value.shape != torch.Size(shape)
        or value.dtype not in _FLOAT_DTYPES + _INTEGER_DTYPES
        or not holds_data(value)
    ):
        raise ValueError(
            f"{name} {described(value)}; accepted: a tensor of real numbers, of shape {tuple(shape)}, that "
            "holds data"
        )
    return value


def device(name: str, value: object) -> torch.device:
    """`value`, a device or its name, as a device on which tensors hold data; else a ValueError."""
    try:
        if isinstance(value, (str, torch.device)) and holds_data(torch.empty(0, device=value)):
            return torch.device(value)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # every missing backend raises another type of error
        raise ValueError(f"{name} is {value!r}; accepted: a device that is here") from error
    raise ValueError(f"{name} is {shown(value)}; accepted: a torch.device that holds data, or its name")


def addressable(name: str, value: object, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Raise a ValueError that names `value` if a tensor of this shape and dtype has 2**63 bytes or more."""
    size = math.prod(shape) * dtype.itemsize
    if size > _MAX_BYTES:
        raise ValueError(
            f"{name} is {shown(value)}, which makes a tensor of {size:.3g} bytes; accepted: less than 2**63"
        )
