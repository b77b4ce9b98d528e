"""RMS norms on a GPU in one Triton launch, alone or behind the sum of the residual stream.

The references are the functions of the same names in `reference_pointwise`. liger-kernel has kernels of the
same kind. A call of Liger's functions takes several times the host's time of a launch, which eager steps of
few tokens wait for, and also writes what a backward pass needs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Elements of a program, at least."""
ELEMENTS_A_WARP = 512
"""16 a thread: two loads of 16 bytes in 16-bit floats."""
MAX_WARPS = 16


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """As `reference_pointwise.rms_norm`. Does not synchronise.

    Views whose last dimension is dense are not copied. A row has the same bits in every batch: the tile of a
    program follows from the width alone.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(out, None, x, None, weight, eps, offset)
    return out


def add_rms_norm(
    residual: Tensor, x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """As `reference_pointwise.add_rms_norm`, with the promises of `rms_norm`."""
    total, out = (torch.empty(x.shape, dtype=residual.dtype, device=x.device) for _ in range(2))
    _launch(out, total, x, residual, weight, eps, offset)
    return total, out


def tile(width: int) -> tuple[int, int, int]:
    """Rows and columns of a program, and its warps, for rows of `width` numbers."""
    columns = triton.next_power_of_2(width)
    rows = max(1, BLOCK // columns)
    return rows, columns, min(MAX_WARPS, max(1, rows * columns // ELEMENTS_A_WARP))


def dense_rows(x: Tensor) -> Tensor:
    """x [..., n] as [rows, n], whose columns lie side by side; a view where the strides allow it."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _launch(
    out: Tensor,
    total: Tensor | None,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    offset: float,
) -> None:
    if not out.numel():
        return
    x = dense_rows(x)
    residual = None if residual is None else dense_rows(residual)
    num_rows, width = x.shape
    rows, columns, warps = tile(width)
    rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
        out, total, x, residual, weight, eps, offset, num_rows,
        x.stride(0), 0 if residual is None else residual.stride(0),
        WIDTH=width, ADD=residual is not None, BLOCK_ROWS=rows, BLOCK_COLUMNS=columns, num_warps=warps,
    )  # fmt: skip


@triton.jit
def rms_norm_kernel(
    # Pointers
    out, total, x, residual, weight,
    # Scalars
    eps, offset,
    # Dimensions
    num_rows,
    # Strides
    x_row_stride, residual_row_stride,
    # Meta-parameters
    WIDTH: tl.constexpr, ADD: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program has whole rows. The norm reads the sum as it is stored."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.arange(0, BLOCK_COLUMNS)[None, :]
    inside = (row < num_rows) & (column < WIDTH)
    values = tl.load(x + row * x_row_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        before = tl.load(residual + row * residual_row_stride + column, mask=inside, other=0.0)
        values += before.to(tl.float32)
        stored = values.to(total.dtype.element_ty)
        tl.store(total + row * WIDTH + column, stored, mask=inside)
        values = stored.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=1) / WIDTH + eps)[:, None]
    weights = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32) + offset
    tl.store(out + row * WIDTH + column, (values * scale * weights).to(out.dtype.element_ty), mask=inside)
