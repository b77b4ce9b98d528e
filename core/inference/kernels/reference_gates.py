"""Gates and gated norms of mixers in plain torch; `reference` re-exports them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .reference_chunks import compute_dtype


def time_steps(
    dt: Tensor, dt_bias: Tensor, A_log: Tensor, shortest: float = 0.0, longest: float = float("inf")
) -> tuple[Tensor, Tensor]:
    """Mamba-2's time steps and rates (arXiv 2405.21060): clamp(softplus(dt + dt_bias)) and -exp(A_log).

    Args:
        dt: [T, H]. dt_bias, A_log: [H].
        shortest, longest: the bounds of the time steps.

    Returns: the time steps [T, H] and A [H], both in the compute dtype.
    """
    dtype = compute_dtype(dt.dtype)
    steps = _softplus(dt.to(dtype) + dt_bias.to(dtype))
    if (shortest, longest) != (0.0, float("inf")):
        steps = steps.clamp(shortest, longest)
    return steps, -A_log.to(dtype).exp()


def delta_gates(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, *, doubled: bool = False
) -> tuple[Tensor, Tensor]:
    """The gated delta rule's log decays and strengths: -exp(A_log) softplus(a + dt_bias) and sigmoid(b).

    Args:
        a, b: [T, Hv], or [T, Hk, Hv // Hk] by key heads.
        A_log, dt_bias: [Hv].
        doubled: whether the strengths are multiplied by two, to lie between 0 and 2.

    Returns: the log decays g [T, Hv] and the strengths beta [T, Hv], both in the compute dtype.
    """
    dtype = compute_dtype(a.dtype)
    a, b = a.flatten(1).to(dtype), b.flatten(1).to(dtype)
    g = -A_log.to(dtype).exp() * _softplus(a + dt_bias.to(dtype))
    return g, b.sigmoid() * (2.0 if doubled else 1.0)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """Mamba-2's output norm: the RMS norm of x * silu(gate), over each of `groups` parts of the channels.

    Args:
        x, gate: [T, n]. weight: [n].
        groups: divides n.
        eps: is added to the mean square.

    Returns: [T, n] in the dtype of x.
    """
    dtype = compute_dtype(x.dtype)
    parts = torch.unflatten(x.to(dtype) * F.silu(gate.to(dtype)), -1, (groups, -1))
    normed = _normed(parts, eps) * torch.unflatten(weight.to(dtype), -1, (groups, -1))
    return normed.flatten(-2).to(x.dtype)


def rms_norm_gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """A delta net's output norm (arXiv 2412.06464): the RMS norm of each head of x, times silu(gate).

    Args:
        x, gate: [T, H, D]; the gate may be [T, Hk, H // Hk, D].
        weight: [D] of every head, or [H, D].
        eps: is added to the mean square.

    Returns: [T, H, D] in the dtype of x.
    """
    dtype = compute_dtype(x.dtype)
    normed = _normed(x.to(dtype), eps) * weight.to(dtype)
    return (normed * F.silu(gate.reshape(x.shape).to(dtype))).to(x.dtype)


def _normed(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), without a threshold beyond which it is x."""
    return torch.logaddexp(x, x.new_zeros(()))
