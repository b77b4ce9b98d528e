"""Logits lowered by penalties in one Triton launch, which copies and widens them, too."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...validation import ceil_div
from .dtypes_and_strides import dense

BLOCK = 4096


def penalize(logits: Tensor, counts: Tensor, count_rows: Tensor, settings: Tensor) -> Tensor:
    """As `torch_penalties.penalize`; does not synchronise."""
    logits = dense(logits)
    num_rows, vocabulary = logits.shape
    out = torch.empty(logits.shape, dtype=settings.dtype, device=logits.device)
    penalize_kernel[(num_rows, ceil_div(vocabulary, BLOCK))](
        out, logits, counts, count_rows, settings,
        num_rows, vocabulary, logits.stride(0), counts.stride(0), BLOCK=BLOCK,
    )  # fmt: skip
    return out


@triton.jit
def penalize_kernel(
    # Pointers
    out, logits, counts, count_rows, settings,
    # Dimensions
    num_rows, vocabulary,
    # Strides
    logits_row_stride, counts_row_stride,
    # Meta-parameters
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A program has a block of one row's vocabulary; it reads no counts where nothing is lowered."""
    row = tl.program_id(0).to(tl.int64)
    count_row = tl.load(count_rows + row)
    repetition = tl.load(settings + row)
    frequency = tl.load(settings + num_rows + row)
    presence = tl.load(settings + 2 * num_rows + row)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    value = tl.load(logits + row * logits_row_stride + token, mask=inside, other=0).to(out.dtype.element_ty)
    counted = inside & (count_row >= 0)
    count = tl.load(counts + count_row * counts_row_stride + token, mask=counted, other=0)
    repeated = tl.where(value < 0, value * repetition, value / repetition)
    value = tl.where(count > 0, repeated, value)
    generated = count >> 1
    value = value - frequency * generated - tl.where(generated > 0, presence, 0.0)
    tl.store(out + row * vocabulary + token, value, mask=inside)
