"""What of the pools goes into which piece of a hand-over, and the copies between pools and pieces."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from .cache_access import CacheAccess
from .format import PrefixFormat, TensorFormat
from .parts import KV, Shard, shard_of

PIECE_BYTES = 64 << 20
"""The most bytes of a piece, unless the rows of one layer have more."""
_ALIGNMENT = 16


class Slice(NamedTuple):
    """Some layers and rows of a tensor, within a piece.

    Attributes:
        name: of the tensor.
        layers: (first, stop), counted from the first layer of the part that is sent.
        rows: (first, stop), counted in the blocks or states that are sent.
        offset: of the first byte in the piece.
        shape: of the numbers in the piece, in the order of the pool's dimensions.
        dtype: of the numbers.
    """

    name: str
    layers: tuple[int, int]
    rows: tuple[int, int]
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def stop(self) -> int:
        """The end of its bytes in the piece."""
        return self.offset + prod(self.shape) * self.dtype.itemsize


class PieceLayout:
    """The pieces of one part, in the order in which they are sent; both sides compute the same.

    Attributes:
        pieces: the slices of each piece.
        sizes: the bytes of each piece, multiples of 16.
        buffer_bytes: what a buffer for any piece of this part holds, whatever the number of rows.
    """

    def __init__(self, form: PrefixFormat, part: Shard, num_blocks: int, num_states: int) -> None:
        """
        Args:
            form: of the whole model.
            part: what is sent.
            num_blocks, num_states: how many rows of KV and of the other tensors are sent.
        """
        cells = {name: _cell_bytes(name, tensor, part) for name, tensor in form.tensors.items()}
        self.buffer_bytes = _aligned(max(PIECE_BYTES, *cells.values()))
        self.pieces: list[list[Slice]] = []
        self.sizes: list[int] = []
        for name, tensor in sorted(form.tensors.items()):
            num_layers, num_rows = part[name].layers.count, num_blocks if name == KV else num_states
            if not cells[name] * num_layers * num_rows:
                continue
            # Whole rows where a piece holds one, else some layers of a row.
            layers_at_once = max(1, min(num_layers, self.buffer_bytes // cells[name]))
            row_step = num_rows if layers_at_once == num_layers else 1
            for row in range(0, num_rows, row_step):
                for layer in range(0, num_layers, layers_at_once):
                    layers = layer, min(num_layers, layer + layers_at_once)
                    self._add(name, tensor, part[name].units.count, layers, (row, row + row_step))

    @property
    def num_bytes(self) -> int:
        """Of all pieces."""
        return sum(self.sizes)

    def _add(
        self, name: str, tensor: TensorFormat, units: int, layers: tuple[int, int], rows: tuple[int, int]
    ) -> None:
        row, (first, stop) = rows[0], layers
        row_bytes = prod(_shape(name, tensor, stop - first, 1, units)) * tensor.dtype.itemsize
        while row < rows[1]:
            used = self.sizes[-1] if self.sizes else self.buffer_bytes
            num_rows = min(rows[1] - row, (self.buffer_bytes - used) // row_bytes)
            if not num_rows:
                self.pieces.append([])
                self.sizes.append(0)
                continue
            shape = _shape(name, tensor, stop - first, num_rows, units)
            piece = Slice(name, layers, (row, row + num_rows), used, shape, tensor.dtype)
            self.pieces[-1].append(piece)
            self.sizes[-1] = _aligned(piece.stop)
            row += num_rows


class Copy(NamedTuple):
    """A copy between rows of a pool and some bytes of a buffer.

    Attributes:
        pool: layers of a pool, perhaps viewed as wider words.
        dim: the dimension of the pool, and of `values`, that counts rows.
        rows: [rows] int64, where the rows are in the pool.
        values: in the buffer.
    """

    pool: Tensor
    dim: int
    rows: Tensor
    values: Tensor


class PartCopies:
    """Copies between the pools of one rank and the pieces of a part, on the current stream."""

    def __init__(self, access: CacheAccess, part: Shard) -> None:
        """Copies nothing until `locate` says where the rows are.

        Args:
            access: the cache of the rank.
            part: what is sent, within what the rank holds.
        """
        self._device = access.spec.device
        self._regions = _regions(access, part)
        self._rows: dict[str, Tensor] = {}

    def locate(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Say where the rows are, in the order in which they are sent; does not synchronise."""
        rows = torch.tensor([*blocks, *slots], dtype=torch.int64, device="cpu")
        rows = rows.to(self._device, non_blocking=True)  # of pageable memory, which is read before it returns
        places = rows[: len(blocks)], rows[len(blocks) :]
        self._rows = {name: places[0 if name == KV else 1] for name in self._regions}

    def between(self, piece: Sequence[Slice], buffer: Tensor) -> list[Copy]:
        """The copies between the pools and a piece in `buffer`, [bytes] uint8 on their device."""
        copies = []
        with torch.inference_mode():
            for each in piece:
                region, dim = self._regions[each.name][slice(*each.layers)], _row_dim(each.name)
                pool, values = _widened(region, _values(each, buffer), dim)
                copies.append(Copy(pool, dim, self._rows[each.name][slice(*each.rows)], values))
        return copies

    def gather(self, copies: Sequence[Copy]) -> None:
        """Copy from the pools into a buffer."""
        with torch.inference_mode():
            for copy in copies:
                torch.index_select(copy.pool, copy.dim, copy.rows, out=copy.values)

    def scatter(self, copies: Sequence[Copy]) -> None:
        """Copy from a buffer into the pools."""
        with torch.inference_mode():
            for copy in copies:
                copy.pool.index_copy_(copy.dim, copy.rows, copy.values)


