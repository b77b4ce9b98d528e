"""Matrix products on a GPU: the language model's head, and products that add over K in one fixed order.

`matmul` gives a row the same bits whatever the number of rows: every program computes one tile of one size,
from the first of K to the last, and no two programs add to one number. Neither function synchronises.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor


def head_product(hidden: Tensor, weight: Tensor) -> Tensor:
    """As `reference.pointwise.head_product`: logits in float32, from operands in the model's dtype.

    A bfloat16 or float16 weight is read as it lies: cuBLAS adds in float32, and writes float32. torch has
    this product for GPUs only, and for operands of one dtype; others are widened.
    """
    if not hidden.numel():
        return torch.zeros(*hidden.shape[:-1], len(weight), dtype=torch.float32, device=hidden.device)
    if hidden.dtype == torch.float32 or not hidden.is_cuda or hidden.dtype != weight.dtype:
        return F.linear(hidden.float(), weight.float())
    rows = hidden.reshape(-1, hidden.shape[-1])
    logits = torch.mm(rows, weight.t(), out_dtype=torch.float32)
    return logits.view(*hidden.shape[:-1], len(weight))


NUM_WARPS, NUM_STAGES = 4, 3


def matmul(a: Tensor, b: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """a @ b + bias, of matrices with any strides, bfloat16, float16 or float32, a and b of one dtype.

    One launch. Sums are float32, and rounded once, after the bias, to `out_dtype` (None: that of a). Products
    of float32 are exact to float32 ("ieee"). Raises a ValueError where the dtypes are others.
    """
    if a.dtype != b.dtype or a.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(
            f"a is {a.dtype} and b is {b.dtype}; accepted: bfloat16, float16 or float32, both the same"
        )
    rows, columns = a.shape[0], b.shape[1]
    out = torch.empty(rows, columns, dtype=out_dtype or a.dtype, device=a.device)
    if not out.numel():
        return out
    blocks = block_sizes(a.dtype == torch.float32)
    grid = triton.cdiv(columns, blocks["BLOCK_N"]), triton.cdiv(rows, blocks["BLOCK_M"])
    sequential_product_kernel[grid](
        out, a, b, bias,
        rows, columns, a.shape[1],
        *a.stride(), *b.stride(), 0 if bias is None else bias.stride(0),
        HAS_BIAS=bias is not None, WIDEN=a.device.type == "cpu",  # the interpreter's dot knows no bfloat16
        **blocks, num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    return out


def block_sizes(is_float32: bool) -> dict[str, int]:
    """The tile of a program. The number of rows has no say, so that it changes no bits."""
    if is_float32:  # multiplied without tensor cores, from registers
        return {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32}
    return {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64}


@triton.jit
def sequential_product_kernel(
    # pointers
    out, a, b, bias,
    # dimensions
    rows, columns, length,
    # strides
    a_row, a_column, b_row, b_column, bias_stride,
    # meta-parameters
    HAS_BIAS: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile [BLOCK_M, BLOCK_N] of a @ b + bias, over all of K."""
    m = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    here, there = m < rows, n < columns
    lefts = a + m[:, None] * a_row + k[None] * a_column
    rights = b + k[:, None] * b_row + n[None] * b_column
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, length, BLOCK_K):
        inside = first + k < length
        left = tl.load(lefts, mask=here[:, None] & inside[None], other=0.0)
        right = tl.load(rights, mask=inside[:, None] & there[None], other=0.0)
        if WIDEN:
            left, right = left.to(tl.float32), right.to(tl.float32)
        total = tl.dot(left, right, total, input_precision="ieee")
        lefts += BLOCK_K * a_column
        rights += BLOCK_K * b_row
    if HAS_BIAS:
        total += tl.load(bias + n * bias_stride, mask=there, other=0.0).to(tl.float32)[None]
    places = out + m[:, None] * columns + n[None]
    tl.store(places, total.to(out.dtype.element_ty), mask=here[:, None] & there[None])
