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
    for first, indices in _pieces(pool, dim, rows):
        values.narrow(dim, first, len(indices)).copy_(pool.index_select(dim, indices))
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
    for first, indices in _pieces(pool, dim, rows):
        piece = torch.tensor(value_rows[first : first + len(indices)], dtype=torch.int64, device="cpu")
        pool.index_copy_(dim, indices, values.index_select(dim, piece).to(pool.device))


def _pieces(pool: Tensor, dim: int, rows: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """(Position in `rows`, the rows from there on that fit `STAGING_BYTES`, as an index on the device)."""
    row_bytes = max(1, pool[(slice(None),) * dim + (slice(0, 1),)].numel() * pool.element_size())
    rows_at_once = max(1, STAGING_BYTES // row_bytes)
    for first in range(0, len(rows), rows_at_once):
        piece = rows[first : first + rows_at_once]
        yield first, torch.tensor(piece, dtype=torch.int64, device=pool.device)
