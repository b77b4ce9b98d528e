"""Messages between one rank of a replica and one rank of another: a gloo group of these two ranks."""

import hashlib
import json
import struct
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from ...validation import shown
from .format import TransferError
from .parts import json_object

_MESSAGE_TAG, _PIECE_TAG = 0, 1
_FRAME_BYTES = 4096
"""What a message begins with: its length in 8 bytes, and as much of it as fits. A message costs one wait."""
_LENGTH = struct.Struct("<q")
CHUNK_BYTES = 1 << 20
"""The size of the chunks that a message goes in: a receiver allocates one chunk more than has arrived."""
MAX_MESSAGE_BYTES = 1 << 32
_MAX_REFUSAL_BYTES = 1 << 20
_MAX_REASON_LETTERS = 2000
_SEAL_BYTES = 32  # of the SHA-256 before the values of a message
STORE_KEYS = ("here/0", "here/1", "0/0", "0/1")
"""The keys that a link leaves in its store: each side is there, and gloo's addresses."""
_NUM_CONNECTION_ATTEMPTS = 5
"""How often gloo tries to connect; each attempt may take the whole timeout that gloo is given."""
_SPIN_S, _SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 2e-4, 0.01
_GLANCE_S = 0.1
"""How often a side that waits for the other one looks whether the other one has begun anew."""


class RefusedError(TransferError):
    """The peer has ended the hand-over, and says why."""


