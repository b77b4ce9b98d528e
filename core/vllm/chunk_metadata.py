"""The SSD chunks of a step: what vLLM's Mamba2 attention backend has its `_compute_chunk_metadata` for.

Results are cut on the absolute grid of `absolute_chunks`, which alone serves a prefix cache: a state exists
at every absolute multiple of the chunk size, wherever the scheduler cut the prompt.
"""

import numpy as np
import torch
from torch import Tensor

from ..inference.kernels.chunk_grid import Int64Array, absolute_chunks
from ..validation import INT32_MAX, described, holds_data, integer

MAX_POSITION = 2**48
"""Upper bound of a chunk's size and of the tokens before a row; sums with it do not overflow int64."""
_SIGNED_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


def build_chunk_metadata(
    num_computed_tokens: Tensor, query_start_loc: Tensor, chunk_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The SSD chunks of packed sequences, cut at absolute multiples of `chunk_size`.

    Kernels return one state for each *chunk*: read a sequence's state at `last_chunk_indices`, not at the
    sequence's number. Example: computed (0, 3), starts (0, 5, 15), chunks of 8 gives ([0, 5, 10, 15],
    [0, 1, 1], [0, 2]); the cut at 10 is position 8 of the second sequence.

    Args:
        num_computed_tokens: [sequences] integers on the CPU, tokens before this step.
        query_start_loc: [sequences + 1] integers on the CPU, the first token of each sequence in the packed
            step, from 0 on, with a trailing total.
        chunk_size: tokens of one chunk, at least 1.

    Returns:
        (cu_chunk_seqlen [chunks + 1], seq_idx [chunks], last_chunk_indices [sequences]), int32 CPU tensors. A
        sequence without tokens has no chunk, and -1 as its last chunk.

    Raises:
        ValueError: an argument is no such tensor, positions decrease or do not start at 0, a count is
            negative.
    """
    chunk_size = integer("chunk_size", chunk_size, 1, MAX_POSITION)
    num_computed = _host_integers("num_computed_tokens", num_computed_tokens)
    starts = _host_integers("query_start_loc", query_start_loc)
    lengths = _row_lengths(num_computed, starts)
    chunks = absolute_chunks(num_computed, starts, lengths, chunk_size)
    cu_chunk_seqlen, seq_idx, last_chunk_indices = map(torch.from_numpy, chunks)
    return cu_chunk_seqlen, seq_idx, last_chunk_indices


def _host_integers(name: str, tensor: Tensor) -> Int64Array:
    if (
        not isinstance(tensor, Tensor)
        or not (tensor.is_cpu and holds_data(tensor))
        or tensor.dim() != 1
        or tensor.dtype not in _SIGNED_INTEGERS
    ):
        raise ValueError(f"{name} {described(tensor)}; accepted: a 1-D integer tensor on the CPU")
    return tensor.numpy().astype(np.int64)


def _row_lengths(computed: Int64Array, starts: Int64Array) -> Int64Array:
    """[rows] int64: the tokens of each row of a packed stream; a ValueError where some do not fit."""
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
        if not 0 <= (num := computed[row]) <= MAX_POSITION:
            raise ValueError(f"num_computed_tokens is {num} in row {row}; accepted: from 0 to {MAX_POSITION}")
    return lengths
