"""Bytes between one rank of a replica and one rank of another: a process group of these two ranks."""

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from .format import TransferError

_DATA_TAG, _RECEIPT_TAG = 0, 1
PIECE_BYTES = 64 << 20
"""The size of the pieces that bytes go in: a receiver allocates one piece more than has arrived."""
STORE_KEYS = ("here/0", "here/1", "0/0", "0/1")
"""The keys that a link leaves in its store: each side is there, and gloo's addresses."""
_NUM_CONNECTION_ATTEMPTS = 5
"""How often gloo tries to connect; each attempt may take the whole timeout that gloo is given."""


class PairLink:
    """Sends bytes from a rank of the source to a rank of the destination, in host memory, over gloo.

    Not over nccl, also where the pools are on a GPU. Both sides make the bytes, and compute their checksum,
    in host memory. And torch's watchdog ends a process whose nccl peer is lost, but a lost hand-over must be
    a miss.

    Every method raises a RuntimeError of torch when the peer is lost or the time is over.
    """

    def __init__(self, store: Store, side: int, remaining_s: Callable[[], float]) -> None:
        """Blocks until the other side is there and connected.

        Args:
            store: of this link alone.
            side: 0 at the source, 1 at the destination.
            remaining_s: returns the seconds that the link may still take in all.
        """
        self._side = side
        self._remaining_s = remaining_s
        # Each attempt of gloo gets only a share of the time, so the other side must be there by then.
        store.set(f"here/{side}", "")
        store.wait([f"here/{1 - side}"], self._timeout())
        self._group: Any = dist.ProcessGroupGloo(store, side, 2, self._timeout(_NUM_CONNECTION_ATTEMPTS))

    def send(self, data: bytes) -> None:
        """Send `data`; returns once the other side has all of it."""
        self._send(torch.tensor([len(data)], dtype=torch.int64, device="cpu"), _DATA_TAG)
        for first in range(0, len(data), PIECE_BYTES):
            piece = bytearray(data[first : first + PIECE_BYTES])
            self._send(torch.frombuffer(piece, dtype=torch.uint8), _DATA_TAG)
        self._receive(torch.empty(1, dtype=torch.int64, device="cpu"), _RECEIPT_TAG)

    def receive(self) -> bytes:
        """The bytes that the other side sends; TransferError where it announces none."""
        announced = self._receive(torch.empty(1, dtype=torch.int64, device="cpu"), _DATA_TAG)
        length, pieces = int(announced), []
        if length < 1:
            raise TransferError(f"an export of {length} bytes is announced; accepted: at least 1")
        for first in range(0, length, PIECE_BYTES):
            piece = torch.empty(min(PIECE_BYTES, length - first), dtype=torch.uint8, device="cpu")
            pieces.append(self._receive(piece, _DATA_TAG).numpy())
        self._send(announced, _RECEIPT_TAG)
        return b"".join(pieces)

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
