"""Which kernels a model runs."""

from functools import cache
from importlib.util import find_spec

import torch

from ...validation import float_dtype, refused
from .torch_kernels import KernelSet

_REFERENCE = KernelSet()


@cache
def runs_triton(device: torch.device) -> bool:
    """Whether kernels apart from a model's own run in Triton on `device`; else torch, which synchronises."""
    return device.type == "cuda" and find_spec("triton") is not None


def kernel_set(device: torch.device, dtype: torch.dtype) -> KernelSet:
    """The kernels for weights of `dtype` on `device`.

    The torch functions serve a CPU, and float64 on any device. On a GPU they synchronise, and a CUDA graph
    cannot capture them. The Triton kernels serve a GPU in all other dtypes.

    Raises:
        ImportError: triton is not installed.
        ValueError: `device` is no torch.device, or `dtype` none in which weights can be computed.
    """
    if not isinstance(device, torch.device):
        raise refused("device", device, "a torch.device")
    if float_dtype("dtype", dtype) == torch.float64 or device.type != "cuda":
        return _REFERENCE
    try:
        from .gpu_kernels import GpuKernelSet
    except ModuleNotFoundError as error:
        raise ImportError(
            f"the kernels for {device} need {error.name}; install it with: pip install {error.name}"
        ) from error
    return GpuKernelSet()


__all__ = ["KernelSet", "kernel_set"]
