"""Where the chunks of a packed stream lie: kernels compute chunk by chunk, and store states at chunk ends."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Integers = Sequence[int] | npt.NDArray[np.integer[Any]]


class Chunks(NamedTuple):
    """The chunks of a packed stream, in order; no chunk is empty and none spans two rows."""

    cu_chunk_seqlens: Int32Array  # [chunks + 1]: where each chunk starts; trailing total
    seq_idx: Int32Array  # [chunks]: the row of each chunk
    last_chunk_indices: Int32Array  # [rows]: each row's last chunk; -1 for a row without tokens


class ChunkGrid(NamedTuple):
    """The chunks of a step's prefill rows, and the chunk that ends on each planned checkpoint.

    The fields are those of `PrefillChunks` and `Checkpoints`, as fresh numpy arrays.
    """

    cu_chunk_seqlens: Int32Array
    seq_idx: Int32Array
    row_chunk_starts: Int32Array
    token_rows: Int64Array
    checkpoint_chunks: Int64Array  # [checkpoints]: the chunk that ends on the boundary
    checkpoint_token_ends: Int64Array  # [checkpoints]: packed position of the boundary (exclusive end)


def chunk_grid(
    computed: Integers,
    lengths: Integers,
    chunk_size: int,
    checkpoint_rows: Integers = (),
    checkpoint_positions: Integers = (),
) -> ChunkGrid:
    """The absolute chunk grid of rows with `computed` tokens and `lengths` new ones, 0 or more.

    Checkpoints lie at multiples of `chunk_size` in (computed, computed + length] of their row.
    """
    before, counts = np.asarray(computed, np.int64), np.asarray(lengths, np.int64)
    rows, positions = np.asarray(checkpoint_rows, np.int64), np.asarray(checkpoint_positions, np.int64)
    starts = np.zeros(counts.size + 1, np.int64)
    counts.cumsum(out=starts[1:])
    chunks = absolute_chunks(before, starts, counts, chunk_size)
    begins = before[rows]
    ends = begins + counts[rows]
    chunks_after = (ends + (chunk_size - 1)) // chunk_size - positions // chunk_size
    return ChunkGrid(
        chunks.cu_chunk_seqlens,
        chunks.seq_idx,
        row_chunk_starts=chunks.seq_idx.searchsorted(np.arange(counts.size + 1)).astype(np.int32),
        token_rows=np.arange(counts.size).repeat(counts),
        checkpoint_chunks=chunks.last_chunk_indices[rows] - chunks_after,
        checkpoint_token_ends=starts[rows] + positions - begins,
    )


def absolute_chunks(computed: Int64Array, starts: Int64Array, lengths: Int64Array, chunk_size: int) -> Chunks:
    """Chunks cut at absolute multiples of `chunk_size`; `starts`: packed, with a trailing total.

    With C the chunk size, a row of c computed and n new tokens, packed from q on, is cut at q + (floor(c / C)
    + j) * C - c for j >= 1, within the row. Example, C = 8, two rows with (c, n) = (0, 5) and (3, 10):

        packed token    0 ... 4 | 5 ... 9 | 10 ... 14       absolute position of a cut in its row
        chunk              0    |    1    |     2           cut at 10 = 5 + 8 - 3: position 8 of row 1
    """
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
