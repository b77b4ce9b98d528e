"""The decays and strengths of gated delta nets in Triton; the reference is `reference.delta_gates`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .time_steps import sigmoid, softplus

NUM_WARPS = 4
_TILE_ELEMENTS = 1024


def delta_gates(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, *, doubled: bool = False
) -> tuple[Tensor, Tensor]:
    """-exp(A_log) softplus(a + dt_bias) and sigmoid(b), in float32 and in one launch. Does not synchronise.

    Args:
        a, b: [T, Hv], or [T, Hk, Hv // Hk] by key heads; views with any strides.
        A_log, dt_bias: [Hv].
        doubled: whether the strengths are multiplied by two.

    Returns: the log decays g [T, Hv] and the strengths beta [T, Hv], float32.
    """
    if a.dim() == 2:
        a, b = a[:, None], b[:, None]
    tokens, outer, inner = a.shape
    heads = outer * inner
    g, beta = (torch.empty(tokens, heads, dtype=torch.float32, device=a.device) for _ in range(2))
    block_h = triton.next_power_of_2(heads)
    block_t = max(1, _TILE_ELEMENTS // block_h)
    delta_gates_kernel[(triton.cdiv(tokens, block_t),)](
        a, b, A_log, dt_bias, g, beta, tokens,
        *a.stride(), *b.stride(), A_log.stride(0), dt_bias.stride(0),
        HEADS=heads, INNER=inner, DOUBLED=doubled, BLOCK_T=block_t, BLOCK_H=block_h, num_warps=NUM_WARPS,
    )  # fmt: skip
    return g, beta


@triton.jit(do_not_specialize=["tokens"])
def delta_gates_kernel(
    # Pointers
    a, b, A_log, dt_bias, g, beta,
    # Dimensions
    tokens,
    # Strides
    a_token_stride, a_outer_stride, a_inner_stride,
    b_token_stride, b_outer_stride, b_inner_stride,
    rate_stride, bias_stride,
    # Meta-parameters
    HEADS: tl.constexpr, INNER: tl.constexpr, DOUBLED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """A program has BLOCK_T tokens of all heads."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.arange(0, BLOCK_H)
    is_head = head < HEADS
    inside = (token < tokens)[:, None] & is_head[None, :]
    a += (head // INNER * a_outer_stride + head % INNER * a_inner_stride)[None, :]
    b += (head // INNER * b_outer_stride + head % INNER * b_inner_stride)[None, :]
    step = tl.load(a + token[:, None] * a_token_stride, mask=inside, other=0.0).to(tl.float32)
    raw = tl.load(b + token[:, None] * b_token_stride, mask=inside, other=0.0).to(tl.float32)
    rate = tl.load(A_log + head * rate_stride, mask=is_head, other=0.0).to(tl.float32)
    bias = tl.load(dt_bias + head * bias_stride, mask=is_head, other=0.0).to(tl.float32)
    place = token[:, None] * HEADS + head[None, :]
    tl.store(g + place, -tl.exp(rate)[None, :] * softplus(step + bias[None, :]), mask=inside)
    strength = sigmoid(raw)
    if DOUBLED:
        strength *= 2.0
    tl.store(beta + place, strength, mask=inside)
