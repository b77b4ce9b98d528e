"""Which CUDA device is current while work is launched."""

from contextlib import AbstractContextManager

import torch

_CURRENT = -1
"""The index with which `torch.cuda.device` leaves the current device alone and makes no CUDA call."""


def on_device_of(device: torch.device | None) -> AbstractContextManager[object]:
    """A context in which `device` is the current CUDA device.

    Triton launches on the current device, whichever device its tensors are on, and nccl sends Python objects
    from it. For a CPU, another kind of device or None, the context changes nothing and needs no GPU.
    """
    if device is None or device.type != "cuda":
        return torch.cuda.device(_CURRENT)
    return torch.cuda.device(device.index)
