"""Products of a few rows with the bits that cuBLASLt gives the same rows among more.

cuBLAS takes 32 rows at least where bits are promised, and pays for those that are padding. Here the weights
are the left operand of the tensor cores, whose smallest right operand has eight columns: the rows. A program
adds up all of K in steps of 16, as cuBLASLt does without split-K; `engines.invariance` compares the bits.
"""

import os
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...validation import ceil_div
from .step_rows import FEW_ROWS

OUTPUTS = 16  # of a program, which is one warp
STEPS = (256, 128, 64, 32)  # numbers of K that are loaded at once: the first that divides K
STAGES = 4
_DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
_MM = (torch.ops.aten.mm.default, torch.ops.aten.mm.dtype)


class FewRowsProducts(TorchDispatchMode):
    """While it is the current mode, `product` makes the matrix products that it can make."""

    def __init__(self) -> None:
        super().__init__()
        self.num_made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_composite(func):
            with self:  # sees `mm`, of which torch makes `linear` and `matmul`
                return func.decompose(*args, **kwargs)
        if func in _MM and is_taken(args[0], args[1]):
            self.num_made += 1
            dtype = args[2] if len(args) > 2 else kwargs.get("out_dtype", args[0].dtype)
            return product(args[0], args[1], dtype)
        return func(*args, **kwargs)


@cache
def _is_composite(func: Any) -> bool:
    """Whether torch makes it of other operators, also where no mode is current."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    has_own = has_kernel(func.name(), "CUDA" if _DEVICE == "cuda" else "CPU")
    return has_kernel(func.name(), "CompositeImplicitAutograd") and not has_own


def is_taken(rows: Tensor, weight: Tensor) -> bool:
    """Whether `product` makes it: 1 to 8 dense rows of 16 bits by a dense transposed weight, K of 32s."""
    return (
        type(rows) is Tensor
        and type(weight) in (Tensor, torch.nn.Parameter)
        and rows.device.type == weight.device.type == _DEVICE
        and rows.dtype == weight.dtype
        and rows.dtype.itemsize == 2
        and rows.dtype.is_floating_point
        and 0 < len(rows) <= FEW_ROWS
        and rows.stride(1) == weight.stride(0) == 1
        and rows.shape[1] == len(weight) > 0
        and len(weight) % STEPS[-1] == 0
        and weight.shape[1] > 0
    )


def product(rows: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`rows` [up to 8, K] times `weight` [K, N], added in float32: a new [rows, N] of `dtype`."""
    (num_rows, size), num_outputs = rows.shape, weight.shape[1]
    out = torch.empty(num_rows, num_outputs, dtype=dtype, device=rows.device)
    few_rows_kernel[(ceil_div(num_outputs, OUTPUTS),)](
        out, rows, weight, num_rows, num_outputs, size, rows.stride(0), weight.stride(1),
        OUTPUTS=OUTPUTS, ROWS=FEW_ROWS, STEP=next(step for step in STEPS if size % step == 0),
        STAGES=STAGES, num_warps=1,
    )  # fmt: skip
    return out


@triton.jit
def few_rows_kernel(
    out, rows, weight, num_rows, num_outputs, size, row_stride, weight_stride,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """16 outputs of all rows: their weights [16, STEP], then rows [STEP, 8], until K is read."""
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row, k = tl.arange(0, ROWS), tl.arange(0, STEP)
    read = tl.minimum(outputs, num_outputs - 1).to(tl.int64)
    weights = weight + read[:, None] * weight_stride + k[None, :]
    columns = rows + row[None, :] * row_stride + k[:, None]
    is_row = (row < num_rows)[None, :]
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for _ in tl.range(0, size, STEP, num_stages=STAGES):
        total = tl.dot(tl.load(weights), tl.load(columns, mask=is_row, other=0.0), total)
        weights += STEP
        columns += STEP
    written = out + row[None, :].to(tl.int64) * num_outputs + outputs[:, None]
    tl.store(written, total.to(out.dtype.element_ty), mask=is_row & (outputs < num_outputs)[:, None])
