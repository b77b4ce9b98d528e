"""Where the kernels of scans cut a step's packed tokens into chunks: closed forms in numpy.

With C the chunk size, a row that has c computed tokens and n new ones, packed from q on, is cut
at every multiple of C strictly inside (c, c + n). Its chunk 0 starts at q and its chunk j >= 1 at
q + (floor(c / C) + j) * C - c; there are ceil((c + n) / C) - floor(c / C) of them. A row without new
tokens has no chunk. Example, C = 8, two rows with (c, n) = (0, 5) and (3, 10):

    packed token    0 ... 4 | 5 ... 9 | 10 ... 14       absolute position of a cut in its row
    chunk              0    |    1    |     2           cut at 10 = 5 + 8 - 3: position 8 of row 1
    row                0    |    1    |     1
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...validation import INT32_MAX

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Integers = Sequence[int] | npt.NDArray[np.integer[Any]]
MAX_POSITION = 2**48
"""Upper bound of a chunk's size and of the tokens before a row; sums with it do not overflow int64."""


class Chunks(NamedTuple):
    """The chunks of a packed stream, in order; no chunk is empty and none spans two rows."""

    cu_chunk_seqlens: Int32Array  # [chunks + 1]: where each chunk starts; trailing total
    seq_idx: Int32Array  # [chunks]: the row of each chunk
    last_chunk_indices: Int32Array  # [rows]: each row's last chunk; -1 for a row without tokens


@dataclass(frozen=True)
class ChunkGrid:
    """The chunks of a step's prefill rows, and the chunk that ends on each planned checkpoint.

    Tokens are counted in the packed prefill stream, rows from the first prefill row. The fields are
    those of `step_inputs.PrefillChunks` and `step_inputs.Checkpoints`, as fresh numpy arrays.
    """

    cu_chunk_seqlens: Int32Array  # [chunks + 1]: where each chunk starts; trailing total
    seq_idx: Int32Array  # [chunks]: the row of each chunk
    row_chunk_starts: Int32Array  # [rows + 1]: each row's first chunk; trailing total
    token_rows: Int64Array  # [tokens]: the row of each token
    checkpoint_chunks: Int64Array  # [checkpoints]: the chunk that ends on the boundary
    checkpoint_token_ends: Int64Array  # [checkpoints]: packed position of the boundary (exclusive end)


