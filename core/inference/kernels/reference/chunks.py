"""What the scans share: slots, chunks padded to one shape, and the order between chunks."""

from collections.abc import Callable

import torch
from torch import Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which norms, decays, scores and states of a `dtype` model are computed."""
    return torch.promote_types(dtype, torch.float32)


def rounded(result: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """`result` in `dtype`, in `out` where there is one."""
    return result.to(dtype) if out is None else out.copy_(result)


def read_states(states: Tensor, sources: Tensor) -> Tensor:
    """A copy of the states at `sources`, [rows, ...]; zeros for -1."""
    named = (sources >= 0).view(-1, *[1] * (states.dim() - 1))
    return states[sources.clamp(min=0)].masked_fill(~named, 0)


def write_states(states: Tensor, destinations: Tensor, values: Tensor) -> None:
    """Store `values` [rows, ...] at `destinations`; -1: nowhere."""
    named = destinations >= 0
    states[destinations[named]] = values[named].to(states.dtype)


class PaddedChunks:
    """The chunks of packed rows, each padded to `chunk_size` tokens.

    All products of a chunk then have the same shape whichever rows share the batch, and so the same bits.
    Synchronises.
    """

    def __init__(
        self, tokens: int, chunk_size: int, cu_chunk_seqlens: Tensor, row_chunk_starts: Tensor
    ) -> None:
        """
        Args:
            tokens: all packed tokens, padding included.
            chunk_size: at least the tokens of every chunk.
            cu_chunk_seqlens, row_chunk_starts: [chunks + 1], [rows + 1], as in `PrefillChunks`.
        """
        self.num_chunks = int(row_chunk_starts[-1])
        cuts = cu_chunk_seqlens[: self.num_chunks + 1].long()
        places = cuts[:-1, None] + torch.arange(chunk_size, device=cuts.device)
        self._inside = places < cuts[1:, None]
        self._places = torch.where(self._inside, places, tokens)

    def padded(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """[tokens, ...] -> [chunks, chunk_size, ...] in `dtype`; zeros after a chunk's tokens."""
        behind = packed.new_zeros(1, *packed.shape[1:])
        return torch.cat([packed, behind]).to(dtype)[self._places]

    def packed(self, padded: Tensor) -> Tensor:
        """[chunks, chunk_size, ...] -> [tokens of all chunks, ...]."""
        return padded[self._inside]


def pass_states(
    step: Callable[..., Tensor],
    parts: tuple[Tensor, ...],
    initial: Tensor,
    seq_idx: Tensor,
    row_chunk_starts: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The recurrence between chunks: leaving = step(entering, *parts of the chunk), in order within each row.

    Costs one step a chunk of the longest row. Rows are ranked by length, so that the k-th chunks of all rows
    that have one are neighbours, in the order of the ranked states.

    Args:
        step: (states [n, ...], parts [n, ...]) -> the next states [n, ...], of n chunks of n rows.
        parts: what `step` reads of each chunk, [chunks, ...] each.
        initial: [rows, ...] the states before the rows' first chunks.
        seq_idx, row_chunk_starts: [chunks] and [rows + 1] int64, as in `PrefillChunks`.

    Returns: the states that enter and that leave each chunk, [chunks, ...] both, and each row's last state,
        [rows, ...].
    """
    rows = initial.shape[0]
    counts = row_chunk_starts.diff()
    ranked = counts.argsort(descending=True, stable=True)
    rank = ranked.argsort()
    ordinal = torch.arange(seq_idx.shape[0], device=seq_idx.device) - row_chunk_starts[seq_idx]
    order = (ordinal * rows + rank[seq_idx]).argsort()
    sizes = torch.bincount(ordinal).tolist()

    entering, leaving = [initial[:0]], [initial[:0]]
    state = initial[ranked]
    for size, *several in zip(sizes, *(torch.split(part[order], sizes) for part in parts), strict=True):
        state = state[:size]
        entering.append(state)
        state = step(state, *several)
        leaving.append(state)

    chunk_place = order.argsort()
    left = torch.cat(leaving)[chunk_place]
    own = torch.arange(rows, device=initial.device)
    last_or_initial = torch.where(counts > 0, rows + row_chunk_starts[1:] - 1, own)
    final = torch.cat([initial, left])[last_or_initial]
    return torch.cat(entering)[chunk_place], left, final
