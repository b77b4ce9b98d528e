"""Rows of the calls of `attention_segments`: pairs of a row of the step and a segment of its sequence.

A segment s of a sequence is its tokens [s * segment, (s + 1) * segment).
"""

from enum import IntEnum
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention_rows import AttentionRows


class Readers(IntEnum):
    """Which queries of a row are paired with a segment."""

    WITHIN_AND_BEHIND = 0
    """All that read the segment."""
    WITHIN = 1
    """Those whose positions lie in the segment."""
    BEHIND = 2
    """Those whose positions lie behind the segment: they read all of it."""


class SegmentRows(NamedTuple):
    """Rows of one call of a backend: each has queries of one row of the step, and KV of one segment.

    Attributes:
        block_table: [V, blocks of a segment] int32, padded with 0.
        kv_lengths: [V] int32: tokens of the segment up to the last query.
        query_start_loc: [V + 1] int32, ascending: the place of each row's first query; trailing total.
        query_lengths: [V] int32: queries of each row; 0 where no query reads the segment.
        longest_query: at least the queries of the longest row.
    """

    block_table: Tensor
    kv_lengths: Tensor
    query_start_loc: Tensor
    query_lengths: Tensor
    longest_query: int


def segment_rows(
    rows: AttentionRows,
    first_row: int,
    num_rows: int,
    readers: Readers,
    num_segments: int,
    segment_tokens: int,
    block_size: int,
    tokens: int,
    *,
    longest_query: int,
    copies: bool = False,
) -> SegmentRows:
    """Pair some rows of a step with their segments, in one launch.

    Where `readers` is `WITHIN`, the segments of a row are those from its first query's on, and the pairs of a
    row follow one another. Else the segments are the sequence's first, and the pairs of a segment follow one
    another. Does not synchronise.

    Args:
        rows: the rows of the step.
        first_row, num_rows: which of them; decode rows, or prefill rows.
        num_segments: of each row; `V` is num_rows * num_segments.
        segment_tokens: a multiple of `block_size`, the tokens of a KV block.
        tokens: those of the rows, padding included. Places are counted from the first of them.
        longest_query: at least the queries of the longest pair.
        copies: whether each segment has a copy of all queries of the rows, one copy behind the other. It must
            with `WITHIN_AND_BEHIND`, and must not with `WITHIN`. With `BEHIND` and without copies, the
            segments need a call each, because they share queries: the tensors then have a first dimension
            more, of segments.
    """
    device = rows.block_table.device
    columns = segment_tokens // block_size
    separate = readers == Readers.BEHIND and not copies
    shape = (num_segments, num_rows) if separate else (num_segments * num_rows,)
    lengths, counts = torch.empty(2, *shape, dtype=torch.int32, device=device).unbind()
    starts = torch.empty(*shape[:-1], shape[-1] + 1, dtype=torch.int32, device=device)
    table = torch.empty(*shape, columns, dtype=torch.int32, device=device)
    segment_rows_kernel[(num_rows, num_segments)](
        rows.block_table[first_row:], rows.kv_lengths[first_row:], rows.query_start_loc[first_row:],
        rows.query_lengths[first_row:], table, lengths, starts, counts,
        rows.block_table.stride(0), rows.block_table.shape[1], tokens,
        READERS=int(readers), SEPARATE=separate, COPIES=copies, SEGMENT=segment_tokens, COLUMNS=columns,
        BLOCK=triton.next_power_of_2(columns), num_warps=1,
    )  # fmt: skip
    return SegmentRows(table, lengths, starts, counts, longest_query)


@triton.jit
def segment_rows_kernel(
    # Pointers
    block_table,
    kv_lengths,
    query_start_loc,
    query_lengths,
    pair_table,
    pair_kv_lengths,
    pair_starts,
    pair_lengths,
    # Dimensions and strides
    table_stride,
    num_columns,
    tokens,
    # Meta-parameters
    READERS: tl.constexpr,
    SEPARATE: tl.constexpr,
    COPIES: tl.constexpr,
    SEGMENT: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, index = tl.program_id(0), tl.program_id(1)
    num_rows, num_segments = tl.num_programs(0), tl.num_programs(1)
    length = tl.load(query_lengths + row)
    kv_length = tl.load(kv_lengths + row)
    place = tl.load(query_start_loc + row) - tl.load(query_start_loc)
    first = kv_length - length  # the position of the row's first query

    if READERS == 1:
        segment = first // SEGMENT + index
        pair = row * num_segments + index
    else:
        segment = index
        pair = index * num_rows + row
    begin = segment * SEGMENT
    end = begin + SEGMENT
    skipped = tl.minimum(tl.maximum((end if READERS == 2 else begin) - first, 0), length)
    stop = tl.minimum(tl.maximum(end - first, 0), length) if READERS == 1 else length
    seen = tl.minimum(kv_length - begin, SEGMENT) if stop > skipped else 0

    at = pair + index if SEPARATE else pair  # each segment's starts have a trailing total
    copied = index * tokens if COPIES else 0
    tl.store(pair_starts + at, copied + place + skipped)
    last = row == num_rows - 1
    if not SEPARATE:
        last = last & (index == num_segments - 1)
    tl.store(pair_starts + at + 1, copied + tokens, mask=last)
    tl.store(pair_lengths + pair, stop - skipped)
    tl.store(pair_kv_lengths + pair, seen)

    column = tl.arange(0, BLOCK)
    source = segment * COLUMNS + column
    inside = (column < COLUMNS) & (source < num_columns) & (seen > 0)
    blocks = tl.load(block_table + row.to(tl.int64) * table_stride + source, mask=inside, other=0)
    tl.store(pair_table + pair.to(tl.int64) * COLUMNS + column, blocks, mask=column < COLUMNS)
