"""One rank of a replica with one rank of another: a process group of the two, outside all others."""

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from .prefix_format import TransferError

_ANNOUNCED, _RECEIVED = 0, 1  # tags
PIECE_BYTES = 64 << 20
"""Bytes go in pieces of this size, so that a receiver never takes much more memory than what has come."""
KEYS = ("here/0", "here/1", "0/0", "0/1")
"""What a link leaves in its store: that each side is about to connect, and, by gloo, their addresses."""
_ATTEMPTS = 5
"""How often gloo tries to connect, each time for as long as it is given."""


class HandoverLink:
    """Bytes from the source's rank to the destination's, in host memory, over gloo.

    Not nccl, also where the pools are on a GPU: bytes are made, and their checksum compared, in host memory
    on both sides, and by default torch's watchdog ends a process whose nccl peer is lost, where a lost
    hand-over must be a miss. RuntimeError, from torch, when the peer is lost or `remaining_s` is over.

    Args:
        store: of this link alone.
        rank: 0 of the source, 1 of the destination.
        remaining_s: how long the link may still take, in all.
    """

    def __init__(self, store: Store, rank: int, remaining_s: Callable[[], float]) -> None:
        self._rank = rank
        self._remaining_s = remaining_s
        # Gloo gets a share of the time, so the other side must be there by then.
        store.set(f"here/{rank}", "")
        store.wait([f"here/{1 - rank}"], self._timeout())
        self._group: Any = dist.ProcessGroupGloo(store, rank, 2, self._timeout(_ATTEMPTS))

    def send(self, data: bytes) -> None:
        """Returns once the other side has all of it."""
        self._send(torch.tensor([len(data)], dtype=torch.int64), _ANNOUNCED)
        for first in range(0, len(data), PIECE_BYTES):
            piece = bytearray(data[first : first + PIECE_BYTES])
            self._send(torch.frombuffer(piece, dtype=torch.uint8), _ANNOUNCED)
        self._receive(torch.empty(1, dtype=torch.int64), _RECEIVED)

    def receive(self) -> bytes:
        size = self._receive(torch.empty(1, dtype=torch.int64), _ANNOUNCED)
        length, pieces = int(size), []
        if length < 1:
            raise TransferError(f"an export of {length} bytes is announced; accepted: at least 1")
        for first in range(0, length, PIECE_BYTES):
            piece = torch.empty(min(PIECE_BYTES, length - first), dtype=torch.uint8)
            pieces.append(self._receive(piece, _ANNOUNCED).numpy())
        self._send(size, _RECEIVED)
        return b"".join(pieces)

    def close(self) -> None:
        """Ends the group; the peer, if it still waits, loses it at once. Its `KEYS` stay in the store."""
        with suppress(RuntimeError):
            self._group.shutdown()
        del self._group

    def _send(self, tensor: Tensor, tag: int) -> None:
        self._group.send([tensor], 1 - self._rank, tag).wait(self._timeout())

    def _receive(self, tensor: Tensor, tag: int) -> Tensor:
        self._group.recv([tensor], 1 - self._rank, tag).wait(self._timeout())
        return tensor

    def _timeout(self, times: int = 1) -> timedelta:
        """What is left for each of so many waits; never 0, which would mean for ever."""
        return timedelta(seconds=max(0.001, self._remaining_s() / times))
