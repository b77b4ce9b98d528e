"""What the scans share: slots, chunks padded to one shape, and the order between chunks."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..step_rows import ScanRows


def rounded(result: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """`result` in `dtype`, in `out` where there is one."""
    return result.to(dtype) if out is None else out.copy_(result)


def read_states(states: Tensor, sources: Tensor) -> Tensor:
    """A copy of the states at `sources`, [rows, ...]; zeros for -1."""
    return states[sources.clamp(min=0)].masked_fill_((sources < 0).view(-1, *[1] * (states.dim() - 1)), 0)


def write_states(states: Tensor, destinations: Tensor, values: Tensor) -> None:
    """Store `values` [rows, ...] at `destinations`; -1: nowhere."""
    if not (named := destinations >= 0).all():
        destinations, values = destinations[named], values[named]
    states[destinations] = values.to(states.dtype)


def places(pool: Tensor, input_blocks: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """The index of tokens [start, stop) of a chunk in a pool [input blocks, tokens of one, ...]."""
    tokens = torch.arange(start, stop, device=input_blocks.device)
    return input_blocks[tokens // pool.shape[1]].long(), tokens % pool.shape[1]


class PaddedChunks:
    """Chunks of packed rows, each padded to `chunk_size`: products have one shape, and bits, in any batch."""

    def __init__(self, tokens: int, rows: ScanRows) -> None:
        self.num_chunks = int(rows.row_chunk_starts[-1])
        cuts = rows.cu_chunk_seqlens[: self.num_chunks + 1].long()
        places = cuts[:-1, None] + torch.arange(rows.chunk_size, device=cuts.device)
        self._inside = places < cuts[1:, None]
        self._places = torch.where(self._inside, places, tokens)

    def padded(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """[tokens, ...] -> [chunks, chunk_size, ...] in `dtype`; zeros after a chunk's tokens."""
        zeros = packed.new_zeros(1, *packed.shape[1:])
        return torch.cat([packed, zeros]).to(dtype)[self._places]

    def packed(self, padded: Tensor) -> Tensor:
        """[chunks, chunk_size, ...] -> [tokens of all chunks, ...]."""
        return padded[self._inside]


def pass_states(
    step: Callable[..., Tensor], parts: tuple[Tensor, ...], initial: Tensor, seq_idx: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The recurrence between chunks: leaving = step(entering, *parts of the chunk), in order within each row.

    Returns the states that enter and that leave each chunk, [chunks, ...] both, and each row's last state.
    """
    final = initial.clone()
    entering, leaving = initial.new_empty(2, len(seq_idx), *initial.shape[1:])
    for chunk, row in enumerate(seq_idx.tolist()):
        entering[chunk] = final[row]
        state = step(final[row : row + 1], *(part[chunk : chunk + 1] for part in parts))
        leaving[chunk] = final[row] = state[0]
    return entering, leaving, final
