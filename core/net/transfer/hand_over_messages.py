"""The messages of a hand-over, and the rank at the other end of a connection.

Every rank of the destination has a listener, whose address it writes to the store under the name of the
hand-over. Every rank of the source connects to all of them. One hand-over, for each pair of ranks:

    source -> destination   Offer: the prefixes that the source has, and which part of the model is its own
    destination -> source   PieceRequest: the blocks and states that the destination lacks and has room for
    source -> destination   the pieces, over NCCL or as messages; both sides compute which these are
    source -> destination   Checksums: the checksum of each piece
    destination -> source   Received: all pieces have arrived whole

Either side may end it with a Refusal, as does a source that waited in vain.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import msgspec

from ..message_sockets import Address, Link, PeerLostError
from .format import Count, Size, TensorPart, TransferError
from .pipe import MessagePipe, NcclFacts, NcclPipe

PROTOCOL_VERSION = 3
MAX_REASON_LETTERS = 2000


class Endpoint(msgspec.Struct):
    """What a rank of the destination writes to the store."""

    protocol: int
    address: Address
    ranks: Size


class Offer(msgspec.Struct, tag=True, frozen=True):
    """The prefixes of one rank of the source, without their tensors."""

    rank: Count
    ranks: Size  # of the source
    prefixes: bytes  # an encoded `Description`
    nccl: NcclFacts | None  # None to do without


class PieceRequest(msgspec.Struct, tag=True, frozen=True):
    """What the destination asks for; nodes of the offer, to be sent in this order."""

    part: dict[str, TensorPart] | None = None  # of the model; None for nothing
    blocks: list[Count] = []
    states: list[Count] = []
    over_nccl: bool = False  # else as messages
    nccl_id: bytes = b""  # of the communicator to make; empty to use the one that is there


class Piece(msgspec.Struct, tag=True, frozen=True):
    """A piece; its bytes are the payload."""


class Acknowledged(msgspec.Struct, tag=True, frozen=True):
    """One more piece has arrived."""


class Checksums(msgspec.Struct, tag=True, frozen=True):
    """The checksums of all pieces."""

    values: list[int]


class Received(msgspec.Struct, tag=True, frozen=True):
    """All pieces have arrived whole."""


class Refusal(msgspec.Struct, tag=True, frozen=True):
    """The sender ends the hand-over."""

    reason: str


Message = Offer | PieceRequest | Piece | Acknowledged | Checksums | Received | Refusal


class Peer:
    """A rank of the other side, over its connection."""

    def __init__(
        self, name: str, send: Callable[..., None], is_connected: Callable[[], bool], link: Link | None = None
    ) -> None:
        self.name, self.send, self.is_connected, self.link = name, send, is_connected, link
        self.inbox: deque[Message] = deque()
        self.has_offer = False  # of this hand-over, over this connection
        self.message_pipe = MessagePipe(lambda piece: send(Piece(), piece), lambda: send(Acknowledged()))
        self.nccl_pipe: NcclPipe | None = None  # for this hand-over and the next ones

    def take(self, message: Message, payload: memoryview | None) -> None:
        if isinstance(message, Piece):
            self.message_pipe.arrived.append(payload or memoryview(b""))
        elif isinstance(message, Acknowledged):
            self.message_pipe.num_acknowledged += 1
        else:
            self.inbox.append(message)

    def check_not_refused(self) -> None:
        for message in self.inbox:
            if isinstance(message, Refusal):
                raise TransferError(f"{self.name}: {message.reason[:MAX_REASON_LETTERS]}")

    def take_last_messages(self) -> None:
        """Receive what came before the connection was closed; TransferError where that is a refusal."""
        if self.link is not None:
            with suppress(PeerLostError):
                while (arrival := self.link.receive(0.0)) is not None:
                    self.take(*arrival)
        self.check_not_refused()

    @contextmanager
    def named(self) -> Iterator[None]:
        """Errors of the connection become a TransferError that names the peer."""
        try:
            yield
        except TransferError:
            raise
        except (RuntimeError, PeerLostError) as error:
            self.take_last_messages()
            raise TransferError(f"{self.name} was lost: {error}") from error
