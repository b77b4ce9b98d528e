"""RMS norms on a GPU: kernels of liger-kernel, or torch operations where it is not installed.

A program of Liger's forward kernels normalises one row in one tile, whose size follows from the width alone.
A row therefore has the same bits in every batch. Liger's casting mode "gemma" computes in float32 and rounds
once, after the product with the weight. The mode "llama" rounds before that product, too.

`installed` imports liger-kernel when it is first called. No function synchronises.
"""

from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

from . import reference_pointwise

ROUND_ONCE = "gemma"
"""Liger's casting mode."""


class LigerKernels(NamedTuple):
    """The raw forward functions of liger-kernel that are used here."""

    rms_norm: Any
    add_rms_norm: Any
    relu_squared: Any


@cache
def installed() -> LigerKernels | None:
    """Liger's functions; None where liger-kernel is not installed. The first call takes seconds."""
    try:
        from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_forward
        from liger_kernel.ops.relu_squared import relu_squared_forward
        from liger_kernel.ops.rms_norm import rms_norm_forward
    except ImportError:
        return None
    return LigerKernels(rms_norm_forward, fused_add_rms_norm_forward, relu_squared_forward)


def liger_kernels(x: Tensor) -> LigerKernels | None:
    """Liger's functions, where they compute x.

    Returns: None where liger-kernel is not installed, where x has no elements, and where x is not on a GPU:
        Triton's interpreter has no methods for the scalars of Liger's kernels.
    """
    return installed() if x.is_cuda and x.numel() else None


def dense_rows(x: Tensor) -> Tensor:
    """x [..., n] as [rows, n], whose columns lie side by side; a view where the strides allow it."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def describe() -> str:
    """Which norms a GPU runs, and why not the better ones."""
    if installed() is None:
        return "torch (liger-kernel is not installed; install it with: pip install liger-kernel)"
    return "liger-kernel"


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """As `reference_pointwise.rms_norm`; one launch of Liger's kernel."""
    liger = liger_kernels(x)
    if liger is None:
        return reference_pointwise.rms_norm(x, weight, eps, offset=offset)
    rows = dense_rows(x)
    normed: Tensor = liger.rms_norm(rows, weight, eps, offset, ROUND_ONCE, True)[0]  # True: a row a program
    return normed.view(x.shape)


def add_rms_norm(
    residual: Tensor, x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """As `reference_pointwise.add_rms_norm`; one launch of Liger's kernel where both dtypes are the same."""
    liger = liger_kernels(x)
    if liger is None or x.dtype != residual.dtype:
        return reference_pointwise.add_rms_norm(residual, x, weight, eps, offset=offset)
    normed, total, *_ = liger.add_rms_norm(
        dense_rows(x), dense_rows(residual), weight, eps, offset, ROUND_ONCE
    )
    return total.view(residual.shape), normed.view(residual.shape)
