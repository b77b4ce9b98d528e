"""Mamba-2's time steps and rates in Triton; the reference is `reference.time_steps`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_WARPS = 4
_TILE_ELEMENTS = 1024


def time_steps(
    dt: Tensor, dt_bias: Tensor, A_log: Tensor, shortest: float = 0.0, longest: float = float("inf")
) -> tuple[Tensor, Tensor]:
    """clamp(softplus(dt + dt_bias)) and -exp(A_log), in float32 and in one launch. Does not synchronise.

    Args:
        dt: [T, H], a view with any strides. dt_bias, A_log: [H].
        shortest, longest: the bounds of the time steps.

    Returns: the time steps [T, H] and A [H], float32.
    """
    tokens, heads = dt.shape
    steps = torch.empty(tokens, heads, dtype=torch.float32, device=dt.device)
    A = torch.empty(heads, dtype=torch.float32, device=dt.device)
    block_h = triton.next_power_of_2(heads)
    block_t = max(1, _TILE_ELEMENTS // block_h)
    time_steps_kernel[(max(1, triton.cdiv(tokens, block_t)),)](
        dt, dt_bias, A_log, steps, A, tokens, shortest, longest,
        *dt.stride(), dt_bias.stride(0), A_log.stride(0),
        HEADS=heads, BLOCK_T=block_t, BLOCK_H=block_h, num_warps=NUM_WARPS,
    )  # fmt: skip
    return steps, A


@triton.jit
def softplus(x):
    """log(1 + exp(x)), without overflow and to float32's precision for every x.

    With u = exp(-|x|), log(1 + u) = 2 atanh(u / (2 + u)). The argument is at most 1/3, so that nine terms of
    the series suffice. log(1 + u) itself would lose the digits of a small u.
    """
    u = tl.exp(-tl.abs(x))
    s = u / (2.0 + u)
    square = s * s
    series = square * (1.0 / 17.0) + 1.0 / 15.0
    series = series * square + 1.0 / 13.0
    series = series * square + 1.0 / 11.0
    series = series * square + 1.0 / 9.0
    series = series * square + 1.0 / 7.0
    series = series * square + 1.0 / 5.0
    series = series * square + 1.0 / 3.0
    series = series * square + 1.0
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), without overflow."""
    u = tl.exp(-tl.abs(x))
    return tl.where(x < 0.0, u, 1.0) / (1.0 + u)


@triton.jit(do_not_specialize=["tokens"])
def time_steps_kernel(
    # Pointers
    dt, dt_bias, A_log, steps, A,
    # Dimensions and bounds
    tokens, shortest, longest,
    # Strides
    dt_token_stride, dt_head_stride, bias_stride, a_stride,
    # Meta-parameters
    HEADS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """A program has BLOCK_T tokens; the first one also has A."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.arange(0, BLOCK_H)
    is_head = head < HEADS
    inside = (token < tokens)[:, None] & is_head[None, :]
    place = token[:, None] * dt_token_stride + head[None, :] * dt_head_stride
    raw = tl.load(dt + place, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(dt_bias + head * bias_stride, mask=is_head, other=0.0).to(tl.float32)
    found = tl.maximum(softplus(raw + bias[None, :]), shortest, propagate_nan=tl.PropagateNan.ALL)
    found = tl.minimum(found, longest, propagate_nan=tl.PropagateNan.ALL)
    tl.store(steps + token[:, None] * HEADS + head[None, :], found, mask=inside)
    if tl.program_id(0) == 0:
        rate = tl.load(A_log + head * a_stride, mask=is_head, other=0.0).to(tl.float32)
        tl.store(A + head, -tl.exp(rate), mask=is_head)
