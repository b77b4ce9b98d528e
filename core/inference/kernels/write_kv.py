"""Store a step's keys and values into the paged cache in Triton; `torch_attention` has the reference.

row of a block                        0    1    2    3    4    5    6    7
stored by entries of a first step     e0   e1   e2
zeroed by e2                                         0    0    0    0    0
stored by entries of a later step                    e0   e1                  none at row 0: no zeros
"""

import triton
import triton.language as tl
from torch import Tensor

from .dtypes_and_strides import dense

BLOCK = 1024  # numbers that a program loads at once
ZEROS = 4096  # numbers that a program zeroes at once
MAX_PARTS = 8
FEW_PROGRAMS = 512
NUM_WARPS = 4


def write_kv(kv_cache: Tensor, keys: Tensor, values: Tensor, tokens: Tensor, positions: Tensor) -> None:
    """As `torch_attention.write_kv`; a block's keys are contiguous, and so are its values."""
    keys, values = dense(keys), dense(values)
    block_size, kv_heads, head_dim = kv_cache.shape[2:]
    entries = tokens.shape[0]
    if not entries or not keys.numel():
        return
    block_dim = triton.next_power_of_2(head_dim)
    parts = max(1, min(MAX_PARTS, FEW_PROGRAMS // entries))  # share an entry's heads, and the zeros after it
    write_kv_kernel[(entries, parts)](
        kv_cache, keys, values, tokens, positions, entries,
        *kv_cache.stride()[:2], *keys.stride()[:2], *values.stride()[:2],
        BLOCK_SIZE=block_size, KV_HEADS=kv_heads, DIM=head_dim,
        BLOCK_HEADS=kv_heads_per_program(kv_heads, block_dim), BLOCK_DIM=block_dim, ZEROS=ZEROS,
        num_warps=NUM_WARPS, num_stages=1,
    )  # fmt: skip


def kv_heads_per_program(heads: int, block_dim: int) -> int:
    """How many heads of `block_dim` numbers a program takes at once."""
    count: int = triton.next_power_of_2(heads)
    return min(count, max(1, BLOCK // block_dim))


@triton.jit
def write_kv_kernel(
    # Pointers
    cache, keys, values, tokens, positions,
    # Dimensions
    num_entries,
    # Strides
    value_cache_offset, block_stride,
    key_token_stride, key_head_stride, value_token_stride, value_head_stride,
    # Meta-parameters
    BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """A program has a part of the heads of an entry, and of the zeros after it."""
    entry = tl.program_id(0).to(tl.int64)
    part, parts = tl.program_id(1), tl.num_programs(1)
    dims = tl.arange(0, BLOCK_DIM)
    position = tl.load(positions + entry).to(tl.int64)
    if position >= 0:
        token = tl.load(tokens + entry).to(tl.int64)
        row = cache + position // BLOCK_SIZE * block_stride
        row += position % BLOCK_SIZE * (KV_HEADS * DIM)
        for first in range(part * BLOCK_HEADS, KV_HEADS, parts * BLOCK_HEADS):
            heads = first + tl.arange(0, BLOCK_HEADS)[:, None]
            inside = (heads < KV_HEADS) & (dims < DIM)
            stored = row + heads * DIM + dims
            key = tl.load(keys + token * key_token_stride + heads * key_head_stride + dims, mask=inside)
            tl.store(stored, key.to(cache.dtype.element_ty), mask=inside)
            value_ptrs = values + token * value_token_stride + heads * value_head_stride + dims
            value = tl.load(value_ptrs, mask=inside)
            tl.store(stored + value_cache_offset, value.to(cache.dtype.element_ty), mask=inside)
        zero_rest_of_block(
            cache, positions, entry, position, num_entries, value_cache_offset, block_stride,
            BLOCK_SIZE, KV_HEADS * DIM, ZEROS,
        )  # fmt: skip


@triton.jit
def zero_rest_of_block(
    cache, positions, entry, position, num_entries, value_cache_offset, block_stride,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """Zero the rows after the entry in its block, if it ends a run of entries from the block's row 0."""
    offset = position % BLOCK_SIZE
    following = tl.load(positions + entry + 1, mask=entry + 1 < num_entries, other=-1)
    begin = tl.load(positions + entry - offset, mask=entry >= offset, other=-1)
    if (following != position + 1) & (begin == position - offset):
        block = cache + position // BLOCK_SIZE * block_stride
        place = tl.arange(0, ZEROS)
        zeros = tl.zeros([ZEROS], cache.dtype.element_ty)
        step = tl.num_programs(1) * ZEROS
        for first in range((offset + 1) * WIDTH + tl.program_id(1) * ZEROS, BLOCK_SIZE * WIDTH, step):
            inside = first + place < BLOCK_SIZE * WIDTH
            tl.store(block + first + place, zeros, mask=inside)
            tl.store(block + value_cache_offset + first + place, zeros, mask=inside)
