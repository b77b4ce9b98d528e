"""Pieces from GPU to GPU over NCCL, by nccl4py."""

import importlib.util
import time
from collections.abc import Callable
from threading import Lock, Thread
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .format import TransferError
from .staging import Passage

_SUCCESS, _IN_PROGRESS = 0, 7  # ncclResult_t
_CLOSE_S = 5.0
_CALL_S = 1.0
"""A call of NCCL that takes longer, though none should block, keeps nobody from an abort."""


class NcclFacts(NamedTuple):
    """What two ranks must have to be a communicator: one version, and a GPU each."""

    version: str
    gpu: str


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


class AbortableCommunicator:
    """A communicator that one thread uses and another one may abort.

    NCCL frees a communicator that is aborted. A call that is made later, or meanwhile, would read freed
    memory.
    """

    def __init__(self, communicator: Any) -> None:
        """`communicator`: of nccl4py; its calls do not block."""
        self._communicator = communicator
        self._lock = Lock()
        self._aborted = False

    def call[T](self, use: Callable[[Any], T]) -> T:
        """`use(communicator)`; TransferError behind an abort."""
        with self._lock:
            if self._aborted:
                raise TransferError("the hand-over was given up")
            return use(self._communicator)

    def abort(self) -> None:
        """Abort the communicator, behind the call under way. A second call does nothing."""
        is_free = self._lock.acquire(timeout=_CALL_S)
        was_aborted, self._aborted = self._aborted, True
        if is_free:
            self._lock.release()
        if not was_aborted:
            self._communicator.abort()


class NcclPipe:
    """A communicator of two ranks that never blocks: each wait is a poll, and an abort ends what hangs.

    NCCL works on a stream of its own. The kernel of a piece whose peer is lost occupies some multiprocessors
    until `close`, and writes to no memory but the piece.
    """

    def __init__(
        self,
        device: torch.device,
        side: int,
        send_id: Callable[[bytes], None],
        receive_id: Callable[[], bytes],
        remaining_s: Callable[[], float],
    ) -> None:
        """Blocks until the other side is there.

        Args:
            device: the GPU; must be the current device of the thread.
            side: 0 at the source, 1 at the destination.
            send_id, receive_id: carry the id of the communicator.
            remaining_s: returns the seconds that the call may still take.
        """
        import nccl.core

        self._peer = 1 - side
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        if side == 0:
            unique_id = nccl.core.get_unique_id()
            send_id(bytes(unique_id))
        else:
            unique_id = nccl.core.UniqueId.from_bytes(receive_id())
        config = nccl.core.NCCLConfig(blocking=False)
        self._comm = AbortableCommunicator(nccl.core.Communicator())
        self._comm.call(lambda comm: comm.initialize(2, side, unique_id, config))
        try:
            while not self._is_settled():
                if remaining_s() <= 0.001:
                    raise TransferError("the peer made no NCCL communicator in time")
                time.sleep(0.001)
        except BaseException:
            self.close()
            raise

    def send(self, piece: Tensor, packed: torch.cuda.Event | None) -> Passage:
        if packed is not None:
            self._stream.wait_event(packed)
        self._comm.call(lambda comm: comm.send(piece, self._peer, stream=self._stream.cuda_stream))
        return _NcclPassage(self._is_settled, self._stream)

    def receive(self, piece: Tensor, free: torch.cuda.Event | None) -> Passage:
        if free is not None:
            self._stream.wait_event(free)
        self._comm.call(lambda comm: comm.recv(piece, self._peer, stream=self._stream.cuda_stream))
        return _NcclPassage(self._is_settled, self._stream)

    def close(self) -> bool:
        """Abort the communicator: an abort, unlike a destruction, needs no peer."""
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


class _NcclPassage:
    """A send or receive: NCCL launches it in a thread of its own, and then it is on the stream."""

    def __init__(self, is_settled: Callable[[], bool], stream: torch.cuda.Stream) -> None:
        self._is_settled = is_settled
        self._stream = stream
        self._event: torch.cuda.Event | None = None

    def is_launched(self) -> bool:
        """Whether NCCL can be given the next piece."""
        if self._event is None and self._is_settled():
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record(self._stream)
        return self._event is not None

    def is_done(self) -> bool:
        return self.is_launched() and self._event is not None and bool(self._event.query())  # type: ignore[no-untyped-call]
