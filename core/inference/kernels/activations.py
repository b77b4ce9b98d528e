"""Activations and gates on a GPU, each in one launch.

The squared ReLU is Liger's kernel, or torch operations where liger-kernel is not installed. The gates are
computed by a kernel of this file. Liger's SwiGLU rounds silu(gate) before the product with `up`, and takes
contiguous tensors only: gates are often slices of a wider projection.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import reference_pointwise
from .norms import dense_rows, liger_kernels

BLOCK = 1024
"""Elements of a program: 16 bytes of bfloat16 a thread."""
NUM_WARPS = 4


def relu_squared(x: Tensor) -> Tensor:
    """As `reference_pointwise.relu_squared`."""
    liger = liger_kernels(x)
    if liger is None:
        return reference_pointwise.relu_squared(x)
    squared: Tensor = liger.relu_squared(dense_rows(x))
    return squared.view(x.shape)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """As `reference_pointwise.silu_mul`; views whose last dimension is dense are not copied."""
    return _gated(up, gate, gate.dtype, silu=True)


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """As `reference_pointwise.sigmoid_mul`; views whose last dimension is dense are not copied."""
    return _gated(x, gate, x.dtype, silu=False)


def _gated(x: Tensor, gate: Tensor, dtype: torch.dtype, silu: bool) -> Tensor:
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if not out.numel():
        return out
    width = x.shape[-1]
    x_rows, gate_rows = dense_rows(x), dense_rows(gate)
    columns = min(BLOCK, triton.next_power_of_2(width))
    rows = BLOCK // columns
    num_rows = x_rows.shape[0]
    gated_kernel[(triton.cdiv(num_rows, rows), triton.cdiv(width, columns))](
        out, x_rows, gate_rows, num_rows, x_rows.stride(0), gate_rows.stride(0),
        WIDTH=width, SILU=silu, BLOCK_ROWS=rows, BLOCK_COLUMNS=columns, num_warps=NUM_WARPS,
    )  # fmt: skip
    return out


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
