"""The pieces of a hand-over: what each holds of the pools, buffers for them, and how they are packed."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from math import prod
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...inference.contexts.row_checksum import RowChecksum
from ...validation import ceil_div
from .exports import CacheAccess
from .format import KV, PrefixFormat, Shard, TensorFormat, TransferError, shard_of
from .pipe import MessagePipe, NcclPipe, Passage

PIECE_BYTES = 64 << 20  # the most bytes of a piece, unless an entry of one layer has more
NUM_BUFFERS = 4  # pieces are packed and unpacked while others are on their way
Pipe = MessagePipe | NcclPipe
WaitFor = Callable[[Callable[[], bool]], None]
"""Returns when a condition holds; raises where it will not in time."""
_ALIGNMENT = 16


class PieceSlice(NamedTuple):
    """Some layers of some entries (blocks or states) of one tensor: what a piece holds."""

    name: str
    layers: slice  # counted from the first layer of the part that is sent
    entries: slice  # counted in the blocks or states that are sent
    shape: tuple[int, ...]  # of the numbers, in the order of the pool's dimensions
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class PieceLayout:
    """The pieces of one part, in the order in which they are sent; both sides compute the same."""

    def __init__(self, form: PrefixFormat, part: Shard, num_blocks: int, num_states: int) -> None:
        """Of so many entries of KV, and of the other tensors."""
        cells = {name: _slice(name, tensor, part) for name, tensor in form.tensors.items()}
        # What a buffer for any piece of this part holds, whatever the number of entries.
        self.buffer_bytes = _aligned(max(PIECE_BYTES, *(cell.num_bytes for cell in cells.values())))
        self.pieces: list[PieceSlice] = []
        for name, tensor in sorted(form.tensors.items()):
            num_layers, num_entries = part[name].layers.count, num_blocks if name == KV else num_states
            if not cells[name].num_bytes * num_layers * num_entries:
                continue
            # Whole entries where a piece holds one, else some layers of an entry.
            cells_at_once = self.buffer_bytes // cells[name].num_bytes
            layers_at_once = min(num_layers, cells_at_once)
            entries_at_once = max(1, cells_at_once // num_layers)
            for entry in range(0, num_entries, entries_at_once):
                entries = slice(entry, min(num_entries, entry + entries_at_once))
                for layer in range(0, num_layers, layers_at_once):
                    layers = slice(layer, min(num_layers, layer + layers_at_once))
                    self.pieces.append(_slice(name, tensor, part, layers, entries))
        self.sizes = [_aligned(piece.num_bytes) for piece in self.pieces]


class PieceCopy(NamedTuple):
    """A copy between blocks or slots of a pool and some bytes of a buffer."""

    pool: Tensor  # some layers, perhaps viewed as wider words
    dim: int  # counts them, in `pool` and in `values`
    places: Tensor  # [blocks or slots] int64, their indices in the pool
    values: Tensor  # in the buffer


class PartCopies:
    """Copies between the pools of one rank and the pieces of a part, on the current stream."""

    def __init__(self, access: CacheAccess, part: Shard, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Of these blocks and slots of the pools, in the order of sending; does not synchronise."""
        self._regions = _regions(access, part)
        places = torch.tensor([*blocks, *slots], dtype=torch.int64, device="cpu")
        places = places.to(access.spec.device, non_blocking=True)  # pageable memory is read before it returns
        of_kv, of_states = places[: len(blocks)], places[len(blocks) :]
        self._places = {name: of_kv if name == KV else of_states for name in self._regions}

    def between(self, piece: PieceSlice, buffer: Tensor) -> PieceCopy:
        """The copy between a pool and a piece in `buffer`, [bytes] uint8 on its device."""
        dim = 2 if piece.name == KV else 1
        with torch.inference_mode():
            values = buffer[: piece.num_bytes].view(piece.dtype).view(piece.shape)
            pool, values = _widened(self._regions[piece.name][piece.layers], values, dim)
            return PieceCopy(pool, dim, self._places[piece.name][piece.entries], values)

    def gather(self, copy: PieceCopy) -> None:
        """Copy from the pool into a buffer."""
        with torch.inference_mode():
            torch.index_select(copy.pool, copy.dim, copy.places, out=copy.values)

    def scatter(self, copy: PieceCopy) -> None:
        """Copy from a buffer into the pool."""
        with torch.inference_mode():
            copy.pool.index_copy_(copy.dim, copy.places, copy.values)


def _regions(access: CacheAccess, part: Shard) -> Mapping[str, Tensor]:
    """The layers and units of `part` in the pools of this rank, in the order of the pools' dimensions."""
    own_shard = shard_of(access.spec)
    regions = {}
    for name, pool in access.pools.items():
        outer, inner = own_shard[name], part[name]
        native = pool.permute(0, 3, 1, 4, 2, 5) if name == KV else pool
        layers = native[inner.layers.start - outer.layers.start : inner.layers.stop - outer.layers.start]
        first = inner.units.start - outer.units.start
        regions[name] = layers.narrow(4 if name == KV else 2, first, inner.units.count)
    return regions


def _slice(
    name: str, tensor: TensorFormat, part: Shard, layers: slice = slice(0, 1), entries: slice = slice(0, 1)
) -> PieceSlice:
    """These layers of these entries of a part; by default one layer of one entry."""
    num_layers, num_entries = layers.stop - layers.start, entries.stop - entries.start
    units = part[name].units.count
    shape: tuple[int, ...] = num_layers, num_entries, units, *tensor.shape
    if name == KV:
        kv, block_size, head_dim = tensor.shape
        shape = num_layers, kv, num_entries, block_size, units, head_dim
    return PieceSlice(name, layers, entries, shape, tensor.torch_dtype)


