"""Activations and gates in Triton, one launch each; none synchronises.

The references are the functions of the same names in `torch_pointwise`. Gates are often slices of a wider
projection.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...validation import ceil_div
from .dtypes_and_strides import dense
from .tiles import sigmoid

BLOCK = 1024  # elements of a program: 16 bytes of bfloat16 a thread
NUM_WARPS = 4


def relu_squared(x: Tensor) -> Tensor:
    """As `torch_pointwise.relu_squared`."""
    return _activated(x, x, x.dtype, "relu squared")


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """As `torch_pointwise.silu_mul`; views whose last dimension is dense are not copied."""
    return _activated(up, gate, gate.dtype, "silu")


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """As `torch_pointwise.sigmoid_mul`; views whose last dimension is dense are not copied."""
    return _activated(x, gate, x.dtype, "sigmoid")


def tile(width: int) -> tuple[int, int]:
    """Rows and columns of a program for rows of `width` numbers."""
    columns = min(BLOCK, triton.next_power_of_2(width))
    return BLOCK // columns, columns


def _activated(x: Tensor, gate: Tensor, dtype: torch.dtype, activation: str) -> Tensor:
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if not out.numel():
        return out
    # One stride leads from row to row, but not in heads that are some columns of a projection.
    is_even = (y.dim() != 3 or y.shape[0] == 1 or y.stride(0) == y.shape[1] * y.stride(1) for y in (x, gate))
    inner = 1 if all(is_even) else x.shape[1]
    x, gate = (dense(tensor.reshape(-1, inner, tensor.shape[-1])) for tensor in (x, gate))
    num_rows, width = x.shape[0] * inner, x.shape[2]
    rows, columns = tile(width)
    activation_kernel[(ceil_div(num_rows, rows), ceil_div(width, columns))](
        out, x, gate, num_rows, *x.stride()[:2], *gate.stride()[:2],
        INNER=inner, WIDTH=width, ACTIVATION=activation, BLOCK_ROWS=rows, BLOCK_COLUMNS=columns,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    return out


@triton.jit
def activation_kernel(
    # Pointers
    out, x, gate,
    # Dimensions
    num_rows,
    # Strides
    x_outer_stride, x_inner_stride, gate_outer_stride, gate_inner_stride,
    # Meta-parameters
    INNER: tl.constexpr, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """x * sigmoid(gate), times gate for "silu"; "relu squared" reads x alone. A program has a tile."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    inside = (row < num_rows) & (column < WIDTH)
    gate += row // INNER * gate_outer_stride + row % INNER * gate_inner_stride
    x += row // INNER * x_outer_stride + row % INNER * x_inner_stride
    values = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "relu squared":
        values = tl.where(values < 0.0, 0.0, values)  # as torch: NaN stays NaN
        factors = values
    else:
        gates = tl.load(gate + column, mask=inside, other=0.0).to(tl.float32)
        factors = tl.sigmoid(gates)
        if ACTIVATION == "silu":
            factors = gates * factors
    tl.store(out + row * WIDTH + column, (factors * values).to(out.dtype.element_ty), mask=inside)


def time_steps(
    dt: Tensor, dt_bias: Tensor, A_log: Tensor, shortest: float = 0.0, longest: float = float("inf")
) -> tuple[Tensor, Tensor]:
    """As `torch_pointwise.time_steps`, in float32; dt is a view with any strides."""
    tokens, heads = dt.shape
    steps = torch.empty(tokens, heads, dtype=torch.float32, device=dt.device)
    A = torch.empty(heads, dtype=torch.float32, device=dt.device)
    block_h = triton.next_power_of_2(heads)
    block_t = max(1, BLOCK // block_h)
    time_steps_kernel[(max(1, ceil_div(tokens, block_t)),)](
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
    bounded = tl.maximum(softplus(raw + bias[None, :]), shortest, propagate_nan=tl.PropagateNan.ALL)
    bounded = tl.minimum(bounded, longest, propagate_nan=tl.PropagateNan.ALL)
    tl.store(steps + token[:, None] * HEADS + head[None, :], bounded, mask=inside)
    if tl.program_id(0) == 0:
        rate = tl.load(A_log + head * a_stride, mask=is_head, other=0.0).to(tl.float32)
        tl.store(A + head, -tl.exp(rate), mask=is_head)


def delta_gates(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, *, doubled: bool = False
) -> tuple[Tensor, Tensor]:
    """As `torch_pointwise.delta_gates`, in float32; a and b are views with any strides."""
    if a.dim() == 2:
        a, b = a[:, None], b[:, None]
    tokens, outer, inner = a.shape
    heads = outer * inner
    g, beta = (torch.empty(tokens, heads, dtype=torch.float32, device=a.device) for _ in range(2))
    block_h = triton.next_power_of_2(heads)
    block_t = max(1, BLOCK // block_h)
    delta_gates_kernel[(ceil_div(tokens, block_t),)](
        a, b, A_log, dt_bias, g, beta, tokens,
        *a.stride(), *b.stride(), A_log.stride(0), dt_bias.stride(0),
        HEADS=heads, INNER=inner, DOUBLED=doubled, BLOCK_T=block_t, BLOCK_H=block_h, num_warps=NUM_WARPS,
    )  # fmt: skip
    return g, beta


@triton.jit
def gates_of(step, raw, rate, bias, DOUBLED: tl.constexpr):
    """g and beta of a delta net, in float32."""
    strength = sigmoid(raw.to(tl.float32))
    if DOUBLED:
        strength *= 2.0
    return -tl.exp(rate.to(tl.float32)) * softplus(step.to(tl.float32) + bias.to(tl.float32)), strength


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
    step = tl.load(a + token[:, None] * a_token_stride, mask=inside, other=0.0)
    raw = tl.load(b + token[:, None] * b_token_stride, mask=inside, other=0.0)
    rate = tl.load(A_log + head * rate_stride, mask=is_head, other=0.0)[None, :]
    bias = tl.load(dt_bias + head * bias_stride, mask=is_head, other=0.0)[None, :]
    decay, strength = gates_of(step, raw, rate, bias, DOUBLED)
    place = token[:, None] * HEADS + head[None, :]
    tl.store(g + place, decay, mask=inside)
    tl.store(beta + place, strength, mask=inside)
