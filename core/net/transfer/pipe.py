"""What carries the pieces of a hand-over from one rank to another."""

from typing import Protocol

import torch
from torch import Tensor

from .link import PairLink


class Passage(Protocol):
    """A piece on its way."""

    def is_launched(self) -> bool:
        """Whether the pipe can be given the next piece; raises where it failed."""
        ...

    def is_done(self) -> bool:
        """Whether the piece has left this rank or arrived; raises where it never will."""
        ...


class Pipe(Protocol):
    """Carries pieces between two ranks, in order. A peer that is lost is found by the caller's clock.

    The pieces are staging memory: a pipe whose peer is lost may write to a piece until the pipe is closed.
    """

    def send(self, piece: Tensor, packed: torch.cuda.Event | None) -> Passage:
        """Begin to send [bytes] uint8; `packed` is when the bytes are there, None for now."""
        ...

    def receive(self, piece: Tensor, free: torch.cuda.Event | None) -> Passage:
        """Begin to fill [bytes] uint8; `free` is when the memory may be written, None for now."""
        ...

    def close(self) -> bool:
        """End the pipe; whether nothing writes to any piece from now on. Takes seconds at most."""
        ...


class Done:
    """A piece that has arrived."""

    def is_launched(self) -> bool:
        return True

    def is_done(self) -> bool:
        return True


class GlooPipe:
    """Carries pieces through host memory, over the link of the two ranks; each call blocks."""

    def __init__(self, link: PairLink) -> None:
        self._link = link

    def send(self, piece: Tensor, packed: torch.cuda.Event | None) -> Passage:
        del packed  # on the current stream, as the copy to the CPU
        self._link.send_piece(piece.cpu())
        return Done()

    def receive(self, piece: Tensor, free: torch.cuda.Event | None) -> Passage:
        del free
        host = piece if piece.device.type == "cpu" else torch.empty_like(piece, device="cpu")
        self._link.receive_piece(host)
        if host is not piece:
            piece.copy_(host)
        return Done()

    def close(self) -> bool:
        return True
