"""Copies between rows of a pool on the device and tensors on the CPU, in pieces of limited size."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

STAGING_BYTES = 256 << 20
"""The most bytes of a pool that are copied at once: the memory that a copy takes besides its two sides."""


def read_rows(pool: Tensor, dim: int, rows: Sequence[int]) -> Tensor:
    """Copy `pool`'s `rows` along `dim`, in this order, to a new tensor on the CPU; synchronises."""
    shape = list(pool.shape)
    shape[dim] = len(rows)
    values = torch.empty(shape, dtype=pool.dtype, device="cpu")
    for first, piece in _pieces(pool, dim, rows):
        # `index_select` takes several times as long on a CPU where rows are not contiguous.
        gathered = torch.stack([pool.select(dim, row) for row in piece], dim)
        values.narrow(dim, first, len(piece)).copy_(gathered)
    return values


def write_rows(
    pool: Tensor, dim: int, rows: Sequence[int], values: Tensor, value_rows: Sequence[int]
) -> None:
    """Overwrite `pool`'s distinct `rows` along `dim`, on the current stream.

    Args:
        pool: on the device; written in place.
        dim: the dimension that counts rows, in `pool` and in `values`.
        rows: the rows to overwrite.
        values: on the CPU, of the pool's dtype and of its shape but for `dim`.
        value_rows: for each of `rows`, the row of `values` to copy.
    """
    for first, piece in _pieces(pool, dim, rows):
        value_piece = value_rows[first : first + len(piece)]
        staged = values.index_select(dim, torch.tensor(value_piece, dtype=torch.int64, device="cpu"))
        indices = torch.tensor(piece, dtype=torch.int64, device=pool.device)
        pool.index_copy_(dim, indices, staged.to(pool.device))


def _pieces(pool: Tensor, dim: int, rows: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
    """(Position in `rows`, the rows from there on that fit `STAGING_BYTES`)."""
    row_bytes = max(1, pool[(slice(None),) * dim + (slice(0, 1),)].numel() * pool.element_size())
    rows_at_once = max(1, STAGING_BYTES // row_bytes)
    for first in range(0, len(rows), rows_at_once):
        yield first, rows[first : first + rows_at_once]
