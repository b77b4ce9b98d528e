"""What several families of kernels do: load a tile, see if a row names a state, keep prefills' tails."""

import triton
import triton.language as tl
from torch import Tensor

from .state_tensors import check_last_stride, check_slots


@triton.jit
def load_tile(pointers, rows, columns):
    """The numbers at pointers [rows, columns]; 0 outside of the rows and columns that exist."""
    return tl.load(pointers, mask=rows[:, None] & columns[None, :], other=0.0)


@triton.jit
def any_index(source, destinations, stride, TOKENS: tl.constexpr):
    """The largest pool index of a decode row: of its source, and of a destination for each token."""
    index = source
    for token in tl.static_range(TOKENS):
        index = tl.maximum(index, tl.load(destinations + token * stride))
    return index


TAIL_BLOCK, TAIL_WARPS = 1024, 4  # numbers of 16 bits, 16 bytes a thread


def keep_tails(
    first: Tensor, first_kept: Tensor, second: Tensor, second_kept: Tensor, slots: Tensor,
    tail_starts: Tensor, query_start_loc: Tensor,
) -> None:  # fmt: skip
    """Store the tails of prefill rows, two tensors [tokens, heads, size], in [slots, chunk, heads, size]."""
    check_last_stride(first=first, second=second)
    check_slots(first_kept=first_kept, second_kept=second_kept)
    keep_tails_kernel[(first_kept.shape[1], slots.shape[0])](
        first, second, first_kept, second_kept, slots, tail_starts, query_start_loc,
        *first.stride()[:2], *second.stride()[:2], first_kept.stride(0), second_kept.stride(0),
        *first.shape[1:], *second.shape[1:], BLOCK=TAIL_BLOCK, num_warps=TAIL_WARPS,
    )  # fmt: skip


@triton.jit
def _copy_token(inputs, kept, head_stride, HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Store the numbers of one token, HEADS of SIZE, side by side."""
    for first in range(0, HEADS * SIZE, BLOCK):
        place = first + tl.arange(0, BLOCK)
        inside = place < HEADS * SIZE
        numbers = tl.load(inputs + place // SIZE * head_stride + place % SIZE, mask=inside)
        tl.store(kept + place, numbers.to(kept.dtype.element_ty), mask=inside)


@triton.jit
def keep_tails_kernel(
    # Pointers
    first, second, first_kept, second_kept, slots, tail_starts, query_start_loc,
    # Strides
    first_token_stride: tl.int64, first_head_stride: tl.int64,
    second_token_stride: tl.int64, second_head_stride: tl.int64,
    first_slot_stride: tl.int64, second_slot_stride: tl.int64,
    # Dimensions
    first_heads: tl.constexpr, first_size: tl.constexpr,
    second_heads: tl.constexpr, second_size: tl.constexpr,
    # Meta-parameters
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A program has a row and a token of the chunk; a token that the tail has not costs three loads."""
    offset = tl.program_id(0)
    row = tl.program_id(1)
    slot = tl.load(slots + row)
    token = tl.load(tail_starts + row) + offset
    if (slot >= 0) & (token < tl.load(query_start_loc + row + 1)):
        first += token * first_token_stride
        second += token * second_token_stride
        first_kept += slot * first_slot_stride + offset * (first_heads * first_size)
        second_kept += slot * second_slot_stride + offset * (second_heads * second_size)
        _copy_token(first, first_kept, first_head_stride, first_heads, first_size, BLOCK)
        _copy_token(second, second_kept, second_head_stride, second_heads, second_size, BLOCK)
