"""Attention whose split points are fixed positions of the sequence, so that other rows change no bits.

`Segments` says where a sequence is cut. A query reads all segments before its own, and its own up to its
position, combined in their order. The backend computes many pairs of a row and a segment in one call, and
rounds their results to the dtype of the cache.
"""

# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005 - kernels join tuples by +, to which mypy gives one type; Triton unpacks no tuples

from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...validation import ceil_div
from .step_rows import AttentionRows


class Readers(IntEnum):
    """Which queries of a row are paired with a segment."""

    ALL = 0  # all that read the segment
    WITHIN = 1  # those whose positions lie in the segment
    AFTER = 2  # those whose positions lie after the segment: they read all of it


class Segments(NamedTuple):
    """Segments of `short` tokens up to position `end`, a multiple of `long`; then of `long` tokens.

    Example: with (512, 4096, 2048), position 4,095 lies in segment 7, and segment 8 has positions 4,096 to
    6,143.
    """

    short: int
    end: int
    long: int


@triton.jit
def segment_of(position, SHORT, END, LONG):
    """The segment of a position; on the host by `segment_of.fn`."""
    behind = position - END
    return (behind < 0) * (position // SHORT) + (behind >= 0) * (END // SHORT + behind // LONG)


@triton.jit
def segment_begin(segment, SHORT, END, LONG):
    """The first position of a segment."""
    behind = segment - END // SHORT
    return segment * SHORT + (behind > 0) * behind * (LONG - SHORT)


class SegmentRows(NamedTuple):
    """Rows of one call of a backend: each has queries of one row of the step, and KV of one segment."""

    block_table: Tensor  # [V, blocks of a segment] int32, padded with 0
    kv_lengths: Tensor  # [V] int32: tokens of the segment up to the last query
    query_start_loc: Tensor  # [V + 1] int32, ascending: place of each row's first query; trailing total
    query_lengths: Tensor  # [V] int32: queries of each row; 0 where no query reads the segment
    longest_query: int  # at least the queries of the longest row


def segment_rows(
    rows: AttentionRows, segments: Segments, block_size: int, query: Tensor, first_row: int, num_rows: int,
    readers: Readers, num_segments: int, longest_query: int, copies: Tensor | None = None,
) -> SegmentRows:  # fmt: skip
    """Pair rows of a step, decode rows or prefill rows, with their segments, in one launch.

    With `WITHIN`, the segments of a row are those from its first query's on, and its pairs follow one
    another. Else they are the sequence's first, and the pairs of a segment follow one another; in `copies`
    [segments, *query.shape] each segment gets the queries that read it. `AFTER` without copies needs a call
    for each segment, because they share queries: the tensors then have a first dimension more. Places count
    from the first of the rows' queries.
    """
    device = rows.block_table.device
    columns = segments.long // block_size
    separate = readers == Readers.AFTER and copies is None
    heads, head_dim = query.shape[1:]
    shape = (num_segments, num_rows) if separate else (num_segments * num_rows,)
    lengths, counts = torch.empty(2, *shape, dtype=torch.int32, device=device).unbind()
    starts = torch.empty(*shape[:-1], shape[-1] + 1, dtype=torch.int32, device=device)
    table = torch.empty(*shape, columns, dtype=torch.int32, device=device)
    segment_rows_kernel[(num_rows, num_segments)](
        rows.block_table[first_row:], rows.kv_lengths[first_row:], rows.query_start_loc[first_row:],
        rows.query_lengths[first_row:], table, lengths, starts, counts, query, copies,
        rows.block_table.stride(0), rows.block_table.shape[1], len(query), *query.stride()[:2],
        int(readers), separate, *segments, block_size, columns, triton.next_power_of_2(columns),
        heads, head_dim, triton.next_power_of_2(heads), triton.next_power_of_2(head_dim),
        num_warps=1 if copies is None else COPY_WARPS,
    )  # fmt: skip
    return SegmentRows(table, lengths, starts, counts, longest_query)


@triton.jit
def segment_rows_kernel(
    # Pointers
    block_table, kv_lengths, query_start_loc, query_lengths, pair_table, pair_kv_lengths, pair_starts,
    pair_lengths, query, copies,
    # Dimensions and strides
    table_stride, num_columns, tokens, query_stride, head_stride,
    # Meta-parameters
    READERS: tl.constexpr, SEPARATE: tl.constexpr, SHORT: tl.constexpr, END: tl.constexpr, LONG: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    row, index = tl.program_id(0), tl.program_id(1)
    num_rows, num_segments = tl.num_programs(0), tl.num_programs(1)
    length = tl.load(query_lengths + row)
    kv_length = tl.load(kv_lengths + row)
    place = tl.load(query_start_loc + row) - tl.load(query_start_loc)
    first = kv_length - length  # the position of the row's first query

    if READERS == 1:
        segment = segment_of(first, SHORT, END, LONG) + index
        pair = row * num_segments + index
    else:
        segment = index
        pair = index * num_rows + row
    begin = segment_begin(segment, SHORT, END, LONG)
    end = segment_begin(segment + 1, SHORT, END, LONG)
    skipped = tl.minimum(tl.maximum((end if READERS == 2 else begin) - first, 0), length)
    stop = tl.minimum(tl.maximum(end - first, 0), length) if READERS == 1 else length
    seen = tl.minimum(kv_length, end) - begin if stop > skipped else 0

    at = pair + index if SEPARATE else pair  # each segment's starts have a trailing total
    copied = index * tokens if copies is not None else 0
    tl.store(pair_starts + at, copied + place + skipped)
    last = row == num_rows - 1
    if not SEPARATE:
        last = last & (index == num_segments - 1)
    tl.store(pair_starts + at + 1, copied + tokens, mask=last)
    tl.store(pair_lengths + pair, stop - skipped)
    tl.store(pair_kv_lengths + pair, seen)

    column = tl.arange(0, BLOCK)
    source = begin // BLOCK_SIZE + column
    inside = (column < COLUMNS) & (source < num_columns) & (seen > 0)
    blocks = tl.load(block_table + row.to(tl.int64) * table_stride + source, mask=inside, other=0)
    tl.store(pair_table + pair.to(tl.int64) * COLUMNS + column, blocks, mask=column < COLUMNS)

    if copies is not None:
        head, dim = tl.arange(0, BLOCK_HEADS)[:, None], tl.arange(0, BLOCK_DIM)[None, :]
        real = (head < HEADS) & (dim < DIM)
        for number in range(skipped, stop):
            at_query = (place + number).to(tl.int64)
            numbers = tl.load(query + at_query * query_stride + head * head_stride + dim, mask=real)
            into = copies + (index.to(tl.int64) * tokens + at_query) * (HEADS * DIM) + head * DIM + dim
            tl.store(into, numbers, mask=real)


COPY_WARPS = 4
BLOCK = 1024  # numbers of a program: 16 bytes of bfloat16 a thread
NUM_WARPS = 4
TOGETHER = 8  # results of earlier segments that are loaded at once


def combine_segments(
    earlier: Tensor, earlier_log_sums: Tensor, final: Tensor, final_log_sums: Tensor, positions: Tensor,
    segments: Segments, out: Tensor,
) -> Tensor:  # fmt: skip
    """Weigh the results o_s of each query's segments by their sums of exp(score), in float32.

    With l_s the log-sums and m the largest, sum_s exp(l_s - m) o_s / sum_s exp(l_s - m), over the segments up
    to that of the query's position in order; of this one, `final` is read. Where it is the first, the result
    has `final`'s bits.
    """
    tokens, heads, head_dim = out.shape
    if not tokens:
        return out
    block_dim = triton.next_power_of_2(head_dim)
    block_heads = min(max(1, BLOCK // block_dim), triton.next_power_of_2(heads))
    combine_segments_kernel[(tokens, ceil_div(heads, block_heads))](
        earlier, earlier_log_sums, final, final_log_sums, positions, out,
        *earlier.stride()[:3], *final.stride()[:3], *earlier_log_sums.stride(), *final_log_sums.stride(),
        *out.stride()[:2], heads, earlier.shape[0],
        *segments, DIM=head_dim, BLOCK_HEADS=block_heads, BLOCK_DIM=block_dim, TOGETHER=TOGETHER,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    return out


@triton.jit
def combine_segments_kernel(
    # Pointers
    earlier, earlier_log_sums, final, final_log_sums, positions, out,
    # Strides
    earlier_segment_stride, earlier_token_stride, earlier_head_stride, final_segment_stride,
    final_token_stride, final_head_stride, earlier_sums_segment_stride, earlier_sums_head_stride,
    earlier_sums_token_stride, final_sums_segment_stride, final_sums_head_stride, final_sums_token_stride,
    out_token_stride, out_head_stride,
    # Dimensions
    heads, num_earlier,
    # Meta-parameters
    SHORT: tl.constexpr, END: tl.constexpr, LONG: tl.constexpr, DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dim = tl.arange(0, BLOCK_DIM)
    real = head < heads
    inside = real[:, None] & (dim < DIM)[None, :]
    segment = segment_of(tl.load(positions + token), SHORT, END, LONG)
    count = tl.minimum(segment.to(tl.int32), num_earlier)

    final += count.to(tl.int64) * final_segment_stride + token * final_token_stride
    final_log_sums += count.to(tl.int64) * final_sums_segment_stride + token * final_sums_token_stride
    last = tl.load(final + head[:, None] * final_head_stride + dim[None, :], mask=inside, other=0.0)
    last_sum = tl.load(final_log_sums + head * final_sums_head_stride, mask=real, other=0.0)

    sums = earlier_log_sums + token * earlier_sums_token_stride + head * earlier_sums_head_stride
    index = tl.arange(0, TOGETHER)
    largest = last_sum
    for first in range(0, count, TOGETHER):
        offset = (first + index).to(tl.int64) * earlier_sums_segment_stride
        exists = real[:, None] & (first + index < count)[None, :]
        some_sums = tl.load(sums[:, None] + offset[None, :], mask=exists, other=float("-inf"))
        largest = tl.maximum(largest, tl.max(some_sums, axis=1))

    parts = earlier + token * earlier_token_stride + head[:, None] * earlier_head_stride + dim[None, :]
    total = tl.zeros((BLOCK_HEADS,), tl.float32)
    result = tl.zeros((BLOCK_HEADS, BLOCK_DIM), tl.float32)
    for first in range(0, count, TOGETHER):
        loaded = ()  # all loads are under way before the first result is weighed
        for number in tl.static_range(TOGETHER):
            at = tl.cast(first + number, tl.int64)
            exists = first + number < count
            sum_ptrs = sums + at * earlier_sums_segment_stride
            log_sum = tl.load(sum_ptrs, mask=real & exists, other=float("-inf"))
            part = tl.load(parts + at * earlier_segment_stride, mask=inside & exists, other=0.0)
            loaded = loaded + (log_sum, part)
        for number in tl.static_range(TOGETHER):
            weight = tl.exp(loaded[2 * number] - largest)
            total += weight
            part = loaded[2 * number + 1].to(tl.float32)
            result = tl.fma(tl.broadcast_to(weight[:, None], result.shape), part, result)
    weight = tl.exp(last_sum - largest)
    total += weight
    exact = last.to(tl.float32)
    result = tl.fma(tl.broadcast_to(weight[:, None], result.shape), exact, result) / total[:, None]
    result = tl.where(count == 0, exact, result)

    target = out + token * out_token_stride + head[:, None] * out_head_stride + dim[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=inside)


SEGMENTS = Segments(512, 4096, 2048)
"""A decode takes as long as its longest segment, and a prefill computes a result more for each segment.

FlashAttention-3 for one row with 4 KV heads of 256 numbers on an H100: 21 us for 576 tokens in one segment,
50 us for 4,096 in two.
"""
_SCRATCH_BYTES = 1 << 29
"""Of the results of segments in prefills; where more are needed, KV heads are computed in groups."""


Attend = Callable[..., tuple[Tensor, Tensor]]
"""What leaves the KV of each pair whole: `attention._attend_pairs`."""


def segments_for_block_size(block_size: int) -> Segments | None:
    """Segments of whole blocks: all long where blocks do not divide the short; None where not even these."""
    short, end, long = SEGMENTS
    if long % block_size:
        return None
    return SEGMENTS if short % block_size == 0 else Segments(long, end, long)


def num_segments(rows: AttentionRows, block_size: int) -> int:
    """Most segments of a sequence in this block table; 1 where blocks do not divide segments."""
    segments, tokens = segments_for_block_size(block_size), rows.block_table.shape[1] * block_size
    return 1 if segments is None or not tokens else 1 + int(segment_of.fn(tokens - 1, *segments))


def segmented_attention(
    query: Tensor, kv_cache: Tensor, rows: AttentionRows, scale: float | None, attend: Attend
) -> Tensor:
    """Attention from at least two segments; the number of calls of `attend` depends on shapes alone."""
    step = _Step(kv_cache, rows, scale, attend)
    dtype, decoded = query.dtype, rows.num_decode_tokens
    query = query.to(kv_cache.dtype)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if rows.num_decodes:
        attend_decodes = step.single_tokens if rows.decode_tokens == 1 else step.drafts
        attend_decodes(query[:decoded], out[:decoded])
    if rows.num_decodes < rows.num_rows:
        step.prefills(query[decoded:], out[decoded:])
    return out.to(dtype)


class _Step:
    """The rows of a step. Each method attends queries of some rows and writes `out`."""

    def __init__(self, kv_cache: Tensor, rows: AttentionRows, scale: float | None, attend: Attend) -> None:
        self._kv_cache, self._rows, self._scale, self._attend = kv_cache, rows, scale, attend
        self._num_segments = num_segments(rows, kv_cache.shape[2])
        self._segments = segments_for_block_size(kv_cache.shape[2]) or SEGMENTS
        self._pairs = partial(segment_rows, rows, self._segments, kv_cache.shape[2])

    def single_tokens(self, query: Tensor, out: Tensor) -> None:
        """Decode rows of one token: one call for all segments, because few rows leave most of a GPU idle.

        A query alone sees all KV of its pair even in a causal call.
        """
        parts, log_sums = self._attend_copies(query, Readers.ALL, self._num_segments)
        positions = self._rows.positions[: len(query)]
        combine_segments(parts, log_sums, parts, log_sums, positions, self._segments, out)

    def drafts(self, query: Tensor, out: Tensor) -> None:
        """Decode rows of several tokens: two calls, in which the tokens of a row read each segment once."""
        rows, positions = self._rows, self._rows.positions[: len(query)]
        final, final_log_sums = self._attend_final(query, 0, rows.num_decodes, rows.decode_tokens)
        earlier, log_sums = self._attend_copies(query, Readers.AFTER, self._num_segments - 1)
        combine_segments(earlier, log_sums, final, final_log_sums, positions, self._segments, out)

    def prefills(self, query: Tensor, out: Tensor) -> None:
        """One call for the segments in which queries lie, and one for each segment after which some lie."""
        rows, parts = self._rows, self._num_segments - 1
        num_rows, longest = rows.num_rows - rows.num_decodes, max(1, rows.max_query_tokens)
        final, final_log_sums = self._attend_final(query, rows.num_decodes, num_rows, longest)
        pairs = self._pairs(query, rows.num_decodes, num_rows, Readers.AFTER, parts, longest)
        by_segment = [
            SegmentRows(table, lengths, starts, counts, longest)
            for table, lengths, starts, counts in zip(*(tensor.unbind() for tensor in pairs[:4]), strict=True)
        ]
        kv_heads = self._kv_cache.shape[3]
        sharing = query.shape[1] // kv_heads
        head_bytes = parts * query[:, :sharing].numel() * query.element_size()
        together = max(1, _SCRATCH_BYTES // max(1, head_bytes))
        for first in range(0, kv_heads, together):
            cache = self._kv_cache[:, :, :, first : first + together]
            heads = slice(first * sharing, (first + cache.shape[3]) * sharing)
            head_queries = query[:, heads]
            earlier = torch.empty(parts, *head_queries.shape, dtype=query.dtype, device=query.device)
            log_sums = [
                self._attend(head_queries, cache, pair, self._scale, is_causal=False, out=part)[1]
                for pair, part in zip(by_segment, earlier, strict=True)
            ]
            combine_segments(
                earlier, torch.stack(log_sums), final[:, :, heads], final_log_sums[:, heads],
                rows.positions[rows.num_decode_tokens :], self._segments, out[:, heads],
            )  # fmt: skip

    def _attend_final(self, query: Tensor, first: int, num_rows: int, longest: int) -> tuple[Tensor, Tensor]:
        """What queries find in their own segments, with a first dimension of stride 0 for the segment."""
        touched = 1 + ceil_div(longest - 1, self._segments.short)  # at most, by the longest row
        touched, longest = min(self._num_segments, touched), min(longest, self._segments.long)
        pairs = self._pairs(query, first, num_rows, Readers.WITHIN, touched, longest)
        outputs, log_sums = self._attend(query, self._kv_cache, pairs, self._scale, is_causal=True)
        count = self._num_segments
        return outputs.expand(count, *outputs.shape), log_sums.expand(count, *log_sums.shape)

    def _attend_copies(self, query: Tensor, readers: Readers, parts: int) -> tuple[Tensor, Tensor]:
        """What the queries of decode rows find in each of the first `parts` segments, by one call."""
        rows = self._rows
        copies = query.new_empty(parts, *query.shape)
        pairs = self._pairs(query, 0, rows.num_decodes, readers, parts, rows.decode_tokens, copies)
        packed, is_causal = copies.flatten(0, 1), readers == Readers.ALL
        outputs, log_sums = self._attend(packed, self._kv_cache, pairs, self._scale, is_causal=is_causal)
        by_part = outputs.view(parts, *query.shape)
        return by_part, log_sums.view(-1, parts, len(query)).transpose(0, 1)
