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
    x, gate = dense_rows(x), dense_rows(gate)
    num_rows, width = x.shape
    rows, columns = tile(width)
    gated_kernel[(triton.cdiv(num_rows, rows), triton.cdiv(width, columns))](
        out, x, gate, num_rows, x.stride(0), gate.stride(0),
        WIDTH=width, SILU=silu, BLOCK_ROWS=rows, BLOCK_COLUMNS=columns, num_warps=NUM_WARPS,
    )  # fmt: skip
    return out


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
    x_row_stride, gate_row_stride,
    # Meta-parameters
    WIDTH: tl.constexpr, SILU: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """x * sigmoid(gate), times gate where SILU; a program has a tile of rows and columns."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    inside = (row < num_rows) & (column < WIDTH)
    gates = tl.load(gate + row * gate_row_stride + column, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(x + row * x_row_stride + column, mask=inside, other=0.0).to(tl.float32)
    factors = tl.sigmoid(gates)
    if SILU:
        factors = gates * factors
    tl.store(out + row * WIDTH + column, (factors * values).to(out.dtype.element_ty), mask=inside)
