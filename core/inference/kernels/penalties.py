"""Logits lowered for tokens that a request has had, in Triton: one pass over the rows."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


def penalize(logits: Tensor, counts: Tensor, rows: Tensor, count_rows: Tensor, settings: Tensor) -> None:
    """As `reference.penalties.penalize`; does not synchronise."""
    vocabulary = logits.shape[1]
    penalize_kernel[(len(rows), triton.cdiv(vocabulary, BLOCK))](
        logits, counts, rows, count_rows, settings,
        len(rows), vocabulary, logits.stride(0), counts.stride(0), BLOCK=BLOCK,
    )  # fmt: skip


@triton.jit
def penalize_kernel(
    # Pointers
    logits, counts, rows, count_rows, settings,
    # Dimensions
    num_rows, vocabulary,
    # Strides
    logits_row_stride, counts_row_stride,
    # Meta-parameters
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A program has a block of one row's vocabulary."""
    index = tl.program_id(0)
    logits += tl.load(rows + index) * logits_row_stride
    counts += tl.load(count_rows + index) * counts_row_stride
    repetition = tl.load(settings + index)
    frequency = tl.load(settings + num_rows + index)
    presence = tl.load(settings + 2 * num_rows + index)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    value = tl.load(logits + token, mask=inside, other=0)
    found = tl.load(counts + token, mask=inside, other=0)
    repeated = tl.where(value < 0, value * repetition, value / repetition)
    value = tl.where(found > 0, repeated, value)
    generated = found >> 1
    value = value - frequency * generated - tl.where(generated > 0, presence, 0.0)
    tl.store(logits + token, value, mask=inside)
