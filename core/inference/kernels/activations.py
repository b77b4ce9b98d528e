"""Activations and gates on a GPU, each in one Triton launch.

The references are the functions of the same names in `reference_pointwise`. The SwiGLU of liger-kernel rounds
silu(gate) before the product with `up`, and takes contiguous tensors only; gates are often slices of a wider
projection.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .norms import dense_rows

BLOCK = 1024
"""Elements of a program: 16 bytes of bfloat16 a thread."""
NUM_WARPS = 4


def relu_squared(x: Tensor) -> Tensor:
    """As `reference_pointwise.relu_squared`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    x = dense_rows(x)
    num_rows, width = x.shape
    rows, columns = tile(width)
    relu_squared_kernel[(triton.cdiv(num_rows, rows), triton.cdiv(width, columns))](
        out, x, num_rows, x.stride(0),
        WIDTH=width, BLOCK_ROWS=rows, BLOCK_COLUMNS=columns, num_warps=NUM_WARPS,
    )  # fmt: skip
    return out


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """As `reference_pointwise.silu_mul`; views whose last dimension is dense are not copied."""
    return _gated(up, gate, gate.dtype, silu=True)


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """As `reference_pointwise.sigmoid_mul`; views whose last dimension is dense are not copied."""
    return _gated(x, gate, x.dtype, silu=False)


def tile(width: int) -> tuple[int, int]:
    """Rows and columns of a program for rows of `width` numbers."""
    columns = min(BLOCK, triton.next_power_of_2(width))
    return BLOCK // columns, columns


def _gated(x: Tensor, gate: Tensor, dtype: torch.dtype, silu: bool) -> Tensor:
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if not out.numel():
        return out
    inner = 1 if _has_even_rows(x) and _has_even_rows(gate) else x.shape[1]
    x, gate = (_by_outer_row(tensor, inner) for tensor in (x, gate))
    num_rows, width = x.shape[0] * inner, x.shape[2]
    rows, columns = tile(width)
    gated_kernel[(triton.cdiv(num_rows, rows), triton.cdiv(width, columns))](
        out, x, gate, num_rows, *x.stride()[:2], *gate.stride()[:2],
        INNER=inner, WIDTH=width, SILU=silu, BLOCK_ROWS=rows, BLOCK_COLUMNS=columns, num_warps=NUM_WARPS,
    )  # fmt: skip
    return out


def _has_even_rows(x: Tensor) -> bool:
    """Whether one stride leads from row to row: not so in heads that are some columns of a projection."""
    return x.dim() != 3 or x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)


def _by_outer_row(x: Tensor, inner: int) -> Tensor:
    """x as [rows // inner, inner, n], whose columns lie side by side; a view where the strides allow it."""
    rows = x.reshape(-1, inner, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


@triton.jit
def relu_squared_kernel(
    # Pointers
    out, x,
    # Dimensions
    num_rows,
    # Strides
    x_row_stride,
    # Meta-parameters
    WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """max(x, 0) squared; a program has a tile of rows and columns."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    inside = (row < num_rows) & (column < WIDTH)
    values = tl.load(x + row * x_row_stride + column, mask=inside, other=0.0).to(tl.float32)
    values = tl.where(values < 0.0, 0.0, values)  # as torch: NaN stays NaN
    tl.store(out + row * WIDTH + column, (values * values).to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated_kernel(
    # Pointers
    out, x, gate,
    # Dimensions
    num_rows,
    # Strides
    x_outer_stride, x_inner_stride, gate_outer_stride, gate_inner_stride,
    # Meta-parameters
    INNER: tl.constexpr, WIDTH: tl.constexpr, SILU: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """x * sigmoid(gate), times gate where SILU; a program has a tile of rows and columns."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    inside = (row < num_rows) & (column < WIDTH)
    gate += row // INNER * gate_outer_stride + row % INNER * gate_inner_stride
    x += row // INNER * x_outer_stride + row % INNER * x_inner_stride
    gates = tl.load(gate + column, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    factors = tl.sigmoid(gates)
    if SILU:
        factors = gates * factors
    tl.store(out + row * WIDTH + column, (factors * values).to(out.dtype.element_ty), mask=inside)
