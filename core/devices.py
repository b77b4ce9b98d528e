"""Which device is current while work is launched, and numbers that the host sends to one."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor


def on_device_of(device: torch.device | None) -> AbstractContextManager[object]:
    """A context in which `device` is the current CUDA device; no effect for None or another kind."""
    # Triton launches on the current device, wherever its tensors are; nccl sends Python objects from it. With
    # -1, `torch.cuda.device` makes no CUDA call.
    is_cuda = device is not None and device.type == "cuda"
    return torch.cuda.device(device.index if is_cuda and device is not None else -1)


def tensor_on(device: torch.device, numbers: Sequence[Any], dtype: torch.dtype = torch.int64) -> Tensor:
    """A list of numbers, or of lists, on `device`, by one copy that does not synchronise."""
    pinned = torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)
