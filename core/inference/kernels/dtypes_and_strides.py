"""The dtype that kernels compute in, the scale of scores, and the strides that kernels accept."""

import torch
from torch import Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which norms, decays, scores and states of a `dtype` model are computed."""
    return torch.promote_types(dtype, torch.float32)


def score_scale(scale: float | None, head_dim: int) -> float:
    """What attention multiplies scores by: `scale`, or what None stands for."""
    return float(head_dim**-0.5) if scale is None else scale


def dense(x: Tensor) -> Tensor:
    """x, whose columns lie side by side; a copy only where they do not yet."""
    return x if x.stride(-1) == 1 else x.contiguous()


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
