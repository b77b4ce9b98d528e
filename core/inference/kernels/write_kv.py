"""Store a step's keys and values into the paged cache, rotated or as they are, in Triton.

The references are the functions of the same names in `reference`.

    row of a block                        0    1    2    3    4    5    6    7
    stored by entries of a first step     e0   e1   e2
    zeroed by e2                                         0    0    0    0    0
    stored by entries of a later step                    e0   e1                  none at row 0: no zeros
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gates import dense
from .reference.attention import rotary_frequencies

BLOCK = 1024
"""Numbers that a program loads at once."""
ZEROS = 4096
"""Numbers that a program zeroes at once."""
MAX_PARTS = 8
FEW_PROGRAMS = 512
NUM_WARPS = 4


def write_kv(kv_cache: Tensor, keys: Tensor, values: Tensor, tokens: Tensor, positions: Tensor) -> None:
    """As `reference.attention.write_kv`, in one launch. Does not synchronise.

    A block's keys are contiguous, and so are its values. A position of -1 costs one load.
    """
    _launch(None, None, keys, values, None, None, kv_cache, tokens, positions)


def rotary_and_write_kv(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, base: float, kv_cache: Tensor,
    tokens: Tensor, write_positions: Tensor,
) -> Tensor:  # fmt: skip
    """As `reference.attention.rotary_and_write_kv`, in one launch. Does not synchronise.

    Angles are products in float32 of positions and of frequencies that float64 gives, computed once for each
    base and head dim.
    """
    query, frequencies = dense(query), _frequencies(query.shape[2], base, query.device)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    _launch(out, query, key, value, positions, frequencies, kv_cache, tokens, write_positions)
    return out


def _launch(
    out: Tensor | None, query: Tensor | None, keys: Tensor, values: Tensor, token_positions: Tensor | None,
    frequencies: Tensor | None, kv_cache: Tensor, tokens: Tensor, positions: Tensor,
) -> None:  # fmt: skip
    """Store keys and values; without `query`, neither is rotated."""
    keys, values = dense(keys), dense(values)
    block_size, kv_heads, head_dim = kv_cache.shape[2:]
    num_tokens, heads = (0, kv_heads) if query is None else query.shape[:2]
    half = head_dim // 2
    programs = num_tokens + tokens.shape[0]
    if not programs or not keys.numel():
        return
    block_dim = triton.next_power_of_2(head_dim)
    write_kv_kernel[(programs, _parts(programs))](
        out, kv_cache, query, keys, values, token_positions, frequencies, tokens, positions,
        num_tokens, tokens.shape[0],
        *kv_cache.stride()[:2], *(keys if query is None else query).stride()[:2],
        *keys.stride()[:2], *values.stride()[:2],
        BLOCK_SIZE=block_size, HEADS=heads, KV_HEADS=kv_heads, DIM=head_dim, HALF=half,
        ROTATES=query is not None, BLOCK_HEADS=heads_of_a_program(heads, block_dim // 2),
        BLOCK_KV_HEADS=heads_of_a_program(kv_heads, block_dim), BLOCK_DIM=block_dim, ZEROS=ZEROS,
        num_warps=NUM_WARPS, num_stages=1,
    )  # fmt: skip


def heads_of_a_program(heads: int, block_dim: int) -> int:
    """How many heads of `block_dim` numbers a program takes at once."""
    count: int = triton.next_power_of_2(heads)
    return min(count, max(1, BLOCK // block_dim))


def _parts(programs: int) -> int:
    """Over how many programs the heads of a token, and the zeros after it, are spread."""
    return max(1, min(MAX_PARTS, FEW_PROGRAMS // programs))


@cache
def _frequencies(head_dim: int, base: float, device: torch.device) -> Tensor:
    """In float32. Graphs read it, so it lives as long as the process."""
    with torch.inference_mode(False):
        return rotary_frequencies(head_dim, base, device).float()


@triton.jit
def write_kv_kernel(
    # Pointers
    out, cache, query, keys, values, token_positions, frequencies, tokens, positions,
    # Dimensions
    num_tokens, num_entries,
    # Strides
    value_cache_offset, block_stride, query_token_stride, query_head_stride,
    key_token_stride, key_head_stride, value_token_stride, value_head_stride,
    # Meta-parameters
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, HALF: tl.constexpr, ROTATES: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_KV_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """A program has a part of the heads of a token, or of an entry and of the zeros after it.

    Where ROTATES, the first programs have the queries of `num_tokens` tokens.
    """
    program = tl.program_id(0).to(tl.int64)
    part, parts = tl.program_id(1), tl.num_programs(1)
    dims = tl.arange(0, BLOCK_DIM)
    half_dims = tl.arange(0, BLOCK_DIM // 2)
    if ROTATES:  # noqa: SIM102 - else there are no queries to compile
        if program < num_tokens:
            cos, sin = angle(token_positions + program, frequencies, half_dims, HALF)
            for first in range(part * BLOCK_HEADS, HEADS, parts * BLOCK_HEADS):
                heads = first + tl.arange(0, BLOCK_HEADS)[:, None]
                inside = (heads < HEADS) & (half_dims < HALF)
                at = query + program * query_token_stride + heads * query_head_stride + half_dims
                turned = out + (program * HEADS + heads) * DIM + half_dims
                rotate(at, turned, cos, sin, inside, HALF)
    if program >= num_tokens:
        entry = program - num_tokens
        position = tl.load(positions + entry).to(tl.int64)
        if position >= 0:
            token = tl.load(tokens + entry).to(tl.int64)
            row = cache + position // BLOCK_SIZE * block_stride
            row += position % BLOCK_SIZE * (KV_HEADS * DIM)
            if ROTATES:
                cos, sin = angle(token_positions + token, frequencies, half_dims, HALF)
            for first in range(part * BLOCK_KV_HEADS, KV_HEADS, parts * BLOCK_KV_HEADS):
                heads = first + tl.arange(0, BLOCK_KV_HEADS)[:, None]
                inside = (heads < KV_HEADS) & (dims < DIM)
                stored = row + heads * DIM
                key = keys + token * key_token_stride + heads * key_head_stride
                value = values + token * value_token_stride + heads * value_head_stride
                if ROTATES:
                    half = (heads < KV_HEADS) & (half_dims < HALF)
                    rotate(key + half_dims, stored + half_dims, cos, sin, half, HALF)
                else:
                    copied = tl.load(key + dims, mask=inside).to(cache.dtype.element_ty)
                    tl.store(stored + dims, copied, mask=inside)
                copied = tl.load(value + dims, mask=inside).to(cache.dtype.element_ty)
                tl.store(stored + value_cache_offset + dims, copied, mask=inside)
            zero_rest_of_block(
                cache, positions, entry, position, num_entries, value_cache_offset, block_stride,
                BLOCK_SIZE, KV_HEADS * DIM, ZEROS,
            )  # fmt: skip


@triton.jit
def angle(position, frequencies, dims, HALF: tl.constexpr):
    """Cosines and sines, [1, BLOCK_HALF], of one position."""
    turns = tl.load(position).to(tl.float32) * tl.load(frequencies + dims, mask=dims < HALF, other=0.0)
    return tl.cos(turns)[None], tl.sin(turns)[None]


@triton.jit
def rotate(source, destination, cos, sin, inside, HALF: tl.constexpr):
    """Rotate heads, whose first halves lie at `source`, into `destination`."""
    first = tl.load(source, mask=inside).to(tl.float32)
    second = tl.load(source + HALF, mask=inside).to(tl.float32)
    dtype = destination.dtype.element_ty
    tl.store(destination, (first * cos - second * sin).to(dtype), mask=inside)
    tl.store(destination + HALF, (second * cos + first * sin).to(dtype), mask=inside)


@triton.jit
def zero_rest_of_block(
    cache, positions, entry, position, num_entries, value_cache_offset, block_stride,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """Zero the rows after the entry in its block, if the entry ends a run of entries from the block's row 0.

    Costs two loads when there is nothing to do.
    """
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