class PairLink:
    """Sends messages, and pieces in host memory, between a rank of the source and a rank of the destination.

    Every method raises a RuntimeError of torch when the peer is lost or the time is over. Afterwards the link
    is of no use.
    """

    def __init__(
        self,
        store: Store,
        side: int,
        remaining_s: Callable[[], float],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Blocks until the other side is there and connected.

        Args:
            store: of this link alone.
            side: 0 at the source, 1 at the destination.
            remaining_s: returns the seconds that the link may still take in all.
            check: called now and then while the other side has not come; raises to end the wait.
        """
        self._side = side
        self._remaining_s = remaining_s
        # Each attempt of gloo gets only a share of the time, so the other side must be there by then.
        store.set(f"here/{side}", "")
        await_key(store, f"here/{1 - side}", remaining_s, check)
        self._group: Any = dist.ProcessGroupGloo(store, side, 2, self._timeout(_NUM_CONNECTION_ATTEMPTS))

    def send(self, message: bytes) -> None:
        """Send a message; it may be on its way still when the call returns."""
        begun = _FRAME_BYTES - _LENGTH.size
        frame = bytearray(_LENGTH.pack(len(message)) + message[:begun])
        frame += bytes(_FRAME_BYTES - len(frame))
        self._send(torch.frombuffer(frame, dtype=torch.uint8), _MESSAGE_TAG)
        for first in range(begun, len(message), CHUNK_BYTES):
            chunk = bytearray(message[first : first + CHUNK_BYTES])
            self._send(torch.frombuffer(chunk, dtype=torch.uint8), _MESSAGE_TAG)

    def receive(self) -> bytes:
        """The message that the other side sends; TransferError where it announces none."""
        frame = torch.zeros(_FRAME_BYTES, dtype=torch.uint8, device="cpu")
        begun = self._receive(frame, _MESSAGE_TAG).numpy().tobytes()
        (length,) = _LENGTH.unpack_from(begun)
        if not 1 <= length <= MAX_MESSAGE_BYTES:
            raise TransferError(
                f"a message of {length} bytes is announced; accepted: from 1 to {MAX_MESSAGE_BYTES}"
            )
        chunks: list[Any] = [begun[_LENGTH.size : _LENGTH.size + length]]
        for first in range(len(chunks[0]), length, CHUNK_BYTES):
            chunk = torch.empty(min(CHUNK_BYTES, length - first), dtype=torch.uint8, device="cpu")
            chunks.append(self._receive(chunk, _MESSAGE_TAG).numpy())
        return b"".join(chunks)

    def receive_later(self) -> "Future[bytes]":
        """The message that the other side will send, or the error that ends the wait for it."""
        future: Future[bytes] = Future()

        def target() -> None:
            try:
                future.set_result(self.receive())
            except BaseException as error:
                future.set_exception(error)

        Thread(target=target, name="hand-over, message", daemon=True).start()
        return future

    def send_values(self, values: dict[str, Any]) -> None:
        """Send values that JSON knows, under a checksum."""
        text = json.dumps(values).encode()
        self.send(hashlib.sha256(text).digest() + text)

    def send_piece(self, piece: Tensor) -> None:
        """Send [bytes] uint8 in host memory, after its length."""
        self._send(torch.tensor([len(piece)], dtype=torch.int64, device="cpu"), _PIECE_TAG)
        self._send(piece, _PIECE_TAG)

    def receive_piece(self, piece: Tensor) -> None:
        """Fill [bytes] uint8 in host memory; TransferError where the piece that comes is of another length.

        gloo ends the process where more bytes come than are expected, so the length is asked for first.
        """
        length = int(self._receive(torch.empty(1, dtype=torch.int64, device="cpu"), _PIECE_TAG))
        if length != len(piece):
            raise TransferError(f"a piece is of {length} bytes; accepted: {len(piece)}")
        self._receive(piece, _PIECE_TAG)

    def close(self) -> None:
        """End the group; a peer that still waits loses it at once. `STORE_KEYS` stay in the store."""
        with suppress(RuntimeError):
            self._group.shutdown()
        del self._group

    def _send(self, tensor: Tensor, tag: int) -> None:
        self._group.send([tensor], 1 - self._side, tag).wait(self._timeout())

    def _receive(self, tensor: Tensor, tag: int) -> Tensor:
        self._group.recv([tensor], 1 - self._side, tag).wait(self._timeout())
        return tensor

    def _timeout(self, num_waits: int = 1) -> timedelta:
        """Remaining time / number of waits; never 0, which torch takes for "no timeout"."""
        return timedelta(seconds=max(0.001, self._remaining_s() / num_waits))


def values_of(message: bytes, keys: set[str]) -> dict[str, Any]:
    """The values that `PairLink.send_values` sent.

    Raises:
        RefusedError: the message says why the peer has ended the hand-over: {"failure": reason}.
        TransferError: it is no such message, or not of exactly these keys.
    """
    check_not_refused(message)
    if not _is_sealed(message):
        raise TransferError("a message of the hand-over was altered on its way")
    try:
        return dict(json_object("message", json.loads(message[_SEAL_BYTES:]), keys))
    except (ValueError, RecursionError) as error:
        raise TransferError(f"a message of the hand-over is malformed: {shown(str(error))}") from error


def check_not_refused(message: bytes) -> None:
    """RefusedError where the message says why the peer has ended the hand-over."""
    if len(message) > _MAX_REFUSAL_BYTES or not _is_sealed(message):
        return
    found = None
    with suppress(ValueError, RecursionError):
        found = json.loads(message[_SEAL_BYTES:])
    if isinstance(found, dict) and found.keys() == {"failure"}:
        raise RefusedError(str(found["failure"])[:_MAX_REASON_LETTERS])


def _is_sealed(message: bytes) -> bool:
    return hashlib.sha256(message[_SEAL_BYTES:]).digest() == message[:_SEAL_BYTES]


def await_key(
    store: Store, key: str, remaining_s: Callable[[], float], check: Callable[[], None] = lambda: None
) -> None:
    """Wait for a key; calls `check` every `_GLANCE_S`, which raises to end the wait.

    The store is asked again and again: torch writes warnings where a wait of the store's own ends in vain.

    Raises a RuntimeError when the time is over, and DistNetworkError where the store is lost.
    """
    pause_s, began = _SHORTEST_PAUSE_S, time.monotonic()
    glanced = began
    while not store.check([key]):
        left_s = remaining_s()
        if left_s <= 0.001:
            raise RuntimeError("the time is over")
        now = time.monotonic()
        if now - began < _SPIN_S:  # asking the store is a pause by itself
            time.sleep(1e-6)
            continue
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        if now - glanced > _GLANCE_S:
            check()
            glanced = time.monotonic()
