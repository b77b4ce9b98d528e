"""What carries the pieces of a hand-over: messages, or NCCL between GPUs."""

import importlib.util
import time
from collections import deque
from collections.abc import Callable
from threading import Lock, Thread
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .format import TransferError

_SUCCESS, _IN_PROGRESS = 0, 7  # ncclResult_t
_CLOSE_S = 5.0
_CALL_S = 1.0  # a call of NCCL that takes longer, though none should block, does not delay an abort


class NcclFacts(NamedTuple):
    """What two ranks must have to be a communicator: one version, and a GPU each."""

    version: str
    gpu: str

    def fits(self, other: "NcclFacts | None") -> bool:
        return other is not None and self.version == other.version and self.gpu != other.gpu


class MessagePassage(NamedTuple):
    """A piece on its way; a poll takes what has arrived, and raises where the piece failed."""

    poll_done: Callable[[], bool]  # whether the piece has left this rank, or is in its buffer

    def poll_launched(self) -> bool:
        """Whether the pipe accepts the next piece."""
        return True


class NcclPassage:
    """A piece on its way over NCCL, which launches it in a thread of its own; `event` is then after it."""

    def __init__(self, stream: torch.cuda.Stream, is_settled: Callable[[], bool]) -> None:
        self._stream, self._is_settled = stream, is_settled
        self.event: torch.cuda.Event | None = None

    def poll_launched(self) -> bool:
        if self.event is None and self._is_settled():
            self.event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self.event.record(self._stream)
        return self.event is not None

    def poll_done(self) -> bool:
        return self.poll_launched() and self.event is not None and bool(self.event.query())  # type: ignore[no-untyped-call]


Passage = MessagePassage | NcclPassage


class MessagePipe:
    """Carries pieces, [bytes] uint8, in order as payloads of messages; the receiver acknowledges each."""

    def __init__(self, send_piece: Callable[[Any], None], acknowledge: Callable[[], None]) -> None:
        self._send_piece, self._acknowledge = send_piece, acknowledge
        self._num_sent = self._num_received = self._num_expected = 0
        self.num_acknowledged = 0  # pieces that the receiver has
        self.arrived: deque[memoryview] = deque()  # payloads that no passage has taken

    def send(self, piece: Tensor, packed: torch.cuda.Event | None) -> MessagePassage:
        del packed  # on the current stream, as the copy to the CPU
        self._send_piece(piece.cpu().numpy())
        num_sent = self._num_sent = self._num_sent + 1
        return MessagePassage(lambda: self.num_acknowledged >= num_sent)

    def receive(self, piece: Tensor, free: torch.cuda.Event | None) -> MessagePassage:
        del free
        num_expected = self._num_expected = self._num_expected + 1
        return MessagePassage(lambda: self._fill(piece, num_expected))

    def _fill(self, piece: Tensor, num_expected: int) -> bool:
        """Whether this piece, the `num_expected`-th, is filled; takes the next payload, if one has come."""
        if self._num_received < num_expected and self.arrived:
            payload = self.arrived.popleft()
            if len(payload) != len(piece):
                raise TransferError(f"a piece is of {len(payload)} bytes; accepted: {len(piece)}")
            piece.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
            self._num_received += 1
            self._acknowledge()
        return self._num_received >= num_expected


def nccl_facts(device: torch.device) -> NcclFacts | None:
    """What NCCL can use on this rank; None without a GPU, nccl4py or libnccl."""
    if device.type != "cuda" or importlib.util.find_spec("nccl") is None:
        return None
    try:
        import nccl.core

        library = nccl.core.get_version().libnccl
    except (ImportError, RuntimeError, OSError):
        return None
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    return None if library is None else NcclFacts(str(library.version), gpu)


def new_nccl_id() -> bytes:
    """The id of a communicator to be made by two ranks."""
    import nccl.core

    return bytes(nccl.core.get_unique_id())


class AbortableCommunicator:
    """A communicator that another thread may abort: a call after that would read freed memory."""

    def __init__(self, communicator: Any) -> None:
        """`communicator`: of nccl4py; its calls do not block."""
        self._communicator = communicator
        self._lock = Lock()
        self._is_aborted = False

    def call[T](self, use: Callable[[Any], T]) -> T:
        """`use(communicator)`; TransferError after an abort."""
        with self._lock:
            if self._is_aborted:
                raise TransferError("the hand-over was given up")
            return use(self._communicator)

    def abort(self) -> None:
        """Abort the communicator, after the call under way. A second call does nothing."""
        is_free = self._lock.acquire(timeout=_CALL_S)
        was_aborted, self._is_aborted = self._is_aborted, True
        if is_free:
            self._lock.release()
        if not was_aborted:
            self._communicator.abort()


class NcclPipe:
    """A communicator of two ranks that never blocks: each wait is a poll, and an abort ends what hangs.

    `packed` is the event after which a piece's bytes are there, `free` the one after which they may be
    overwritten. The kernel of a piece whose peer is lost occupies some multiprocessors until `close`, and
    writes to no memory but the piece.
    """

    def __init__(
        self, device: torch.device, rank: int, unique_id: bytes, remaining_s: Callable[[], float]
    ) -> None:
        """Blocks until the other side, rank 1 or 0, is there; `device` is the current one of the thread."""
        import nccl.core

        self._peer = 1 - rank
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        communicator_id = nccl.core.UniqueId.from_bytes(unique_id)
        config = nccl.core.NCCLConfig(blocking=False)
        self._comm = AbortableCommunicator(nccl.core.Communicator())
        self._comm.call(lambda comm: comm.initialize(2, rank, communicator_id, config))
        try:
            while not self._is_settled():
                if remaining_s() <= 0.001:
                    raise TransferError("the peer made no NCCL communicator in time")
                time.sleep(0.001)
        except BaseException:
            self.close()
            raise

    def send(self, piece: Tensor, packed: torch.cuda.Event | None) -> NcclPassage:
        if packed is not None:
            self._stream.wait_event(packed)
        self._comm.call(lambda comm: comm.send(piece, self._peer, stream=self._stream.cuda_stream))
        return NcclPassage(self._stream, self._is_settled)

    def receive(self, piece: Tensor, free: torch.cuda.Event | None) -> NcclPassage:
        if free is not None:
            self._stream.wait_event(free)
        self._comm.call(lambda comm: comm.recv(piece, self._peer, stream=self._stream.cuda_stream))
        return NcclPassage(self._stream, self._is_settled)

    def close(self) -> bool:
        """Abort, which needs no peer, and takes seconds; returns whether no piece is written from now on."""
        aborted = Thread(target=self._comm.abort, name="hand-over, abort", daemon=True)
        aborted.start()
        aborted.join(_CLOSE_S)
        return not aborted.is_alive() and self._is_idle()

    def _is_idle(self) -> bool:
        """Whether the stream is done, or will be in a second."""
        until = time.monotonic() + 1.0
        while not self._stream.query():
            if time.monotonic() > until:
                return False
            time.sleep(0.001)
        return True

    def _is_settled(self) -> bool:
        """Whether NCCL has launched what it was given; a TransferError where it failed."""
        result = self._comm.call(lambda comm: int(comm.get_async_error()))
        if result not in (_SUCCESS, _IN_PROGRESS):
            text = self._comm.call(lambda comm: comm.get_last_error())
            raise TransferError(f"NCCL failed: {text or result}")
        return result == _SUCCESS