def _aligned(num_bytes: int) -> int:
    return ceil_div(num_bytes, _ALIGNMENT) * _ALIGNMENT


def _widened(pool: Tensor, values: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Views with as few dimensions and as wide words as both allow: copies take fewer instructions."""
    with suppress(RuntimeError):  # a part of the units is not contiguous
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


# ---- staging


class PoolLease:
    """Where a thread may read and write the pools until `revoke`: the engine continues with them then."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.is_revoked = False

    def revoke(self) -> None:
        """Wait for the thread that holds it, and let no other have it."""
        with self._lock:
            self.is_revoked = True

    @contextmanager
    def held(self) -> Iterator[None]:
        with self._lock:
            if self.is_revoked:
                raise TransferError("the hand-over was given up")
            yield


class Staging:
    """Buffers for pieces on the device of the pools; with `scrubs`, `scrub` zeroes them."""

    def __init__(self, device: torch.device, scrubs: bool = False) -> None:
        self._device = device
        self.scrubs = scrubs
        on_gpu = device.type == "cuda"
        # It never waits for a pipe: a copy is launched once a piece is known to be there.
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._checksums: dict[int, RowChecksum] = {}
        self.buffers: list[Tensor] = []  # `NUM_BUFFERS` of [bytes] uint8

    @torch.inference_mode(False)
    def reserve(self, layout: PieceLayout) -> RowChecksum:
        """Make room for the pieces of a layout, on the current stream; returns what sums them."""
        size = max(layout.sizes, default=0)
        if not self.buffers or self.buffers[0].numel() < size:
            self.buffers = []
            self.buffers = [
                torch.zeros(size, dtype=torch.uint8, device=self._device) for _ in range(NUM_BUFFERS)
            ]
        if layout.buffer_bytes not in self._checksums:
            self._checksums[layout.buffer_bytes] = RowChecksum(layout.buffer_bytes, self._device)
        return self._checksums[layout.buffer_bytes]

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Copies and sums inside run on the stream of this object."""
        on_gpu = self._stream is not None
        with torch.cuda.stream(self._stream) if on_gpu else nullcontext(), torch.inference_mode():
            yield

    def scrub(self) -> None:
        """Zero the buffers, after the copies from them; no piece may be on its way."""
        if self.scrubs:
            with self.on_stream():
                for buffer in self.buffers:
                    buffer.zero_()

    def mark(self) -> torch.cuda.Event | None:
        """The event of everything launched so far; None on a CPU."""
        if self._stream is None:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def wait_for_engine(self) -> None:
        """Later launches here wait for the current stream of the calling thread."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def make_engine_wait(self) -> None:
        """The current stream of the calling thread waits for everything launched here."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


def send_pieces(
    pipe: Pipe, layout: PieceLayout, copies: PartCopies, staging: Staging, lease: PoolLease, wait_for: WaitFor
) -> tuple[list[int], Iterable[Passage]]:
    """Gather and send all pieces; returns their checksums, and the passages that may yet use buffers."""
    sums: list[Tensor] = []
    under_way: deque[Passage] = deque()
    with staging.on_stream():
        checksum = staging.reserve(layout)
        for index, (piece, size) in enumerate(zip(layout.pieces, layout.sizes, strict=True)):
            if len(under_way) == NUM_BUFFERS:
                wait_for(under_way.popleft().poll_done)
            buffer = staging.buffers[index % NUM_BUFFERS][:size]
            with lease.held():
                copies.gather(copies.between(piece, buffer))
            packed = staging.mark()
            sums.append(checksum(buffer, index))
            if under_way:
                wait_for(under_way[-1].poll_launched)
            under_way.append(pipe.send(buffer, packed))
        if under_way:
            wait_for(under_way[-1].poll_launched)
        return _read_sums(sums), under_way


def receive_pieces(
    pipe: Pipe, layout: PieceLayout, copies: PartCopies, staging: Staging, lease: PoolLease, wait_for: WaitFor
) -> list[int]:
    """Receive all pieces of a part and scatter them into the pools; returns their checksums."""
    sums: list[Tensor] = []
    under_way: list[Passage] = []
    with staging.on_stream():
        checksum = staging.reserve(layout)
        free: list[Any] = [staging.mark()] * NUM_BUFFERS
        for index, piece in enumerate(layout.pieces):
            for posted in range(len(under_way), min(index + NUM_BUFFERS, len(layout.pieces))):
                place = posted % NUM_BUFFERS
                if under_way:
                    wait_for(under_way[-1].poll_launched)
                under_way.append(pipe.receive(staging.buffers[place][: layout.sizes[posted]], free[place]))
            buffer = staging.buffers[index % NUM_BUFFERS][: layout.sizes[index]]
            to_pools = copies.between(piece, buffer)
            wait_for(under_way[index].poll_done)
            sums.append(checksum(buffer, index))
            with lease.held():
                copies.scatter(to_pools)
            free[index % NUM_BUFFERS] = staging.mark()
        return _read_sums(sums)


def _read_sums(sums: list[Tensor]) -> list[int]:
    """Checksums as integers. Synchronises."""
    return [int(value) for value in torch.stack(sums).tolist()] if sums else []
