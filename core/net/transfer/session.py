"""The two sides of a hand-over: every rank of the source, and every rank of the destination."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import wait as await_futures
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import Any, NamedTuple

import msgspec
from torch.distributed import Store  # type: ignore[attr-defined]

from ...devices import on_device_of
from ...validation import refused, shown
from ..message_sockets import Address, Link, Listener, PeerLostError
from . import hand_over_messages as messages
from .exports import CacheAccess
from .format import Description, TransferError, check_shard, decode, shard_of
from .hand_over_messages import Offer, Peer, PieceRequest
from .pieces import PartCopies, PieceLayout, PoolLease, Staging, receive_pieces, send_pieces
from .pipe import MessagePipe, NcclFacts, NcclPipe, new_nccl_id
from .placement import Placement
from .shard import sources_for

GRACE_S = 1.0  # how long after the deadline a call still waits for its thread, which can say what failed
_POLL_INTERVAL_S = 0.1
_ABSENT = "-"  # never the value of a key
_SPIN_S = 0.01
_leaked: list[Any] = []  # staging that a pipe may still write to: it is never used again


class Session[Key](ABC):
    """The connections of one rank, until the first failure."""

    nccl_rank: int  # of the side, in a communicator

    def __init__(self, store: Store, nccl: NcclFacts | None, access: CacheAccess, timeout_s: float) -> None:
        """Begin the first call. `nccl`: what this rank can use; None to do without."""
        self.store, self.nccl, self.device = store, nccl, access.spec.device
        self.lease = PoolLease()
        self.staging = Staging(self.device, scrubs=access.engine.config.free_memory == "zero")
        self.peers: dict[Key, Peer] = {}  # by address at the source, by connection at the destination
        self.transport = ""  # "nccl" or "messages", by which pieces went last
        self.num_bytes = 0  # of the last hand-over
        self.begin(access, timeout_s)

    def begin(self, access: CacheAccess, timeout_s: float) -> None:
        """Start the clock of a call."""
        self.access, self.timeout_s, self.deadline = access, timeout_s, time.monotonic() + timeout_s
        for peer in self.peers.values():
            peer.has_offer = False

    @abstractmethod
    def receive_messages(self, peer: Peer, timeout_s: float) -> None:
        """Wait for messages; PeerLostError where `peer` is gone and all its messages were received."""

    def remaining_s(self) -> float:
        return self.deadline - time.monotonic()

    def check_deadline(self, absent: str = "") -> None:
        """Raise where the caller has given up, or no time remains; `absent` did not come in time."""
        if self.lease.is_revoked:
            raise TransferError("the hand-over was given up")
        if self.remaining_s() <= 0:
            if absent:
                raise TransferError(f"{absent} did not come in {self.timeout_s:g} s")
            raise RuntimeError(f"no piece came or went within {self.timeout_s:g} s")

    def wait_for(self, condition: Callable[[], bool], peer: Peer, over_nccl: bool = False) -> None:
        """Wait for a condition as long as the peer and the clock let it; what NCCL does is polled."""
        began = time.monotonic()
        while not condition():
            self.check_deadline()
            timeout_s = 0.0 if over_nccl else min(_POLL_INTERVAL_S, max(0.0, self.remaining_s()))
            self.receive_messages(peer, timeout_s)
            if over_nccl:
                time.sleep(1e-6 if time.monotonic() - began < _SPIN_S else 2e-4)
            peer.check_not_refused()

    def expect[T](self, peer: Peer, kind: type[T]) -> T:
        """The next message of a peer, which must be of this kind."""
        self.wait_for(lambda: bool(peer.inbox), peer)
        peer.check_not_refused()
        message = peer.inbox.popleft()
        if not isinstance(message, kind):
            raise TransferError(f"{peer.name} sent {shown(message)[:200]}; accepted: {kind.__name__}")
        return message

    def exchange[T](
        self, move: Callable[..., T], peer: Peer, request: PieceRequest, blocks: list[int], slots: list[int]
    ) -> T:
        """`send_pieces` or `receive_pieces` of what `request` names, between these blocks and slots."""
        pipe: MessagePipe | NcclPipe | None = peer.message_pipe
        if request.over_nccl:
            if request.nccl_id:
                peer.nccl_pipe = NcclPipe(self.device, self.nccl_rank, request.nccl_id, self.remaining_s)
            if (pipe := peer.nccl_pipe) is None:
                raise TransferError(f"{peer.name} asks for a communicator that was not made")
        layout = PieceLayout(self.access.format(), request.part or {}, len(blocks), len(slots))
        with self.staging.on_stream():
            copies = PartCopies(self.access, request.part or {}, blocks, slots)
        wait_for = partial(self.wait_for, peer=peer, over_nccl=request.over_nccl)
        moved = move(pipe, layout, copies, self.staging, self.lease, wait_for)
        self.transport = "nccl" if request.over_nccl else "messages"
        self.num_bytes += sum(layout.sizes)
        return moved

    def run_until_deadline[T](self, work: Callable[[], T]) -> T:
        """Do `work` in a thread; return or raise its outcome, at most `GRACE_S` after the deadline.

        A thread that is not done by then touches no pool any more, and ends the session itself.
        """
        outcome: Future[T] = Future()
        self.staging.wait_for_engine()

        def run() -> None:
            try:
                with on_device_of(self.device):
                    settle = partial(outcome.set_result, work())
            except BaseException as error:
                settle = partial(outcome.set_exception, error)
            try:
                settle()
            except InvalidStateError:  # it was given up
                self.close()

        Thread(target=run, name="hand-over", daemon=True).start()
        try:
            await_futures([outcome], max(0.0, self.remaining_s()) + GRACE_S)
        finally:
            if given_up := outcome.cancel():
                self.lease.revoke()
            self.staging.make_engine_wait()
        if given_up:
            raise TransferError(f"the store or a peer stopped answering; gave up after {self.timeout_s:g} s")
        return outcome.result()

    def disconnect(self, peers: Iterable[Key], reason: str = "") -> None:
        """End connections; the peers get the reason."""
        for key in list(peers):
            peer = self.peers.pop(key)
            if reason:
                with suppress(Exception):
                    peer.send(messages.Refusal(reason[: messages.MAX_REASON_LETTERS]))
            if peer.link is not None:
                peer.link.close()
            if peer.nccl_pipe is not None and not peer.nccl_pipe.close():
                _leaked.append(self.staging)
                self.staging = Staging(self.device, scrubs=self.staging.scrubs)

    def close(self, reason: str = "") -> None:
        """End all connections."""
        self.disconnect(self.peers, reason)
        self.staging.scrub()

    def end(self, reason: str) -> None:
        """Close, unless the thread of a call that was given up does."""
        if not self.lease.is_revoked:
            self.lease.revoke()
            self.close(reason)


class OfferedPrefixes(NamedTuple):
    """Cached prefixes of the source; `blocks`: node -> block; `slots`: node -> slot, of `forest.states`."""

    description: Description
    blocks: dict[int, int]
    slots: dict[int, int]


class Source(Session[Address]):
    """The source's rank: connects to every rank of the destination."""

    nccl_rank = 1

    def connect(self) -> None:
        """Connect to all ranks, where they are now; PeerLostError: one is lost, TransferError: it refused."""
        first = self._endpoint(0)
        addresses = [first.address, *(self._endpoint(rank).address for rank in range(1, first.ranks))]
        self._end_lost(addresses)
        for rank, address in enumerate(addresses):
            name = f"rank {rank} of the destination"
            if address not in self.peers:
                try:
                    link = Link(address, messages.Message, max(0.001, min(5.0, self.remaining_s())))
                except PeerLostError as error:
                    raise PeerLostError(f"{name} was lost: {error}") from error
                self.peers[address] = Peer(name, link.send, link.is_connected, link)

    def _end_lost(self, addresses: Container[Address]) -> None:
        """End lost connections, and those to other addresses; TransferError: a peer has refused the offer."""
        for address, peer in list(self.peers.items()):
            if address not in addresses or not peer.is_connected():
                if peer.has_offer:
                    peer.take_last_messages()
                self.disconnect([address])

    def receive_messages(self, peer: Peer, timeout_s: float) -> None:
        assert peer.link is not None
        if (arrival := peer.link.receive(timeout_s)) is not None:
            peer.take(*arrival)

    def _endpoint(self, rank: int) -> messages.Endpoint:
        """What a rank of the destination has written, or will have."""
        name = f"rank {rank} of the destination"
        try:  # one call, which waits for no key: the destination deletes its own as it closes
            while (data := bytes(self.store.compare_set(f"{rank}", _ABSENT, _ABSENT))) == _ABSENT.encode():
                self.check_deadline(name)
                self._end_lost(self.peers)
                time.sleep(0.01)
        except RuntimeError as error:
            raise TransferError(f"the store was lost: {error}") from error
        try:
            fields = msgspec.json.decode(data)
            if fields["protocol"] != messages.PROTOCOL_VERSION:
                accepted = f"{messages.PROTOCOL_VERSION}, of the release of mambaslots here"
                raise refused("protocol", fields["protocol"], accepted)
            return msgspec.convert(fields, messages.Endpoint)
        except (msgspec.MsgspecError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise TransferError(f"{name} is no rank of a hand-over: {error}") from error

    def send(self, offered: OfferedPrefixes) -> tuple[int, int, float]:
        """Offer prefixes, send what is wanted; returns the receivers, and the bytes and seconds of all."""
        groups = self.access.spec.groups
        prefixes = msgspec.msgpack.encode(offered.description)
        answers = self._answers(Offer(groups.rank, groups.size, prefixes, self.nccl))
        requests = [(peer, request) for peer, request in answers if request.part is not None]
        self.num_bytes = 0
        seconds = 0.0
        for peer, request in requests:
            with peer.named():
                begin = time.perf_counter()
                self._send_part(peer, request, offered)
                seconds += time.perf_counter() - begin
        return len(requests), self.num_bytes, seconds

    def _answers(self, offer: Offer) -> list[tuple[Peer, PieceRequest]]:
        """Offer to all ranks until all have answered; a destination that starts again gets the offer anew."""
        answers: dict[Peer, PieceRequest] = {}
        while not self.peers or len(answers) < len(self.peers):
            try:
                self.connect()
                if lost := answers.keys() - set(self.peers.values()):
                    raise TransferError(f"{lost.pop().name} was lost after its answer")
                for peer in self.peers.values():
                    if not peer.has_offer:
                        peer.inbox.clear()
                        peer.send(offer)
                        peer.has_offer = True
            except PeerLostError as error:
                if answers or self.remaining_s() <= 0 or self.lease.is_revoked:
                    raise TransferError(str(error)) from error
                time.sleep(0.02)
                continue
            for peer in set(self.peers.values()) - answers.keys():
                try:
                    self.receive_messages(peer, _POLL_INTERVAL_S / len(self.peers))
                except PeerLostError as error:
                    if answers or peer.is_connected():  # it has sent an invalid message
                        raise TransferError(f"{peer.name} was lost: {error}") from error
                if peer.inbox:
                    answers[peer] = self.expect(peer, PieceRequest)
                else:
                    self.check_deadline(peer.name)
        return [(peer, answers[peer]) for peer in self.peers.values()]

    def _send_part(self, peer: Peer, request: PieceRequest, offered: OfferedPrefixes) -> None:
        part = request.part or {}
        check_shard(offered.description.format, part)
        sources_for([shard_of(self.access.spec)], part)  # raises for what this rank does not hold
        blocks = _offered("blocks", request.blocks, offered.blocks)
        slots = _offered("states", request.states, offered.slots)
        sums, under_way = self.exchange(send_pieces, peer, request, blocks, slots)
        peer.send(messages.Checksums(sums))
        for passage in under_way:
            self.wait_for(passage.poll_done, peer, request.over_nccl)
        self.staging.scrub()
        self.expect(peer, messages.Received)


def _offered(name: str, nodes: list[int], offered: dict[int, int]) -> list[int]:
    if len(set(nodes)) < len(nodes) or not offered.keys() >= set(nodes):
        raise TransferError(f"the receiver asks for {name} that were not offered, or for one twice")
    return [offered[node] for node in nodes]


class Destination(Session[bytes]):
    """The destination's rank: listens for all ranks of the source."""

    nccl_rank = 0

    def __init__(self, store: Store, nccl: NcclFacts | None, access: CacheAccess, timeout_s: float) -> None:
        super().__init__(store, nccl, access, timeout_s)
        self._listener: Listener | None = None
        self._offers: dict[int, tuple[Peer, Offer]] = {}  # rank -> its newest offer
        self._looked_s = 0.0  # when `receive_messages` last looked whether a peer is connected

    def connect(self) -> None:
        """Make the listener, and publish its address."""
        if self._listener is None:
            self._listener = Listener(messages.Message)
            groups = self.access.spec.groups
            endpoint = messages.Endpoint(messages.PROTOCOL_VERSION, self._listener.address, groups.size)
            self.store.set(f"{groups.rank}", msgspec.json.encode(endpoint).decode())

    def collect(self) -> list[tuple[Peer, Offer, Description]]:
        """Wait for an offer of each rank of the source; all offers, in order of rank and of one forest."""
        self.connect()
        self._take_messages(0.0)
        while (missing := self._missing_rank()) is not None:
            self.check_deadline(f"rank {missing} of the source")
            self._take_messages(min(_POLL_INTERVAL_S, max(0.0, self.remaining_s())))
        newest = [self._offers.pop(rank) for rank in range(self._offers[0][1].ranks)]
        offers = []
        for peer, offer in newest:
            description = decode(offer.prefixes, Description)
            description.format.check_fits(self.access.format())
            description.check()
            offers.append((peer, offer, description))
        if len({description.forest.digest for *_, description in offers}) > 1:
            raise TransferError("ranks of the source offer different prefixes; accepted: the same of all")
        return offers

    def _missing_rank(self) -> int | None:
        """A rank of the source of which no offer is there; None where all have come."""
        self._offers = {rank: pair for rank, pair in self._offers.items() if pair[0].is_connected()}
        count = self._offers[0][1].ranks if 0 in self._offers else 1
        return next((rank for rank in range(count) if rank not in self._offers), None)

    def fill(self, offers: list[tuple[Peer, Offer, Description]], placement: Placement) -> None:
        """Ask the source for the blocks and states of a placement, and copy them into the pools."""
        blocks, slots = placement.new_blocks, placement.new_slots  # by node
        parts = sources_for([description.shard for *_, description in offers], shard_of(self.access.spec))
        requests: list[tuple[Peer, PieceRequest]] = []
        for index, (peer, offer, _) in enumerate(offers):
            with peer.named():
                if index not in parts:
                    peer.send(PieceRequest())
                    continue
                over_nccl = self.nccl is not None and self.nccl.fits(offer.nccl)
                new_id = new_nccl_id() if over_nccl and peer.nccl_pipe is None else b""
                request = PieceRequest(parts[index], list(blocks), list(slots), over_nccl, new_id)
                requests.append((peer, request))
                peer.send(request)
        self.num_bytes = 0
        for peer, request in requests:
            with peer.named():
                places = list(blocks.values()), list(slots.values())
                sums = self.exchange(receive_pieces, peer, request, *places)
                self.staging.scrub()
                if self.expect(peer, messages.Checksums).values != sums:
                    raise TransferError(
                        f"pieces from {peer.name} have other checksums than it says: they were altered on "
                        "their way"
                    )
                peer.send(messages.Received())

    def _take_messages(self, timeout_s: float) -> None:
        """Receive what has come, of all peers."""
        assert self._listener is not None
        while (arrival := self._listener.receive(timeout_s)) is not None:
            connection, message, payload = arrival
            timeout_s = 0.0
            if isinstance(message, Offer):
                if connection not in self.peers:
                    send = partial(self._listener.send, connection)
                    is_connected = partial(self._listener.is_connected, connection)
                    self.peers[connection] = Peer(f"rank {message.rank} of the source", send, is_connected)
                self.peers[connection].inbox.clear()
                self._offers[message.rank] = self.peers[connection], message
            elif (peer := self.peers.get(connection)) is not None:
                if isinstance(message, messages.Refusal):
                    self._offers = {rank: pair for rank, pair in self._offers.items() if pair[0] is not peer}
                peer.take(message, payload)

    def receive_messages(self, peer: Peer, timeout_s: float) -> None:
        self._take_messages(timeout_s)
        is_due = time.monotonic() - self._looked_s >= _POLL_INTERVAL_S
        if is_due and not (peer.inbox or peer.message_pipe.arrived):
            self._looked_s = time.monotonic()
            if not peer.is_connected():
                self._take_messages(0.0)
                if not (peer.inbox or peer.message_pipe.arrived):
                    raise PeerLostError("its connection is closed")

    def close(self, reason: str = "") -> None:
        """End all connections, and the listener, once peers have read the reason or `GRACE_S` is over."""
        refused_peers = list(self.peers) if reason else []
        super().close(reason)
        listener, self._listener = self._listener, None
        if listener is None:
            return
        # Without that wait, bytes that are unread here would reset the connection, and the reason be lost.
        end = time.monotonic() + GRACE_S
        try:
            while any(map(listener.is_connected, refused_peers)) and time.monotonic() < end:
                listener.receive(0.01)
        finally:
            listener.close()
