"""The gated norms of mixers in Triton; the references are the functions of the same names in `reference`.

fla-core's `layer_norm_fwd` computes the same from gates of one row stride. Here a gate is any part of a
projection, and nothing but the result is written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .time_steps import sigmoid

_TILE_ELEMENTS = 2048
_ELEMENTS_A_WARP = 512  # 16 a thread: two loads of 16 bytes in 16-bit floats


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """Mamba-2's output norm: the RMS norm of x * silu(gate), over each of `groups` parts of the channels.

    Computes in float32, and rounds once. One launch. Does not synchronise. A row's bits do not depend on
    other rows.

    Args:
        x, gate: [T, n]; views with any token stride and a last stride of 1.
        weight: [n], contiguous.
        groups: divides n.
        eps: is added to the mean square.

    Returns: [T, n] in the dtype of x.

    Raises:
        ValueError: a last stride is not 1.
    """
    by_group = (groups, 1, -1)
    out = _normed(
        torch.unflatten(x, -1, by_group), torch.unflatten(gate, -1, by_group), weight, eps, gate_first=True
    )
    return out.flatten(1)


def rms_norm_gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """A delta net's output norm: the RMS norm of each head of x, times silu(gate).

    Computes in float32, and rounds once. One launch. Does not synchronise. A row's bits do not depend on
    other rows.

    Args:
        x, gate: [T, H, D]; the gate may be [T, Hk, H // Hk, D]. Views with a last stride of 1.
        weight: [D] of every head, or [H, D], contiguous.
        eps: is added to the mean square.

    Returns: [T, H, D] in the dtype of x.

    Raises:
        ValueError: a last stride is not 1.
    """
    heads = gate.shape[1:3] if gate.dim() == 4 else (1, gate.shape[1])
    gates = gate if gate.dim() == 4 else gate[:, None]
    return _normed(torch.unflatten(x, 1, heads), gates, weight, eps, gate_first=False)


def _normed(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, gate_first: bool) -> Tensor:
    """x and gate [T, outer, inner, D], weight [D] or [outer * inner * D] numbers: [T, outer * inner, D]."""
    for name, tensor in (("x", x), ("gate", gate)):
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} has strides {tensor.stride()}; accepted: a last stride of 1")
    tokens, outer, inner, dim = x.shape
    heads = outer * inner
    out = torch.empty(tokens, heads, dim, dtype=x.dtype, device=x.device)
    block_h, block_d, num_warps = block_sizes(heads, dim)
    gated_norm_kernel[(tokens * triton.cdiv(heads, block_h),)](
        x, gate, weight, out, eps, *x.stride()[:3], *gate.stride()[:3],
        HEADS=heads, INNER=inner, DIM=dim, WEIGHTS=weight.numel(), GATE_FIRST=gate_first,
        BLOCK_H=block_h, BLOCK_D=block_d, num_warps=num_warps,
    )  # fmt: skip
    return out


def block_sizes(heads: int, dim: int) -> tuple[int, int, int]:
    """A program's heads and channels, and its warps. The number of rows has no say in them."""
    block_d = triton.next_power_of_2(dim)
    block_h = min(triton.next_power_of_2(heads), max(1, _TILE_ELEMENTS // block_d))
    return block_h, block_d, min(16, max(1, block_h * block_d // _ELEMENTS_A_WARP))


@triton.jit
def gated_norm_kernel(
    # Pointers
    x, gate, weight, out,
    # Added to the mean square
    eps,
    # Strides
    x_token_stride, x_outer_stride, x_inner_stride,
    gate_token_stride, gate_outer_stride, gate_inner_stride,
    # Meta-parameters
    HEADS: tl.constexpr, INNER: tl.constexpr, DIM: tl.constexpr, WEIGHTS: tl.constexpr,
    GATE_FIRST: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A program has a token and BLOCK_H heads, or groups, of it."""
    blocks: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    token = (tl.program_id(0) // blocks).to(tl.int64)
    head = tl.program_id(0) % blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    inside = (head < HEADS)[:, None] & (d < DIM)[None, :]
    x += token * x_token_stride + (head // INNER * x_outer_stride + head % INNER * x_inner_stride)[:, None]
    gate += token * gate_token_stride
    gate += (head // INNER * gate_outer_stride + head % INNER * gate_inner_stride)[:, None]
    values = tl.load(x + d[None, :], mask=inside, other=0.0).to(tl.float32)
    gates = tl.load(gate + d[None, :], mask=inside, other=0.0).to(tl.float32)
    if WEIGHTS == DIM:
        weights = tl.load(weight + d, mask=d < DIM, other=0.0).to(tl.float32)[None, :]
    else:
        weights = tl.load(weight + head[:, None] * DIM + d[None, :], mask=inside, other=0.0).to(tl.float32)
    gates *= sigmoid(gates)
    if GATE_FIRST:
        values *= gates
    scale = tl.rsqrt(tl.sum(values * values, axis=1) * (1.0 / DIM) + eps)
    values = values * scale[:, None] * weights
    if not GATE_FIRST:
        values *= gates
    place = out + (token * HEADS + head[:, None]) * DIM + d[None, :]
    tl.store(place, values.to(out.dtype.element_ty), mask=inside)
