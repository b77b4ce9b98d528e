"""The two sides of a hand-over, and the messages between them.

Every rank of the destination has a listener, whose address it writes to the store under the name of the
hand-over. Every rank of the source connects to all of them. One hand-over, for each pair of ranks:

    source -> destination   Offer: the prefixes that the source has, and which part of the model is its own
    destination -> source   Want: the blocks and states that the destination lacks and has room for
    source -> destination   the pieces, over NCCL or as messages; both sides compute which these are
    source -> destination   Sums: the checksum of each piece
    destination -> source   Arrived: all pieces have arrived whole

Either side may end it with a Refusal, as does a source that waited in vain.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from threading import Thread
from typing import Any, NamedTuple

import msgspec
import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from ...validation import shown
from ..channel import Address, Link, Listener, PeerLostError
from .export import CacheAccess
from .format import (
    Count,
    Description,
    PrefixForest,
    PrefixFormat,
    Size,
    TensorPart,
    TransferError,
    check_shard,
    decode,
    encode,
    shard_of,
)
from .import_ import Placement
from .pieces import PartCopies, PieceLayout, PoolGate, Staging, Wait, receive_pieces, send_pieces
from .pipe import MessagePipe, NcclFacts, NcclPipe, new_nccl_id
from .shard import sources_for

PROTOCOL_VERSION = 3
GRACE_S = 1.0
"""How long after the deadline a call still waits for its thread, which can say what failed."""
_LOOK_S = 0.1
_SPIN_S = 0.01
_MAX_REASON_LETTERS = 2000
_leaked: list[Any] = []  # staging that a pipe may still write to: it is never used again


class Offer(msgspec.Struct, tag=True, frozen=True):
    """The prefixes of one rank of the source, without their tensors.

    Attributes:
        rank, ranks: of the source.
        prefixes: an encoded `Description`.
        nccl: the version of NCCL and the GPU there; None to do without.
    """

    rank: Count
    ranks: Size
    prefixes: bytes
    nccl: NcclFacts | None


class Want(msgspec.Struct, tag=True, frozen=True):
    """What the destination asks for.

    Attributes:
        part: of the model; None for nothing.
        blocks, states: nodes of the offer, whose rows are to be sent in this order.
        over_nccl: whether pieces go over NCCL, else as messages.
        nccl_id: of the communicator to make; empty to use the one that is there.
    """

    part: dict[str, TensorPart] | None = None
    blocks: list[Count] = []
    states: list[Count] = []
    over_nccl: bool = False
    nccl_id: bytes = b""


class Piece(msgspec.Struct, tag=True, frozen=True):
    """A piece; its bytes are the payload."""


class Acknowledged(msgspec.Struct, tag=True, frozen=True):
    """One more piece has arrived."""


class Sums(msgspec.Struct, tag=True, frozen=True):
    """The checksums of all pieces."""

    values: list[int]


class Arrived(msgspec.Struct, tag=True, frozen=True):
    """All pieces have arrived whole."""


class Refusal(msgspec.Struct, tag=True, frozen=True):
    """The sender ends the hand-over."""

    reason: str


Message = Offer | Want | Piece | Acknowledged | Sums | Arrived | Refusal


class _Point(msgspec.Struct):
    """What a rank of the destination writes to the store."""

    protocol: int
    address: Address
    ranks: Size


class Sent(NamedTuple):
    """Receivers that were sent something, the bytes to all of them, and the seconds that it took."""

    receivers: int
    num_bytes: int
    seconds: float


class AbsentError(TransferError):
    """A peer did not come; the connections are as good as before."""


class _Peer:
    """A rank of the other side, over its connection.

    Attributes:
        messages: carries pieces as messages.
        nccl: carries pieces over NCCL; it is kept from one hand-over to the next.
    """

    def __init__(self, name: str, send: Callable[..., None], link: Link | None = None) -> None:
        self.name, self.send, self.link = name, send, link
        self.inbox: deque[Message] = deque()
        self.messages = MessagePipe(lambda piece: send(Piece(), piece), lambda: send(Acknowledged()))
        self.nccl: NcclPipe | None = None

    def take(self, message: Message, payload: memoryview | None) -> None:
        if isinstance(message, Piece):
            self.messages.arrived.append(payload or memoryview(b""))
        elif isinstance(message, Acknowledged):
            self.messages.num_acknowledged += 1
        else:
            self.inbox.append(message)

    def check_not_refused(self) -> None:
        for message in self.inbox:
            if isinstance(message, Refusal):
                raise TransferError(f"{self.name}: {message.reason[:_MAX_REASON_LETTERS]}")

    @contextmanager
    def named(self) -> Iterator[None]:
        """Errors of the connection become a TransferError that names the peer."""
        try:
            yield
        except TransferError:
            raise
        except (RuntimeError, PeerLostError) as error:
            raise TransferError(f"{self.name} was lost: {error}") from error


class Session[Key]:
    """The connections of one rank, until the first failure.

    Attributes:
        peers: by address at the source, by connection at the destination.
        transport: "nccl" or "messages", of the last hand-over; empty before the first one.
    """

    def __init__(self, store: Store, device: torch.device, scrubs: bool) -> None:
        self.store, self.device = store, device
        self.gate = PoolGate()
        self.staging = Staging(device, scrubs)
        self.deadline = self.timeout_s = 0.0
        self.peers: dict[Key, _Peer] = {}
        self.transport = ""

    def begin(self, timeout_s: float) -> None:
        """Start the clock of a call."""
        self.timeout_s, self.deadline = timeout_s, time.monotonic() + timeout_s

    def connect(self, access: CacheAccess) -> None:
        """Do what need not be done again by later hand-overs."""
        raise NotImplementedError

    def pump(self, peer: _Peer, timeout_s: float) -> None:
        """Wait for messages; PeerLostError where `peer` is gone and all its messages were received."""
        raise NotImplementedError

    def remaining_s(self) -> float:
        return self.deadline - time.monotonic()

    def check_time(self, late: Exception | None = None) -> None:
        """Raise where the caller has given up, or `late` once the time has passed."""
        if self.gate.closed:
            raise TransferError("the hand-over was given up")
        if self.remaining_s() <= 0:
            raise late or RuntimeError(f"no piece came or went within {self.timeout_s:g} s")

    def absent(self, who: str) -> AbsentError:
        return AbsentError(f"{who} did not come in {self.timeout_s:g} s")

    def waiter(self, peer: _Peer, polls: bool) -> Wait:
        """Waits for a condition as long as the peer and the clock let it."""

        def wait_for(condition: Callable[[], bool]) -> None:
            began = time.monotonic()
            while not condition():
                self.check_time()
                self.pump(peer, 0.0 if polls else _LOOK_S)
                if polls:
                    time.sleep(1e-6 if time.monotonic() - began < _SPIN_S else 2e-4)
                peer.check_not_refused()

        return wait_for

    def expect[T](self, peer: _Peer, kind: type[T]) -> T:
        """The next message of a peer, which must be of this kind."""
        while not peer.inbox:
            self.check_time()
            self.pump(peer, min(_LOOK_S, max(0.0, self.remaining_s())))
        peer.check_not_refused()
        message = peer.inbox.popleft()
        if not isinstance(message, kind):
            raise TransferError(f"{peer.name} sent {shown(message)[:200]}; accepted: {kind.__name__}")
        return message

    def pipe_to(self, peer: _Peer, want: Want, rank: int) -> MessagePipe | NcclPipe:
        """What carries the pieces of an answer; both sides call it, `rank` is 0 at one of them."""
        if not want.over_nccl:
            return peer.messages
        if want.nccl_id:
            peer.nccl = NcclPipe(self.device, rank, want.nccl_id, self.remaining_s)
        if peer.nccl is None:
            raise TransferError(f"{peer.name} asks for a communicator that was not made")
        return peer.nccl

    def in_time[T](self, work: Callable[[], T]) -> T:
        """Do `work` in a thread; return or raise its outcome, at most `GRACE_S` after the deadline.

        A store or an NCCL that stops answering keeps no timeout. A thread that is not done by then touches no
        pool any more, and ends the session itself.
        """
        outcome: Future[T] = Future()
        self.staging.follow_engine()

        def target() -> None:
            try:
                with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
                    result = work()
            except BaseException as error:
                outcome.set_exception(error)
            else:
                outcome.set_result(result)
            if self.gate.closed:
                self.close()

        Thread(target=target, name="hand-over", daemon=True).start()
        try:
            wait([outcome], max(0.0, self.remaining_s()) + GRACE_S)
        finally:
            if not outcome.done():
                self.gate.close()
            self.staging.lead_engine()
        if not outcome.done():
            gave_up = f"gave up after {self.timeout_s:g} s"
            raise TransferError(f"the store or a peer stopped answering; {gave_up}")
        return outcome.result()

    def drop(self, peers: Iterable[Key], reason: str = "") -> None:
        """End connections; the peers get the reason."""
        for key in list(peers):
            peer = self.peers.pop(key)
            if reason:
                with suppress(Exception):
                    peer.send(Refusal(reason[:_MAX_REASON_LETTERS]))
            if peer.link is not None:
                peer.link.close()
            if peer.nccl is not None and not peer.nccl.close():
                _leaked.append(self.staging)
                self.staging = Staging(self.device, self.staging.scrubs)

    def close(self, reason: str = "") -> None:
        """End all connections."""
        self.drop(self.peers, reason)
        self.staging.scrub()


class Source(Session[Address]):
    """The source's rank: connects to every rank of the destination."""

    def connect(self, access: CacheAccess) -> None:
        """Connect with all ranks of the destination, unless that is done; their newest addresses count.

        PeerLostError for a rank that is gone, and perhaps starts again.
        """
        first = self._point(0)
        points = [first, *(self._point(rank) for rank in range(1, first.ranks))]
        wanted = [point.address for point in points]
        self.drop(key for key, peer in self.peers.items() if key not in wanted or not _is_connected(peer))
        for rank, address in enumerate(wanted):
            name = f"rank {rank} of the destination"
            if address not in self.peers:
                try:
                    link = Link(address, Message, max(0.001, min(5.0, self.remaining_s())))
                except PeerLostError as error:
                    raise PeerLostError(f"{name} was lost: {error}") from error
                self.peers[address] = _Peer(name, link.send, link)
        self.transport = self.transport or "messages"

    def pump(self, peer: _Peer, timeout_s: float) -> None:
        assert peer.link is not None
        if (found := peer.link.receive(timeout_s)) is not None:
            peer.take(*found)

    def _point(self, rank: int) -> _Point:
        """What a rank of the destination has written, or will have."""
        name = f"rank {rank} of the destination"
        try:
            while not self.store.check([f"{rank}"]):
                self.check_time(self.absent(name))
                time.sleep(0.01)
            data = bytes(self.store.get(f"{rank}"))
        except RuntimeError as error:
            raise TransferError(f"the store was lost: {error}") from error
        try:
            found = msgspec.json.decode(data)
            if found["protocol"] != PROTOCOL_VERSION:
                raise ValueError(
                    f"protocol is {shown(found['protocol'])}; accepted: {PROTOCOL_VERSION}, of the release "
                    "of mambaslots here"
                )
            return msgspec.convert(found, _Point)
        except (msgspec.MsgspecError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise TransferError(f"{name} is no rank of a hand-over: {error}") from error

    def send(self, access: CacheAccess, offered: "Offered", nccl: NcclFacts | None) -> Sent:
        """Offer prefixes to all ranks of the destination, and send what they want."""
        offer = Offer(access.ranks.rank, access.spec.groups.size, encode(offered.description), nccl)
        num_bytes, receivers, seconds, over_nccl = 0, 0, 0.0, set[bool]()
        for peer, want in self._answers(access, offer):
            if want.part is None:
                continue
            with peer.named():
                begin = time.perf_counter()
                num_bytes += self._send_part(access, peer, want, offered)
                seconds += time.perf_counter() - begin
                receivers += 1
                over_nccl.add(want.over_nccl)
        self.transport = "nccl" if over_nccl == {True} else "messages"
        return Sent(receivers, num_bytes, seconds)

    def _answers(self, access: CacheAccess, offer: Offer) -> list[tuple[_Peer, Want]]:
        """Offer to all ranks until all have answered; a destination that starts again gets the offer anew."""
        offered: set[Address] = set()
        answered: dict[Address, Want] = {}
        looked = 0.0
        while not self.peers or not self.peers.keys() <= answered.keys():
            try:
                if time.monotonic() - looked > _LOOK_S:
                    self.connect(access)
                    looked = time.monotonic()
                for key in self.peers.keys() - offered:
                    self.peers[key].inbox.clear()
                    self.peers[key].send(offer)
                    offered.add(key)
            except PeerLostError as error:
                if answered or self.remaining_s() <= 0 or self.gate.closed:
                    raise TransferError(str(error)) from error
                looked = 0.0
                time.sleep(0.02)
                continue
            for key in self.peers.keys() - answered.keys():
                peer = self.peers[key]
                try:
                    self.pump(peer, 0.02)
                except PeerLostError as error:
                    if answered or _is_connected(peer):  # it has sent an invalid message
                        raise TransferError(f"{peer.name} was lost: {error}") from error
                if peer.inbox:
                    answered[key] = self.expect(peer, Want)
                    continue
                try:
                    self.check_time(self.absent(peer.name))
                except AbsentError as error:
                    for other in self.peers.values():
                        with suppress(PeerLostError):
                            other.send(Refusal(str(error)))
                    if answered:
                        raise TransferError(f"{peer.name} was lost: it did not answer") from None
                    raise
        return [(peer, answered[key]) for key, peer in self.peers.items()]

    def _send_part(self, access: CacheAccess, peer: _Peer, want: Want, offered: "Offered") -> int:
        form, part, own = offered.description.format, want.part or {}, shard_of(access.spec)
        check_shard(form, part)
        for name, held in own.items():
            for inner, outer in zip(part[name], held, strict=True):
                if inner.count and not outer.start <= inner.start <= inner.stop <= outer.stop:
                    raise TransferError(f"{peer.name} asks for a part of {name} that this rank does not hold")
        blocks, slots = (
            _rows("blocks", want.blocks, offered.blocks),
            _rows("states", want.states, offered.slots),
        )
        layout = PieceLayout(form, part, len(blocks), len(slots))
        pipe, wait_for = self.pipe_to(peer, want, 1), self.waiter(peer, want.over_nccl)
        with self.staging.on_stream():
            copies = PartCopies(access, part, blocks, slots)
        sums, under_way = send_pieces(pipe, layout, copies, self.staging, self.gate, wait_for)
        peer.send(Sums(sums))
        for passage in under_way:
            wait_for(passage.is_done)
        self.staging.scrub()
        self.expect(peer, Arrived)
        return layout.num_bytes


class Offered(NamedTuple):
    """Cached prefixes of the source; `blocks`: node -> block; `slots`: node -> slot, of `forest.states`."""

    description: Description
    blocks: dict[int, int]
    slots: dict[int, int]


def _rows(name: str, nodes: list[int], offered: dict[int, int]) -> list[int]:
    if len(set(nodes)) < len(nodes) or not offered.keys() >= set(nodes):
        raise TransferError(f"the receiver asks for {name} that were not offered, or for one twice")
    return [offered[node] for node in nodes]


def _is_connected(peer: _Peer) -> bool:
    return peer.link is not None and peer.link.is_connected()


class Destination(Session[bytes]):
    """The destination's rank: listens for all ranks of the source."""

    listener: Listener | None = None

    def __init__(self, store: Store, device: torch.device, scrubs: bool) -> None:
        super().__init__(store, device, scrubs)
        self._offers: dict[int, tuple[bytes, Offer]] = {}  # rank -> connection, newest offer
        self._looked = 0.0

    def connect(self, access: CacheAccess) -> None:
        """Make the listener, and publish its address."""
        if self.listener is None:
            self.listener = Listener(Message)
            point = _Point(PROTOCOL_VERSION, self.listener.address, access.spec.groups.size)
            self.store.set(f"{access.ranks.rank}", msgspec.json.encode(point).decode())

    def collect(self, access: CacheAccess) -> tuple[PrefixFormat, PrefixForest]:
        """Wait for an offer of each rank of the source; the format and the forest of all."""
        self.connect(access)
        assert self.listener is not None
        while True:
            self._take_messages(0.0)
            for name, offer in list(self._offers.values()):
                if not self.listener.is_connected(name):
                    self._offers.pop(offer.rank)
            count = self._offers[0][1].ranks if 0 in self._offers else 1
            missing = next((rank for rank in range(count) if rank not in self._offers), None)
            if missing is None:
                break
            self.check_time(self.absent(f"rank {missing} of the source"))
            self._take_messages(min(_LOOK_S, max(0.0, self.remaining_s())))
        taken = [self._offers.pop(rank) for rank in range(count)]
        self._taken = [(name, offer, decode(offer.prefixes, Description)) for name, offer in taken]
        for *_, description in self._taken:
            description.format.check_fits(access.format())
            description.check()
        (*_, first), *_ = self._taken
        if any(description.forest.digest != first.forest.digest for *_, description in self._taken):
            raise TransferError("ranks of the source offer different prefixes; accepted: the same of all")
        return first.format, first.forest

    def fill(self, access: CacheAccess, placement: Placement, nccl: NcclFacts | None) -> None:
        """Ask the source for the blocks and states of a placement, and copy them into the pools."""
        form, blocks, slots = access.format(), placement.new_blocks, placement.new_slots
        parts = sources_for([description.shard for *_, description in self._taken], shard_of(access.spec))
        asked: list[tuple[_Peer, Want]] = []
        for index, (name, offer, _) in enumerate(self._taken):
            peer, want = self.peers[name], Want()
            with peer.named():
                if index in parts:
                    over_nccl = _fit(nccl, offer.nccl)
                    new_id = new_nccl_id() if over_nccl and peer.nccl is None else b""
                    want = Want(parts[index], list(blocks), list(slots), over_nccl, new_id)
                    asked.append((peer, want))
                peer.send(want)
        for peer, want in asked:
            part = want.part or {}
            layout = PieceLayout(form, part, len(blocks), len(slots))
            with peer.named():
                pipe, wait_for = self.pipe_to(peer, want, 0), self.waiter(peer, want.over_nccl)
                with self.staging.on_stream():
                    copies = PartCopies(access, part, list(blocks.values()), list(slots.values()))
                sums = receive_pieces(pipe, layout, copies, self.staging, self.gate, wait_for)
                self.staging.scrub()
                if self.expect(peer, Sums).values != sums:
                    raise TransferError(
                        f"pieces from {peer.name} have other checksums than it says: they were altered on "
                        "their way"
                    )
                peer.send(Arrived())
        self.transport = "nccl" if asked and all(want.over_nccl for _, want in asked) else "messages"

    def _take_messages(self, timeout_s: float) -> None:
        """Receive what has come, of all peers."""
        assert self.listener is not None
        while (found := self.listener.receive(timeout_s)) is not None:
            name, message, payload = found
            timeout_s = 0.0
            if isinstance(message, Offer):
                if name not in self.peers:
                    send = partial(self.listener.send, name)
                    self.peers[name] = _Peer(f"rank {message.rank} of the source", send)
                self.peers[name].inbox.clear()
                self._offers[message.rank] = name, message
            elif name in self.peers:
                if isinstance(message, Refusal):
                    self._offers = {rank: one for rank, one in self._offers.items() if one[0] != name}
                self.peers[name].take(message, payload)

    def pump(self, peer: _Peer, timeout_s: float) -> None:
        self._take_messages(timeout_s)
        if time.monotonic() - self._looked >= _LOOK_S and not peer.inbox and not peer.messages.arrived:
            self._looked = time.monotonic()
            assert self.listener is not None
            name = next(name for name, other in self.peers.items() if other is peer)
            if not self.listener.is_connected(name):
                self._take_messages(0.0)
                if not peer.inbox and not peer.messages.arrived:
                    raise PeerLostError("its connection is closed")

    def close(self, reason: str = "") -> None:
        """End all connections, and the listener once the peers have read, in a thread."""
        names = list(self.peers)
        super().close(reason)
        listener, self.listener = self.listener, None
        if listener is not None:
            Thread(target=_close_listener, args=[listener, names], name="hand-over, end", daemon=True).start()


def _close_listener(listener: Listener, names: list[bytes]) -> None:
    until = time.monotonic() + GRACE_S
    while any(map(listener.is_connected, names)) and time.monotonic() < until:
        time.sleep(0.01)
    listener.close()


def _fit(one: NcclFacts | None, other: NcclFacts | None) -> bool:
    """Whether two ranks can be a communicator of NCCL: one version, and a GPU each."""
    return one is not None and other is not None and one.version == other.version and one.gpu != other.gpu
