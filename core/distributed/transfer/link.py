"""Messages between one rank of a replica and one rank of another: a gloo group of these two ranks."""

import hashlib
import json
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistNetworkError, Store  # type: ignore[attr-defined]

from ...validation import shown
from .format import TransferError
from .parts import json_object

_MESSAGE_TAG, _PIECE_TAG = 0, 1
CHUNK_BYTES = 64 << 20
"""The size of the chunks that a message goes in: a receiver allocates one chunk more than has arrived."""
MAX_MESSAGE_BYTES = 1 << 32
STORE_KEYS = ("here/0", "here/1", "0/0", "0/1")
"""The keys that a link leaves in its store: each side is there, and gloo's addresses."""
_NUM_CONNECTION_ATTEMPTS = 5
"""How often gloo tries to connect; each attempt may take the whole timeout that gloo is given."""
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
        self._send(torch.tensor([len(message)], dtype=torch.int64, device="cpu"), _MESSAGE_TAG)
        for first in range(0, len(message), CHUNK_BYTES):
            chunk = bytearray(message[first : first + CHUNK_BYTES])
            self._send(torch.frombuffer(chunk, dtype=torch.uint8), _MESSAGE_TAG)

    def receive(self) -> bytes:
        """The message that the other side sends; TransferError where it announces none."""
        announced = self._receive(torch.empty(1, dtype=torch.int64, device="cpu"), _MESSAGE_TAG)
        length, chunks = int(announced), []
        if not 1 <= length <= MAX_MESSAGE_BYTES:
            raise TransferError(
                f"a message of {length} bytes is announced; accepted: from 1 to {MAX_MESSAGE_BYTES}"
            )
        for first in range(0, length, CHUNK_BYTES):
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
        """Send [bytes] uint8 in host memory, without a length."""
        self._send(piece, _PIECE_TAG)

    def receive_piece(self, piece: Tensor) -> None:
        """Fill [bytes] uint8 in host memory with what `send_piece` sends, which is as long."""
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
    digest, text = message[:32], message[32:]
    if hashlib.sha256(text).digest() != digest:
        raise TransferError("a message of the hand-over was altered on its way")
    try:
        found = json.loads(text)
        if isinstance(found, dict) and found.keys() == {"failure"}:
            raise RefusedError(str(found["failure"]))
        return dict(json_object("message", found, keys))
    except RefusedError:
        raise
    except (ValueError, RecursionError) as error:
        raise TransferError(f"a message of the hand-over is malformed: {shown(str(error))}") from error


def await_key(
    store: Store, key: str, remaining_s: Callable[[], float], check: Callable[[], None] = lambda: None
) -> None:
    """Wait for a key; calls `check` every `_GLANCE_S`, which raises to end the wait.

    Raises a RuntimeError of torch when the time is over, and DistNetworkError where the store is lost.
    """
    while True:
        left_s = remaining_s()
        try:
            store.wait([key], timedelta(seconds=max(0.001, min(left_s, _GLANCE_S))))
            return
        except DistNetworkError:
            raise
        except RuntimeError:
            if left_s <= _GLANCE_S:
                raise
        check()