def _regions(access: CacheAccess, part: Shard) -> Mapping[str, Tensor]:
    """The layers and units of `part` in the pools of this rank, in the order of the pools' dimensions."""
    own, regions = shard_of(access.spec), {}
    for name, pool in access.pools.items():
        held, wanted = own[name], part[name]
        native = pool.permute(0, 3, 1, 4, 2, 5) if name == KV else pool
        layers = native[wanted.layers.start - held.layers.start : wanted.layers.stop - held.layers.start]
        first = wanted.units.start - held.units.start
        regions[name] = layers.narrow(4 if name == KV else 2, first, wanted.units.count)
    return regions


def _row_dim(name: str) -> int:
    return 2 if name == KV else 1


def _shape(name: str, tensor: TensorFormat, layers: int, rows: int, units: int) -> tuple[int, ...]:
    if name == KV:
        both, block_size, head_dim = tensor.shape
        return layers, both, rows, block_size, units, head_dim
    return layers, rows, units, *tensor.shape


def _cell_bytes(name: str, tensor: TensorFormat, part: Shard) -> int:
    """Bytes of one row of one layer."""
    return prod(_shape(name, tensor, 1, 1, part[name].units.count)) * tensor.dtype.itemsize


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _values(piece: Slice, buffer: Tensor) -> Tensor:
    return buffer[piece.offset : piece.stop].view(piece.dtype).view(piece.shape)


def _widened(pool: Tensor, values: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The same numbers with rows as long and words as wide as both allow: copies take fewer instructions."""
    with suppress(RuntimeError):  # of a part of the units, rows are not contiguous
        pool, values = pool.view(*pool.shape[: dim + 1], -1), values.view(*values.shape[: dim + 1], -1)
    for word in (torch.int64, torch.int32):
        if all(_has_words(tensor, word) for tensor in (pool, values)):
            return pool.view(word), values.view(word)
    return pool, values


def _has_words(tensor: Tensor, word: torch.dtype) -> bool:
    size, width = tensor.element_size(), word.itemsize
    offsets = *tensor.stride()[:-1], tensor.shape[-1]
    return (
        tensor.stride(-1) == 1
        and tensor.data_ptr() % width == 0
        and all(offset * size % width == 0 for offset in offsets)
    )
