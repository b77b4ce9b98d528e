"""Norms, activations and products of the `KernelSet` in plain torch.

Every function computes in `compute_dtype`, float32 or wider, and returns the dtype of its first argument,
rounded once at the end. `head_product` returns the compute dtype.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .reference_chunks import compute_dtype


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """x / rms(x) * (weight + offset) over the last dimension (arXiv 1910.07467).

    Args:
        x: [..., n].
        weight: [n].
        eps: is added to the mean square.
        offset: is added to the weight. 1 for models that store the weight's distance from 1.

    Returns: the shape and dtype of x.
    """
    dtype = compute_dtype(x.dtype)
    scale = weight.to(dtype) + offset if offset else weight.to(dtype)
    wide = x.to(dtype)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * scale).to(x.dtype)


def add_rms_norm(
    residual: Tensor, x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The sum of two tensors, and its `rms_norm`.

    Args:
        residual, x: [..., n].
        weight, eps, offset: as for `rms_norm`.

    Returns: residual + x, and the norm of this sum, both in the dtype of `residual`. The norm reads the sum
        after it was rounded.
    """
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
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
    eps: float = 0.0,
    *,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`rms_norm` of each head of queries and keys, then a rotation of the first channels of each head.

    Dimension i is paired with i + R / 2, for i below R / 2 (arXiv 2104.09864, in the order of transformers).

    Args:
        query: [T, heads, D]. key: [T, kv heads, D].
        cos, sin: [T, R] of each token's angles, R even and at most D. Channels from R on are not rotated.
        query_weight, key_weight: [D] of the norms, or None: no norm.
        eps, offset: of both norms, as for `rms_norm`.

    Returns: query and key, each in its shape and dtype, contiguous.
    """
    weighted = (query, query_weight), (key, key_weight)
    query, key = (_norm_rotary(x, cos, sin, weight, eps, offset) for x, weight in weighted)
    return query, key


def _norm_rotary(
    x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float, offset: float
) -> Tensor:
    dtype, rotary = compute_dtype(x.dtype), cos.shape[-1]
    wide = x.to(dtype)
    if weight is not None:
        wide = rms_norm(wide, weight, eps, offset=offset)
    rotated, rest = wide[..., :rotary], wide[..., rotary:]
    first, second = rotated.chunk(2, dim=-1)
    turned = rotated * cos.to(dtype)[:, None] + torch.cat([-second, first], -1) * sin.to(dtype)[:, None]
    return torch.cat([turned, rest], dim=-1).to(x.dtype)


def head_product(hidden: Tensor, weight: Tensor) -> Tensor:
    """The logits hidden @ weight.T.

    Args:
        hidden: [..., n].
        weight: [vocabulary, n].

    Returns: [..., vocabulary] in the compute dtype, never rounded to the dtype of the model.
    """
    dtype = compute_dtype(hidden.dtype)
    return F.linear(hidden.to(dtype), weight.to(dtype))
