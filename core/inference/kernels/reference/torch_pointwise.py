"""Norms, activations, gates and the head's product in plain torch; norms are over the last dimension."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dtypes_and_strides import compute_dtype


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """x [..., n] / rms(x) * (weight + offset) (arXiv 1910.07467)."""
    dtype = compute_dtype(x.dtype)
    scale = weight.to(dtype) + offset if offset else weight.to(dtype)
    return (_normed(x.to(dtype), eps) * scale).to(x.dtype)


def add_rms_norm(
    residual: Tensor, x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """residual + x, rounded to the dtype of `residual`, and the `rms_norm` of this sum."""
    total = (residual + x).to(residual.dtype)
    return total, rms_norm(total, weight, eps, offset=offset)


def relu_squared(x: Tensor) -> Tensor:
    """max(x, 0) squared (arXiv 2109.08668), in the shape and dtype of x."""
    return F.relu(x.to(compute_dtype(x.dtype))).square().to(x.dtype)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (SwiGLU, arXiv 2002.05202), both [..., n], in the dtype of `gate`."""
    dtype = compute_dtype(gate.dtype)
    return (F.silu(gate.to(dtype)) * up.to(dtype)).to(gate.dtype)


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), both [..., n], in the dtype of `x`."""
    dtype = compute_dtype(x.dtype)
    return (x.to(dtype) * gate.to(dtype).sigmoid()).to(x.dtype)


def qk_norm_rotary(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, query_weight: Tensor | None = None,
    key_weight: Tensor | None = None, eps: float = 0.0, *, offset: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`rms_norm` of each head [T, heads, D] if it has a weight, then a rotation by the angles [T, R <= D].

    Dimension i is paired with i + R / 2, for i below R / 2 (arXiv 2104.09864, in the order of transformers).
    """
    weighted = (query, query_weight), (key, key_weight)
    query, key = (_rotated(x, cos, sin, weight, eps, offset) for x, weight in weighted)
    return query, key


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    dtype, rotary = compute_dtype(x.dtype), cos.shape[-1]
    wide = x.to(dtype)
    if weight is not None:
        wide = rms_norm(wide, weight, eps, offset=offset)
    rotated, unrotated = wide[..., :rotary], wide[..., rotary:]
    first, second = rotated.chunk(2, dim=-1)
    turned = rotated * cos.to(dtype)[:, None] + torch.cat([-second, first], -1) * sin.to(dtype)[:, None]
    return torch.cat([turned, unrotated], dim=-1).to(x.dtype)


def head_product(hidden: Tensor, weight: Tensor) -> Tensor:
    """The logits hidden @ weight.T in the compute dtype, never rounded to the dtype of the model."""
    dtype = compute_dtype(hidden.dtype)
    return F.linear(hidden.to(dtype), weight.to(dtype))


def time_steps(
    dt: Tensor, dt_bias: Tensor, A_log: Tensor, shortest: float = 0.0, longest: float = float("inf")
) -> tuple[Tensor, Tensor]:
    """Mamba-2's time steps clamp(softplus(dt + dt_bias)) of raw dt, and its rates A = -exp(A_log)."""
    dtype = compute_dtype(dt.dtype)
    steps = _softplus(dt.to(dtype) + dt_bias.to(dtype))
    if (shortest, longest) != (0.0, float("inf")):
        steps = steps.clamp(shortest, longest)
    return steps, -A_log.to(dtype).exp()


def delta_gates(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, *, doubled: bool = False
) -> tuple[Tensor, Tensor]:
    """A delta net's g = -exp(A_log) softplus(a + dt_bias), and beta = sigmoid(b), twice that if `doubled`.

    a and b are [T, Hv], or [T, Hk, Hv // Hk] by key heads.
    """
    dtype = compute_dtype(a.dtype)
    a, b = a.flatten(1).to(dtype), b.flatten(1).to(dtype)
    g = -A_log.to(dtype).exp() * _softplus(a + dt_bias.to(dtype))
    return g, b.sigmoid() * (2.0 if doubled else 1.0)


def gate_then_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """Mamba-2's output norm: the RMS norm of x * silu(gate), over each of `groups` parts of the channels."""
    dtype = compute_dtype(x.dtype)
    parts = torch.unflatten(x.to(dtype) * F.silu(gate.to(dtype)), -1, (groups, -1))
    normed = _normed(parts, eps) * torch.unflatten(weight.to(dtype), -1, (groups, -1))
    return normed.flatten(-2).to(x.dtype)


def rms_norm_then_gate(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """A delta net's output norm: each head's RMS norm times silu(gate); a gate may be [T, Hk, H // Hk, D]."""
    dtype = compute_dtype(x.dtype)
    normed = _normed(x.to(dtype), eps) * weight.to(dtype)
    return (normed * F.silu(gate.reshape(x.shape).to(dtype))).to(x.dtype)


def _normed(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), without a threshold beyond which it is x."""
    return torch.logaddexp(x, x.new_zeros(()))
