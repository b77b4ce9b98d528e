"""The absolute chunk grid: a walk over the tokens is its oracle, and what a prefix cache relies on."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.inference.kernels.chunk_grid import ChunkGrid, chunk_grid

chunk_sizes = st.integers(1, 9)
rows = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=6)


def walk(computed, lengths, chunk_size):
    """(cu, seq_idx, row_starts, token_rows, ends); `ends`: (row, position) -> (chunk, packed end)."""
    cu, seq_idx, row_starts, token_rows, ends = [], [], [0], [], {}
    for row, (before, count) in enumerate(zip(computed, lengths, strict=True)):
        for position in range(before, before + count):
            if position == before or position % chunk_size == 0:
                cu.append(len(token_rows))
                seq_idx.append(row)
            token_rows.append(row)
            if (position + 1) % chunk_size == 0:
                ends[row, position + 1] = (len(cu) - 1, len(token_rows))
        row_starts.append(len(cu))
    return [*cu, len(token_rows)], seq_idx, row_starts, token_rows, ends


def columns(pairs):
    return [list(column) for column in zip(*pairs, strict=True)] or [[], []]


@given(rows, chunk_sizes, st.data())
def test_equals_a_walk_over_the_tokens(rows, chunk_size, data):
    computed, lengths = columns(rows)
    cu, seq_idx, row_starts, token_rows, ends = walk(computed, lengths, chunk_size)
    wanted = data.draw(st.lists(st.sampled_from(sorted(ends)), max_size=8)) if ends else []

    grid = chunk_grid(computed, lengths, chunk_size, *columns(wanted))

    assert grid.cu_chunk_seqlens.tolist() == cu
    assert grid.seq_idx.tolist() == seq_idx
    assert grid.row_chunk_starts.tolist() == row_starts
    assert grid.token_rows.tolist() == token_rows
    assert grid.checkpoint_chunks.tolist() == [ends[checkpoint][0] for checkpoint in wanted]
    assert grid.checkpoint_token_ends.tolist() == [ends[checkpoint][1] for checkpoint in wanted]


@given(rows, chunk_sizes)
def test_every_multiple_of_the_chunk_size_ends_a_chunk(rows, chunk_size):
    """The state at each such position can be taken: the chunk ends exactly there, in its own row."""
    computed, lengths = columns(rows)
    wanted = [
        (row, position)
        for row, (before, count) in enumerate(rows)
        for position in range(before + 1, before + count + 1)
        if position % chunk_size == 0
    ]
    grid = chunk_grid(computed, lengths, chunk_size, *columns(wanted))
    starts = np.cumsum([0, *lengths])
    for (row, position), chunk, end in zip(
        wanted, grid.checkpoint_chunks, grid.checkpoint_token_ends, strict=True
    ):
        assert grid.seq_idx[chunk] == row
        assert grid.cu_chunk_seqlens[chunk + 1] == end
        assert end - starts[row] + computed[row] == position


@given(st.integers(0, 90), st.integers(1, 90), chunk_sizes, st.data())
def test_cutting_a_prompt_on_the_grid_leaves_the_cuts_as_they_are(before, count, chunk_size, data):
    end = before + count
    on_grid = [p for p in range(before + 1, end) if p % chunk_size == 0]
    cuts = sorted(data.draw(st.sets(st.sampled_from(on_grid)))) if on_grid else []

    def starts(begin, stop):
        grid = chunk_grid([begin], [stop - begin], chunk_size)
        return [begin + start for start in grid.cu_chunk_seqlens[:-1].tolist()]

    edges = [before, *cuts, end]
    pieces = [start for begin, stop in pairwise(edges) for start in starts(begin, stop)]
    assert pieces == starts(before, end)


@given(rows, chunk_sizes)
def test_chunks_are_never_empty_nor_longer_than_the_chunk_size(rows, chunk_size):
    computed, lengths = columns(rows)
    sizes = np.diff(chunk_grid(computed, lengths, chunk_size).cu_chunk_seqlens)
    assert ((sizes > 0) & (sizes <= chunk_size)).all()


def test_a_row_without_tokens_has_no_chunk():
    grid = chunk_grid([3, 0, 8, 5], [0, 9, 0, 0], 8)
    assert grid.cu_chunk_seqlens.tolist() == [0, 8, 9]
    assert grid.seq_idx.tolist() == [1, 1]
    assert grid.row_chunk_starts.tolist() == [0, 0, 2, 2, 2]


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_no_tokens_at_all(lengths):
    grid = chunk_grid([7] * len(lengths), lengths, 8)
    assert grid.cu_chunk_seqlens.tolist() == [0]
    assert grid.seq_idx.size == grid.token_rows.size == grid.checkpoint_chunks.size == 0
    assert grid.row_chunk_starts.tolist() == [0] * (len(lengths) + 1)


def test_a_checkpoint_may_end_its_row():
    grid = chunk_grid([5, 5], [11, 11], 8, [1, 0], [16, 8])
    assert grid.checkpoint_chunks.tolist() == [3, 0]
    assert grid.checkpoint_token_ends.tolist() == [22, 3]


def test_dtypes():
    grid = chunk_grid(np.array([0, 4], np.int32), (20, 3), 8, [0], [16])
    int32 = ("cu_chunk_seqlens", "seq_idx", "row_chunk_starts")
    int64 = ("token_rows", "checkpoint_chunks", "checkpoint_token_ends")
    assert {getattr(grid, name).dtype for name in int32} == {np.dtype(np.int32)}
    assert {getattr(grid, name).dtype for name in int64} == {np.dtype(np.int64)}
    assert set(ChunkGrid._fields) == {*int32, *int64}


def test_arguments_are_left_alone():
    computed, lengths = np.array([3, 8]), np.array([9, 0])
    chunk_grid(computed, lengths, 8, [0], [8])
    assert (computed.tolist(), lengths.tolist()) == ([3, 8], [9, 0])


@pytest.mark.parametrize("chunk_size", [10**9, 2**31, 2**40])
def test_positions_and_chunk_sizes_beyond_32_bits(chunk_size):
    computed = [2 * chunk_size - 3, 0, 5]
    grid = chunk_grid(computed, [6, 2, 1], chunk_size, [0], [2 * chunk_size])
    assert grid.cu_chunk_seqlens.tolist() == [0, 3, 6, 8, 9]
    assert grid.seq_idx.tolist() == [0, 0, 1, 2]
    assert (grid.checkpoint_chunks.tolist(), grid.checkpoint_token_ends.tolist()) == ([0], [3])
