"""Staging buffers for the pieces of a hand-over, the loops that pack and unpack them, and the ZeroMQ pipe."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from threading import Lock
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor

from ...inference.kernels.row_checksum import RowChecksum
from .format import TransferError
from .pieces import PartCopies, PieceLayout

NUM_BUFFERS = 4
"""Pieces are packed and unpacked while others are on their way."""
Wait = Callable[[Callable[[], bool]], None]
"""Returns when a condition holds; raises where it will not in time."""


class Passage(Protocol):
    """A piece on its way."""

    def is_launched(self) -> bool:
        """Whether the pipe accepts the next piece; raises where it failed."""

    def is_done(self) -> bool:
        """Whether the piece has left this rank or arrived; raises where it never will."""


class Pipe(Protocol):
    """Carries pieces between two ranks, in order; may write to a piece until `close`."""

    def send(self, piece: Tensor, packed: torch.cuda.Event | None) -> Passage:
        """Begin to send [bytes] uint8; `packed`: the event after which the bytes are there."""

    def receive(self, piece: Tensor, free: torch.cuda.Event | None) -> Passage:
        """Begin to fill [bytes] uint8; `free`: the event after which the memory may be written."""

    def close(self) -> bool:
        """End the pipe, in seconds at most; returns whether no piece is written from now on."""


class MessagePipe:
    """Carries pieces as payloads of messages; the receiver acknowledges each."""

    def __init__(self, send_piece: Callable[[Any], None], acknowledge: Callable[[], None]) -> None:
        self._send_piece, self._acknowledge = send_piece, acknowledge
        self._num_sent = self.num_acknowledged = 0
        self._num_received = self._num_expected = 0
        self.arrived: deque[memoryview] = deque()

    def send(self, piece: Tensor, packed: torch.cuda.Event | None) -> Passage:
        del packed  # on the current stream, as the copy to the CPU
        self._send_piece(piece.cpu().numpy())
        self._num_sent += 1
        return _MessagePassage(lambda number: self.num_acknowledged >= number, self._num_sent)

    def receive(self, piece: Tensor, free: torch.cuda.Event | None) -> Passage:
        del free
        self._num_expected += 1
        return _MessagePassage(lambda number: self._fill(piece, number), self._num_expected)

    def _fill(self, piece: Tensor, number: int) -> bool:
        if self._num_received < number and self.arrived:
            payload = self.arrived.popleft()
            if len(payload) != len(piece):
                raise TransferError(f"a piece is of {len(payload)} bytes; accepted: {len(piece)}")
            piece.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
            self._num_received += 1
            self._acknowledge()
        return self._num_received >= number

    def close(self) -> bool:
        return True


class _MessagePassage:
    def __init__(self, is_done: Callable[[int], bool], number: int) -> None:
        self._is_done, self._number = is_done, number

    def is_launched(self) -> bool:
        return True

    def is_done(self) -> bool:
        return self._is_done(self._number)


class PoolGate:
    """A context in which a thread may read and write the pools, until `close`.

    A thread that its caller has given up on never touches a pool again: the engine goes on with it.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self.closed = False

    def close(self) -> None:
        """Wait for a thread in the gate, and let no other in."""
        with self._lock:
            self.closed = True

    def __enter__(self) -> None:
        self._lock.acquire()
        if self.closed:
            self._lock.release()
            raise TransferError("the hand-over was given up")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


class Staging:
    """Buffers for pieces on the device of the pools.

    Copies between buffers and pools run on a stream that never waits for a pipe: a copy is launched when a
    piece is known to be there.

    Attributes:
        buffers: `NUM_BUFFERS` of [bytes] uint8.
    """

    def __init__(self, device: torch.device, scrubs: bool = False) -> None:
        """`scrubs`: whether `scrub` zeroes the buffers."""
        self._device = device
        self._scrubs = scrubs
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._checksums: dict[int, RowChecksum] = {}
        self.buffers: list[Tensor] = []

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
        if self._scrubs:
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

    def follow_engine(self) -> None:
        """Later launches here wait for the current stream of the calling thread."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def lead_engine(self) -> None:
        """The current stream of the calling thread waits for everything launched here."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


def send_pieces(
    pipe: Pipe, layout: PieceLayout, copies: PartCopies, staging: Staging, gate: PoolGate, wait: Wait
) -> tuple[list[int], Iterable[Passage]]:
    """Gather all pieces of a part and begin to send them; a piece is summed while it is on its way.

    Returns:
        The checksums of all pieces, and the pieces that may still be on their way, which use the buffers.
    """
    sums: list[Tensor] = []
    under_way: deque[Passage] = deque()
    with staging.on_stream():
        checksum = staging.reserve(layout)
        for index, (piece, size) in enumerate(zip(layout.pieces, layout.sizes, strict=True)):
            if len(under_way) == NUM_BUFFERS:
                wait(under_way.popleft().is_done)
            buffer = staging.buffers[index % NUM_BUFFERS][:size]
            with gate:
                copies.gather(copies.between(piece, buffer))
            packed = staging.mark()
            sums.append(checksum(buffer, index))
            if under_way:
                wait(under_way[-1].is_launched)
            under_way.append(pipe.send(buffer, packed))
        if under_way:
            wait(under_way[-1].is_launched)
        return _listed(sums), under_way


def receive_pieces(
    pipe: Pipe, layout: PieceLayout, copies: PartCopies, staging: Staging, gate: PoolGate, wait: Wait
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
                    wait(under_way[-1].is_launched)
                under_way.append(pipe.receive(staging.buffers[place][: layout.sizes[posted]], free[place]))
            buffer = staging.buffers[index % NUM_BUFFERS][: layout.sizes[index]]
            to_pools = copies.between(piece, buffer)
            wait(under_way[index].is_done)
            sums.append(checksum(buffer, index))
            with gate:
                copies.scatter(to_pools)
            free[index % NUM_BUFFERS] = staging.mark()
        return _listed(sums)


def _listed(sums: list[Tensor]) -> list[int]:
    return [int(value) for value in torch.stack(sums).tolist()] if sums else []