def chunk_grid(
    computed: Integers,
    lengths: Integers,
    chunk_size: int,
    checkpoint_rows: Integers = (),
    checkpoint_positions: Integers = (),
) -> ChunkGrid:
    """The absolute chunk grid of prefill rows, and where their checkpoints fall on it.

    Args:
        computed: [rows] tokens of each sequence before this step.
        lengths: [rows] new tokens of each row, 0 allowed.
        chunk_size: tokens of one chunk.
        checkpoint_rows, checkpoint_positions: [checkpoints] the row and the absolute token position of
            each state to store, in any order.

    Raises:
        ValueError: a checkpoint at which no chunk of its row ends: its position is no multiple of
            `chunk_size` in (computed, computed + length].
    """
    before, counts = np.asarray(computed, np.int64), np.asarray(lengths, np.int64)
    rows, positions = np.asarray(checkpoint_rows, np.int64), np.asarray(checkpoint_positions, np.int64)
    starts = np.zeros(counts.size + 1, np.int64)
    counts.cumsum(out=starts[1:])
    chunks = absolute_chunks(before, starts, chunk_size)
    begins = before[rows]
    ends = begins + counts[rows]
    misplaced = (positions % chunk_size != 0) | (positions <= begins) | (positions > ends)
    if misplaced.any():
        at = int(misplaced.argmax())
        raise ValueError(
            f"checkpoint_positions[{at}] is {positions[at]} in row {rows[at]}; accepted: a multiple of "
            f"{chunk_size} in ({begins[at]}, {ends[at]}]"
        )
    chunks_after = -(-ends // chunk_size) - positions // chunk_size
    return ChunkGrid(
        chunks.cu_chunk_seqlens,
        chunks.seq_idx,
        row_chunk_starts=chunks.seq_idx.searchsorted(np.arange(counts.size + 1)).astype(np.int32),
        token_rows=np.arange(counts.size).repeat(counts),
        checkpoint_chunks=chunks.last_chunk_indices[rows] - chunks_after,
        checkpoint_token_ends=starts[rows] + positions - begins,
    )


def absolute_chunks(computed: Int64Array, starts: Int64Array, chunk_size: int) -> Chunks:
    """Chunks cut at absolute multiples of `chunk_size`, in time linear in rows and chunks.

    `computed` [rows] int64 tokens before each row, `starts` [rows + 1] int64 packed positions of the
    rows with a trailing total; `chunk_size` >= 1. Mutates nothing; the result is fresh. The formula is the
    module's, counted from each row's end: the last chunk starts at q + (ceil((c + n) / C) - 1) * C - c. Every
    numpy call takes about a twentieth of the time.

    Raises:
        ValueError: see `row_lengths`.
    """
    lengths = row_lengths(computed, starts)
    if lengths.size == 0:
        return Chunks(np.zeros(1, np.int32), np.empty(0, np.int32), np.empty(0, np.int32))
    stops = starts[1:]
    reached = computed + lengths
    cells = (reached + (chunk_size - 1)) // chunk_size
    counts = cells - computed // chunk_size
    empty = None if lengths[lengths.argmin()] else lengths == 0
    if empty is not None:
        counts[empty] = 0
    ends = counts.cumsum()

    # Chunk i starts at i * C plus a constant of its row. A row's first chunk starts where the row starts.
    total = int(ends[-1])
    row_offsets = stops - reached + (cells - ends) * chunk_size
    grid_end = (total + 1) * chunk_size  # beyond the tokens by up to two chunks a row
    grid_dtype: type[np.integer[Any]] = np.int32 if grid_end < 2**31 else np.int64
    cu = np.arange(0, grid_end, chunk_size, dtype=grid_dtype).astype(np.int32, copy=False)
    cu[:-1] += row_offsets.astype(np.int32).repeat(counts)
    cu[0] = 0
    cu[ends] = stops

    last = (ends - 1).astype(np.int32)
    if empty is not None:
        last[empty] = -1
    return Chunks(cu, np.arange(lengths.size, dtype=np.int32).repeat(counts), last)


def row_lengths(computed: Int64Array, starts: Int64Array) -> Int64Array:
    """[rows] int64: the tokens of each row of a packed stream.

    Raises:
        ValueError: `starts` has not one entry more than `computed`, does not start at 0, decreases or
            ends beyond int32; a `computed` that is negative or beyond `MAX_POSITION`.
    """
    if starts.size != computed.size + 1 or starts[0] != 0:
        raise ValueError(
            f"query_start_loc has {starts.size} entries{f' from {starts[0]} on' if starts.size else ''} for "
            f"{computed.size} rows; accepted: one entry a row and the total, from 0 on"
        )
    lengths = starts[1:] - starts[:-1]
    if lengths.size:
        # Seen as unsigned, negative numbers are the largest: one look for both ends.
        row = lengths.view(np.uint64).argmax()
        if lengths[row] < 0:
            raise ValueError(f"query_start_loc falls by {-lengths[row]} after row {row}; accepted: no fall")
        if lengths[row] > INT32_MAX or starts[-1] > INT32_MAX:
            raise ValueError(f"query_start_loc has {starts[-1]} tokens; accepted: at most {INT32_MAX}")
        row = computed.view(np.uint64).argmax()
        if not 0 <= computed[row] <= MAX_POSITION:
            raise ValueError(
                f"computed is {computed[row]} in row {row}; accepted: integers from 0 to {MAX_POSITION}"
            )
    return lengths
