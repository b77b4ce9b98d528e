"""Cached prefixes from one running replica to another, once or again and again.

Every rank of the destination has a listener, whose address it writes to the store under the name of the
hand-over. Every rank of the source connects to all of them. One hand-over, for each pair of ranks:

    source -> destination   Offer: the prefixes that the source has, and which part of the model is its own
    destination -> source   Want: the blocks and states that the destination lacks and has room for
    source -> destination   the pieces, over NCCL or as messages; both sides compute which these are
    source -> destination   Sums: the checksum of each piece
    destination -> source   Arrived: all pieces have arrived whole

Either side may end it with a Refusal. A source that waited in vain withdraws its offer.
"""

import json
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from threading import Thread
from types import TracebackType
from typing import Any, Literal

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from ...inference.engines.dynamic_engine import DynamicInferenceEngine
from ...parallel_groups import ParallelGroups
from ...validation import LONGEST_TIMEOUT_S, instance, integers, real, shown
from ..all_ranks import described
from ..channel import Address, Link, Listener, PeerLostError
from .cache_access import CacheAccess
from .export import PrefixName, chosen_states, forest_of
from .forest import TOKEN_BYTES, PrefixForest
from .format import PrefixFormat, TransferError
from .import_ import CopyError, import_filled
from .nccl_pipe import NcclFacts, NcclPipe, nccl_facts
from .parts import Shard, json_object, shard_from_json, shard_of, shard_to_json
from .pieces import PartCopies, PieceLayout
from .placement import ImportReport, Placement
from .shard import sources_for
from .staging import MessagePipe, Pipe, PoolGate, Staging, Wait, receive_pieces, send_pieces

logger = logging.getLogger(__name__)
Side = Literal["source", "destination"]
States = Literal["deepest", "all"]
Transport = Literal["nccl", "messages"]
PROTOCOL_VERSION = 2
GRACE_S = 1.0
"""How long after the deadline a call still waits for its thread, which can say what failed."""
_LOOK_S = 0.1
_SPIN_S = 0.01
_MAX_REASON_LETTERS = 2000
_leaked: list[Any] = []  # staging that a pipe may still write to: it is never used again


class Offer(msgspec.Struct, tag=True, frozen=True):
    """The prefixes of one rank of the source, without their tensors.

    Attributes:
        protocol: `PROTOCOL_VERSION`.
        turn: names this hand-over of this rank.
        rank, ranks: of the source.
        format, shard: JSON of the format, and of the part of the model that the rank holds.
        nccl: the version of NCCL and the GPU there; None to do without.
        roots, salt_key_id, tokens: of the forest.
        nodes: parents and keys of all nodes, then states, int64.
        num_states: the number of states.
    """

    protocol: int
    turn: str
    rank: int
    ranks: int
    format: bytes
    shard: bytes
    nccl: tuple[str, str] | None
    roots: list[bytes]
    salt_key_id: str
    tokens: bytes
    nodes: bytes
    num_states: int


class Withdrawal(msgspec.Struct, tag=True, frozen=True):
    """The source waits no longer for an answer to the offer of this turn."""

    turn: str


class Want(msgspec.Struct, tag=True, frozen=True):
    """What the destination asks for: rows of blocks and states, of a part of the model; None: nothing."""

    turn: str
    part: bytes | None = None
    blocks: list[int] = []
    states: list[int] = []
    pipe: Literal["messages", "new nccl", "nccl"] = "messages"


class NcclId(msgspec.Struct, tag=True, frozen=True):
    """The id of a communicator that the source makes."""

    id: bytes


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


Message = Offer | Withdrawal | Want | NcclId | Piece | Acknowledged | Sums | Arrived | Refusal


@dataclass(frozen=True)
class SendReport:
    """What this rank sent.

    Attributes:
        prefixes: prefixes that were offered and that no other one of them continues.
        states: states that were offered.
        receivers: ranks that this rank sent something to.
        bytes: bytes of KV and states that this rank sent, to all receivers together.
        seconds: from the first piece that was packed until all had arrived, of all receivers together.
        failure: why not everything arrived; empty where everything did.
    """

    prefixes: int = 0
    states: int = 0
    receivers: int = 0
    bytes: int = 0
    seconds: float = field(default=0.0, compare=False)
    failure: str = ""


class AbsentError(TransferError):
    """A peer did not come; the connections are as good as before."""


class _Peer:
    """A rank of the other side, over its connection.

    Attributes:
        pipe: carries pieces; an NCCL pipe is kept from one hand-over to the next.
    """

    def __init__(self, side: Side, rank: int, send: Callable[..., None]) -> None:
        self.name = f"rank {rank} of the {side}"
        self.rank = rank
        self.send = send
        self.pump: Callable[[float], None] = lambda timeout_s: None  # takes messages; PeerLostError
        self.inbox: deque[Message] = deque()
        self.pipe: Pipe | None = None
        self.begin_messages()

    def begin_messages(self) -> MessagePipe:
        """A new pipe of messages, which the next pieces go to."""
        self.messages = MessagePipe(
            lambda piece: self.send(Piece(), piece), lambda: self.send(Acknowledged())
        )
        return self.messages

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


class _Session:
    """The connections of one rank, from a beginning to the first failure."""

    def __init__(self, store: Store, side: Side, device: torch.device, scrubs: bool) -> None:
        self.store, self.side, self.device = store, side, device
        self.gate = PoolGate()
        self.staging = Staging(device, scrubs)
        self.deadline = 0.0
        self.timeout_s = 0.0
        self.listener: Listener | None = None  # at the destination
        self.peers: dict[bytes, _Peer] = {}  # by address at the source, by connection at the destination
        self.links: dict[bytes, Link] = {}  # at the source
        self.offers: dict[int, tuple[bytes, Offer]] = {}  # at the destination: rank -> newest offer
        self.transport: Transport | None = None

    def remaining_s(self) -> float:
        return self.deadline - time.monotonic()

    def check_time(self, error: Callable[[], Exception]) -> None:
        """Raise where the caller has given up, or `error` where the time is over."""
        if self.gate.closed:
            raise TransferError("the hand-over was given up")
        if self.remaining_s() <= 0:
            raise error()

    def late(self) -> Exception:
        return RuntimeError(f"no piece came or went within {self.timeout_s:g} s")

    def waiter(self, peer: _Peer) -> Wait:
        """Waits for a condition as long as the peer and the clock let it."""

        def wait_for(condition: Callable[[], bool]) -> None:
            polls = isinstance(peer.pipe, NcclPipe)
            began = time.monotonic()
            while not condition():
                self.check_time(self.late)
                peer.pump(0.0 if polls else _LOOK_S)
                if polls:
                    time.sleep(1e-6 if time.monotonic() - began < _SPIN_S else 2e-4)
                peer.check_not_refused()

        return wait_for

    def expect[T](self, peer: _Peer, kind: type[T]) -> T:
        """The next message of a peer, which must be of this kind."""
        while not peer.inbox:
            self.check_time(self.late)
            peer.pump(min(_LOOK_S, max(0.0, self.remaining_s())))
        peer.check_not_refused()
        message = peer.inbox.popleft()
        if not isinstance(message, kind):
            raise TransferError(f"{peer.name} sent {shown(message)[:200]}; accepted: {kind.__name__}")
        return message

    def nccl_pipe(self, peer: _Peer, renew: bool) -> None:
        """Make or keep the NCCL pipe to a peer; both sides call it."""
        if renew or not isinstance(peer.pipe, NcclPipe):
            side = int(self.side == "destination")
            peer.pipe = NcclPipe(
                self.device, side, lambda data: peer.send(NcclId(data)), lambda: self.expect(peer, NcclId).id,
                self.remaining_s,
            )  # fmt: skip

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

        Thread(target=target, name=f"hand-over, {self.side}", daemon=True).start()
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

    def drop(self, peers: Iterable[bytes], reason: str = "") -> None:
        """End connections; the peers get the reason."""
        for name in list(peers):
            peer = self.peers.pop(name)
            if reason:
                with suppress(Exception):
                    peer.send(Refusal(reason[:_MAX_REASON_LETTERS]))
            if (link := self.links.pop(name, None)) is not None:
                link.close()
            if peer.pipe is not None and not peer.pipe.close():
                _leaked.append(self.staging)
                self.staging = Staging(self.device, self.staging._scrubs)

    def close(self, reason: str = "") -> Thread:
        """End all connections, and the listener; the thread waits until peers have read."""
        names = list(self.peers)
        self.drop(names, reason)
        if self.staging not in _leaked:
            self.staging.scrub()
        end = Thread(target=self._close_listener, args=[names], name="hand-over, end", daemon=True)
        end.start()
        return end

    def _close_listener(self, names: list[bytes]) -> None:
        listener, self.listener = self.listener, None
        if listener is not None:
            until = time.monotonic() + GRACE_S
            while any(map(listener.is_connected, names)) and time.monotonic() < until:
                time.sleep(0.01)
            listener.close()


class _Source(_Session):
    """The source's rank: connects to every rank of the destination."""

    def connect(self) -> None:
        """Connect with all ranks of the destination, unless that is done; their newest addresses count."""
        first, count = self._address(0)
        addresses = [first, *(self._address(rank)[0] for rank in range(1, count))]
        wanted = [address.to_bytes() for address in addresses]
        self.drop([name for name in self.peers if name not in wanted or not self.links[name].is_connected()])
        for rank, (name, address) in enumerate(zip(wanted, addresses, strict=True)):
            if name not in self.peers:
                try:
                    link = Link(address, Message, max(0.001, min(5.0, self.remaining_s())))
                except PeerLostError as error:
                    raise _Unreachable(f"rank {rank} of the destination was lost: {error}") from error
                self.links[name] = link
                self.peers[name] = peer = _Peer("destination", rank, link.send)
                peer.pump = _pump_of(peer, link)
        self.peers = {name: self.peers[name] for name in wanted}
        self.transport = self.transport or "messages"

    def _address(self, rank: int) -> tuple[Address, int]:
        """The address of a rank of the destination, and how many ranks there are."""
        data = _awaited(self.store, f"{rank}", self, f"rank {rank} of the destination")
        try:
            found = json_object("address", json.loads(data), {"protocol", "address", "ranks"})
            if found["protocol"] != PROTOCOL_VERSION:
                raise ValueError(
                    f"protocol is {shown(found['protocol'])}; accepted: {PROTOCOL_VERSION}, of the release "
                    "of mambaslots here"
                )
            (count,) = integers("ranks", [found["ranks"]], 1)
            return Address.from_bytes(json.dumps(found["address"]).encode()), count
        except (ValueError, RecursionError) as error:
            text = f"rank {rank} of the destination is no rank of a hand-over: {error}"
            raise TransferError(text) from error

    def send(self, access: CacheAccess, offered: "_Offered", nccl: NcclFacts | None) -> SendReport:
        """Offer prefixes to all ranks of the destination, and send what they want."""
        offer = offered.message(access, uuid.uuid4().hex, nccl)
        answers = self._answers(offer)
        num_bytes, receivers, seconds, transports = 0, 0, 0.0, set[Transport]()
        for peer, answer in answers:
            if answer.part is None:
                continue
            with peer.named():
                blocks, slots = offered.rows_of(answer)
                begin = time.perf_counter()
                num_bytes += self._send_part(access, peer, answer, offered.form, blocks, slots)
                seconds += time.perf_counter() - begin
                receivers += 1
                transports.add("messages" if answer.pipe == "messages" else "nccl")
        self.transport = "messages" if "messages" in transports or not transports else "nccl"
        forest = offered.forest
        return SendReport(len(forest.leaves), len(forest.states), receivers, num_bytes, seconds)

    def _answers(self, offer: Offer) -> list[tuple[_Peer, Want]]:
        """Offer to all ranks until all have answered; a destination that begins anew gets the offer anew."""
        offered: set[bytes] = set()
        answered: dict[bytes, Want] = {}
        looked = 0.0
        while True:
            try:
                if time.monotonic() - looked > _LOOK_S:
                    self.connect()
                    looked = time.monotonic()
                for name in self.peers.keys() - offered:
                    self.peers[name].inbox.clear()
                    self.peers[name].send(offer)
                    offered.add(name)
            except (_Unreachable, PeerLostError) as error:
                if answered or self.remaining_s() <= 0 or self.gate.closed:
                    raise TransferError(str(error)) from error
                looked = 0.0
                time.sleep(0.02)
                continue
            for name, peer in list(self.peers.items()):
                if name in answered:
                    continue
                try:
                    peer.pump(0.02)
                except PeerLostError as error:
                    if answered or self.links[name].is_connected():  # it has sent an invalid message
                        raise TransferError(f"{peer.name} was lost: {error}") from error
                if peer.inbox:
                    answered[name] = self.expect(peer, Want)
            if self.peers.keys() <= answered.keys():
                return [(peer, answered[name]) for name, peer in self.peers.items()]
            absent = next(peer.name for name, peer in self.peers.items() if name not in answered)
            try:
                self.check_time(partial(AbsentError, f"{absent} did not come in {self.timeout_s:g} s"))
            except AbsentError:
                for peer in self.peers.values():
                    with suppress(PeerLostError):
                        peer.send(Withdrawal(offer.turn))
                if answered:
                    raise TransferError(f"{absent} was lost: it did not answer") from None
                raise

    def _send_part(
        self,
        access: CacheAccess,
        peer: _Peer,
        answer: Want,
        form: PrefixFormat,
        blocks: list[int],
        slots: list[int],
    ) -> int:
        part = _part_in(answer.part or b"", form)
        if any(not _contains(held, part[name]) for name, held in shard_of(access.spec).items()):
            raise TransferError(f"{peer.name} asks for another part of the model than this rank holds")
        copies = PartCopies(access, part)
        layout = PieceLayout(form, part, len(blocks), len(slots))
        if answer.pipe == "messages":
            pipe: Pipe = peer.begin_messages()
        else:
            self.nccl_pipe(peer, answer.pipe == "new nccl")
            assert peer.pipe is not None
            pipe = peer.pipe
        with self.staging.on_stream():
            copies.locate(blocks, slots)
        wait_for = self.waiter(peer)
        sums, under_way = send_pieces(pipe, layout, copies, self.staging, self.gate, wait_for)
        peer.send(Sums(sums))
        for passage in under_way:
            wait_for(passage.is_done)
        self.staging.scrub()
        self.expect(peer, Arrived)
        return layout.num_bytes


class _Destination(_Session):
    """The destination's rank: listens for all ranks of the source."""

    def listen(self, ranks: ParallelGroups) -> None:
        """Make the listener, and publish its address."""
        if self.listener is None:
            self.listener = Listener(Message)
            address = msgspec.to_builtins(self.listener.address)
            text = json.dumps({"protocol": PROTOCOL_VERSION, "address": address, "ranks": ranks.size})
            self.store.set(f"{ranks.rank}", text)

    def collect(self, access: CacheAccess) -> tuple[PrefixFormat, PrefixForest, str]:
        """Wait for an offer of each rank of the source; the format and the forest of all."""
        self.listen(access.parallel)
        assert self.listener is not None
        while True:
            self._pump(0.0)
            for name, offer in list(self.offers.values()):
                if not self.listener.is_connected(name):
                    self.offers.pop(offer.rank)
            count = self.offers[0][1].ranks if 0 in self.offers else 1
            missing = [rank for rank in range(count) if rank not in self.offers]
            if not missing:
                break
            absent = f"rank {missing[0]} of the source did not come in {self.timeout_s:g} s"
            self.check_time(partial(AbsentError, absent))
            self._pump(min(_LOOK_S, max(0.0, self.remaining_s())))
        self.taken = [self.offers.pop(rank) for rank in range(count)]
        form = PrefixFormat.of(access)
        forests = [_forest_in(form, offer) for _, offer in self.taken]
        if any(forest.digest != forests[0].digest for forest in forests):
            raise TransferError("ranks of the source offer different prefixes; accepted: the same of all")
        return form, forests[0], ""

    def fill(self, access: CacheAccess, placement: Placement, nccl: NcclFacts | None) -> None:
        """Ask the source for the blocks and states of a placement, and copy them into the pools."""
        form, own = PrefixFormat.of(access), shard_of(access.spec)
        shards = [_part_in(offer.shard, form) for _, offer in self.taken]
        parts = sources_for(shards, own)
        blocks, slots = placement.new_blocks, placement.new_slots
        used = []
        for index, (name, offer) in enumerate(self.taken):
            peer = self.peers[name]
            with peer.named():
                if index not in parts:
                    peer.send(Want(offer.turn))
                    continue
                both = _fit(nccl, offer.nccl)
                kept: Literal["nccl", "new nccl"] = "nccl" if isinstance(peer.pipe, NcclPipe) else "new nccl"
                pipe = kept if both else "messages"
                part = json.dumps(shard_to_json(parts[index])).encode()
                if pipe == "messages":
                    peer.begin_messages()
                peer.send(Want(offer.turn, part, list(blocks), list(slots), pipe))
                used.append((peer, parts[index], pipe))
        for peer, part_of, pipe in used:
            copies = PartCopies(access, part_of)
            layout = PieceLayout(form, part_of, len(blocks), len(slots))
            with peer.named():
                if pipe != "messages":
                    self.nccl_pipe(peer, pipe == "new nccl")
                with self.staging.on_stream():
                    copies.locate(list(blocks.values()), list(slots.values()))
                carrier: Any = peer.messages if pipe == "messages" else peer.pipe
                sums = receive_pieces(carrier, layout, copies, self.staging, self.gate, self.waiter(peer))
                self.staging.scrub()
                if self.expect(peer, Sums).values != sums:
                    raise TransferError(
                        f"pieces from {peer.name} have other checksums than it says: they were altered on "
                        "their way"
                    )
                peer.send(Arrived())
        self.transport = "nccl" if used and all(pipe != "messages" for *_, pipe in used) else "messages"

    def _pump(self, timeout_s: float) -> None:
        """Take what has come, of all peers."""
        assert self.listener is not None
        while (found := self.listener.receive(timeout_s)) is not None:
            name, message, payload = found
            timeout_s = 0.0
            if isinstance(message, Offer):
                if name not in self.peers:
                    self.peers[name] = _Peer("source", message.rank, partial(self.listener.send, name))
                    self.peers[name].pump = self._pump_of(name)
                self.peers[name].inbox.clear()
                self.offers[message.rank] = name, message
                if message.protocol != PROTOCOL_VERSION:
                    del self.offers[message.rank]
            elif isinstance(message, Withdrawal):
                taken = [rank for rank, (_, offer) in self.offers.items() if offer.turn == message.turn]
                for rank in taken:
                    del self.offers[rank]
            elif name in self.peers:
                self.peers[name].take(message, payload)

    def _pump_of(self, name: bytes) -> Callable[[float], None]:
        looked = 0.0

        def pump(timeout_s: float) -> None:
            nonlocal looked
            peer, listener = self.peers[name], self.listener
            assert listener is not None
            self._pump(timeout_s)
            if time.monotonic() - looked >= _LOOK_S and not peer.inbox and not peer.messages.arrived:
                looked = time.monotonic()
                if not listener.is_connected(name):
                    self._pump(0.0)
                    if not peer.inbox and not peer.messages.arrived:
                        raise PeerLostError("its connection is closed")

        return pump


class _Unreachable(Exception):  # noqa: N818 - never leaves this file
    """A rank of the destination is gone, and perhaps begins anew."""


def _pump_of(peer: _Peer, link: Link) -> Callable[[float], None]:
    def pump(timeout_s: float) -> None:
        if (found := link.receive(timeout_s)) is not None:
            peer.take(*found)

    return pump


def _awaited(store: Store, key: str, session: _Session, what: str) -> bytes:
    """The value of a key of the store, which may come yet."""
    try:
        while not store.check([key]):
            session.check_time(lambda: AbsentError(f"{what} did not come in {session.timeout_s:g} s"))
            time.sleep(0.01)
        return bytes(store.get(key))
    except RuntimeError as error:
        raise TransferError(f"the store was lost: {error}") from error


@dataclass(frozen=True, eq=False)
class _Offered:
    """Cached prefixes of the source; `blocks`: node -> block; `slots`: node -> slot, of `forest.states`."""

    form: PrefixFormat
    forest: PrefixForest
    blocks: list[int]
    slots: dict[int, int]

    @classmethod
    def of(cls, access: CacheAccess, prefixes: Iterable[PrefixName] | None, states: str) -> "_Offered":
        """The offer of `chosen_states`; ValueError as in `export_prefixes`, and for other `states`."""
        if not isinstance(states, str) or states not in ("deepest", "all"):
            raise ValueError(f"states is {shown(states)}; accepted: one of deepest, all")
        form = PrefixFormat.of(access)
        state_slots = chosen_states(access, prefixes, states)
        blocks, forest = forest_of(access, list(state_slots))
        return cls(form, forest, blocks, dict(zip(forest.states, state_slots.values(), strict=True)))

    def message(self, access: CacheAccess, turn: str, nccl: NcclFacts | None) -> Offer:
        forest = self.forest
        nodes = np.array([*forest.parents, *forest.keys, *forest.states], dtype="<i8").tobytes()
        return Offer(
            PROTOCOL_VERSION, turn, access.parallel.rank, access.parallel.size,
            json.dumps(self.form.to_json()).encode(),
            json.dumps(shard_to_json(shard_of(access.spec))).encode(),
            None if nccl is None else (nccl.version, nccl.gpu),
            list(forest.roots), forest.salt_key_id, b"".join(forest.tokens), nodes, len(forest.states),
        )  # fmt: skip

    def rows_of(self, answer: Want) -> tuple[list[int], list[int]]:
        """The blocks and slots of the nodes that a receiver asks for; TransferError for no such nodes."""
        limits = {"blocks": (answer.blocks, len(self.forest)), "states": (answer.states, len(self.slots))}
        for name, (found, limit) in limits.items():
            try:
                integers(name, found, 0, max(0, len(self.forest) - 1))
            except ValueError as error:
                raise TransferError(f"the receiver asks for what was not offered: {error}") from error
            if len(set(found)) < len(found) or len(found) > limit:
                raise TransferError(
                    f"the receiver asks for {len(found)} {name}; accepted: each of {limit} once"
                )
        unknown = set(answer.states) - self.slots.keys()
        if unknown:
            raise TransferError(f"the receiver asks for states of {sorted(unknown)}; accepted: offered ones")
        return [self.blocks[node] for node in answer.blocks], [self.slots[node] for node in answer.states]


def _forest_in(own: PrefixFormat, offer: Offer) -> PrefixForest:
    """The forest of an offer, whose format must be `own`; TransferError for a bad offer."""
    try:
        PrefixFormat.from_json(json.loads(offer.format)).check_fits(own)
        numbers = np.frombuffer(offer.nodes, dtype="<i8").tolist()
        width = TOKEN_BYTES * own.block_size_tokens
        num_nodes = len(offer.tokens) // width
        if len(numbers) != 2 * num_nodes + offer.num_states or len(offer.tokens) % width:
            raise TransferError(f"the offer has {len(numbers)} numbers for {num_nodes} blocks")
        forest = PrefixForest(
            block_size_tokens=own.block_size_tokens,
            roots=tuple(offer.roots),
            salt_key_id=offer.salt_key_id,
            parents=tuple(numbers[:num_nodes]),
            tokens=tuple(offer.tokens[first : first + width] for first in range(0, len(offer.tokens), width)),
            states=tuple(numbers[2 * num_nodes :]),
        )
    except TransferError:
        raise
    except (ValueError, RecursionError) as error:
        raise TransferError(f"the offer is malformed: {error}") from error
    forest.check(own.vocab_size)
    if tuple(numbers[num_nodes : 2 * num_nodes]) != forest.keys:
        raise TransferError("hashes of an offer are not those of its roots and tokens")
    return forest


def _part_in(data: bytes, form: PrefixFormat) -> Shard:
    """The part of a model that a peer names; TransferError for what is none."""
    try:
        part = shard_from_json(json.loads(data))
    except (ValueError, RecursionError) as error:
        raise TransferError(f"the part of the model is malformed: {error}") from error
    form.check_shard(part)
    return part


def _fit(one: NcclFacts | None, other: tuple[str, str] | None) -> bool:
    """Whether two ranks can be a communicator of NCCL: one version, and a GPU each."""
    return one is not None and other is not None and one.version == other[0] and one.gpu != other[1]


def _contains(held: Any, part: Any) -> bool:
    """Whether a rank that holds `held` of a tensor holds `part`, too."""
    return all(a.start <= b.start and b.stop <= a.stop for a, b in zip(held, part, strict=True) if b.count)


def _check_timeout(parallel: ParallelGroups, timeout_s: float) -> float:
    """The timeout; ValueError where a group of the replica, in which ranks wait for each other, has a
    shorter one."""
    timeout_s = real("timeout_s", timeout_s, 1e-3, LONGEST_TIMEOUT_S)
    for name, group in (("tensor", parallel.tensor), ("pipeline", parallel.pipeline)):
        if group is None or dist.get_world_size(group) == 1:
            continue
        for device in group._device_types:
            options = getattr(group._get_backend(device), "options", None)
            limit = getattr(options, "_timeout", None)
            if isinstance(limit, timedelta) and timeout_s + GRACE_S >= limit.total_seconds():
                limit_s = limit.total_seconds()
                raise ValueError(
                    f"timeout_s is {timeout_s:g}; accepted: less than {limit_s - GRACE_S:g}, because the "
                    f"{name} group, in which the replica's ranks wait for each other, has a timeout of "
                    f"{limit_s:g} s"
                )
    return timeout_s


class TransferChannel:
    """Hands cached prefixes from a source to a destination, again and again.

    Every rank of both replicas makes one, under one name. The first call connects them, and the connections
    live on: a communicator of NCCL takes hundreds of milliseconds. A hand-over that fails ends them, and the
    next call makes them anew. The channel is a context manager.

    Each call is made between steps. A thread does the work, and the call ends at most about two seconds after
    its timeout, whatever a peer or the store does. Connections are encrypted, and only processes that can
    read the store can make them.
    """

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        store: Store,
        name: str,
        side: Side,
        *,
        timeout_s: float = 60.0,
        transport: Transport | None = None,
    ) -> None:
        """Connects nothing yet.

        Args:
            engine: of this rank.
            store: a client of a store that both replicas reach and that outlives them, for instance a
                TCPStore of another process. It is not cloned, because a new connection may wait for a name
                server.
            name: of this channel alone; not of a hand-over or a channel that was closed.
            side: "source" or "destination".
            timeout_s: of a call that gives none, in seconds; as in `send`.
            transport: "messages" for host memory also between GPUs; None or "nccl" for NCCL between two ranks
                with a GPU each and nccl4py, and else messages.

        Raises:
            ValueError: a bad argument; or as in `export_prefixes` for the engine.
            RuntimeError: the engine is in a step, suspended, or broken by a step that failed.
        """
        if not isinstance(side, str) or side not in ("source", "destination"):
            raise ValueError(f"side is {shown(side)}; accepted: 'source' or 'destination'")
        if transport not in (None, "nccl", "messages"):
            raise ValueError(f"transport is {shown(transport)}; accepted: 'nccl', 'messages' or None")
        access = CacheAccess.of(engine, "TransferChannel")
        if not isinstance(name, str) or not name:
            raise ValueError(f"name is {shown(name)}; accepted: a str that names this hand-over alone")
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"name is {shown(name)}; accepted: a str that UTF-8 can encode") from error
        self._store = PrefixStore(f"mambaslots/handover/{name}", instance("store", store, Store))
        self._timeout_s = _check_timeout(access.parallel, timeout_s)
        shard_of(access.spec)  # what each call will need
        PrefixFormat.of(access)
        self._engine, self._name, self._side = engine, name, side
        self._nccl = None if transport == "messages" else nccl_facts(access.spec.device)
        self._session: _Session | None = None
        self._closed = False
        self._rank = access.parallel.rank

    @property
    def transport(self) -> str:
        """ "nccl" or "messages": that of the last hand-over, or before that what this rank would take."""
        used = None if self._session is None else self._session.transport
        return used or ("nccl" if self._nccl is not None else "messages")

    def connect(self, *, timeout_s: float | None = None) -> str:
        """Meet the other side, so that the next hand-over need not; why that failed, or an empty text."""
        access = self._open("connect", None)
        try:
            session = self._begin(access, timeout_s)
            if isinstance(session, _Source):
                session.in_time(session.connect)
            else:
                session.in_time(lambda: session.listen(access.parallel))  # type: ignore[attr-defined]
        except TransferError as error:
            self._fail("was not connected", error, error)
            return described(error)
        except _Unreachable as error:
            self._fail("was not connected", error, error)
            return described(error)
        return ""

    def send(
        self,
        prefixes: Iterable[PrefixName] | None = None,
        *,
        states: States = "deepest",
        timeout_s: float | None = None,
    ) -> SendReport:
        """Hand cached prefixes of this replica to the other one, which calls `receive`.

        Only what the receiver lacks and has room for is sent. A hand-over that fails raises nothing: a peer
        does not come, dies, or has another model. The failure is logged as a warning and reported.

        Args:
            prefixes: as in `export_prefixes`; None for all that are cached, with all states.
            states: of each of `prefixes`, the "deepest" cached state, from which a request resumes, or "all".
            timeout_s: the time to meet and to send, in seconds; None for the channel's.

        Raises:
            ValueError: the channel is of the other side; a bad argument; or as in `export_prefixes`; or
                `timeout_s` is not below the timeout of this replica's own process groups (those of gloo and
                nccl are known), in which ranks that are done wait for the last rank.
            RuntimeError: as in `export_prefixes`; or the channel is closed.
        """
        access = self._open("send", "source")
        offered = _Offered.of(access, prefixes, states)
        session = self._begin(access, timeout_s)
        assert isinstance(session, _Source)
        try:
            return session.in_time(lambda: session.send(access, offered, self._nccl))
        except Exception as error:
            self._fail("was not sent", error, error)
            return SendReport(failure=described(error))

    def receive(self, *, timeout_s: float | None = None) -> ImportReport:
        """Import what the other side sends.

        Either every rank imports its part, or none does; see `import_prefixes`. A hand-over that fails is a
        miss: a rank does not get its part in time and whole. Then nothing new is found, the failure is logged
        as a warning and reported, and the engines serve on. Hits may be lost: to make room, the cache may
        have evicted the least recently used.

        Args:
            timeout_s: the time to meet and to receive, in seconds; None for the channel's. The ranks of this
                replica wait for each other twice more. These waits end with the timeout of the replica's own
                process groups.

        Returns:
            As `import_prefixes`; `failure` says why a hand-over failed.

        Raises:
            ValueError: on every rank, where an argument is wrong on any rank; or the channel is of the other
                side; or as in `import_prefixes` for the engine; or `timeout_s` as in `send`.
            RuntimeError: as in `import_prefixes` for the engine; or the channel is closed.

        A failure within this replica, for instance a lost rank, is no miss: it raises, because ranks may then
        differ.
        """
        return _receive(self._open("receive", "destination"), lambda: self, timeout_s)

    def close(self) -> None:
        """End the channel on this rank; its name is of no use any more."""
        self._closed = True
        self._drop()

        def forget() -> None:
            with suppress(RuntimeError):
                self._store.delete_key(f"{self._rank}")

        if self._side == "destination":
            thread = Thread(target=forget, name="hand-over, end", daemon=True)
            thread.start()
            thread.join(GRACE_S)

    def __enter__(self) -> "TransferChannel":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, call: str, side: Side | None) -> CacheAccess:
        if side is not None and side != self._side:
            raise ValueError(f"side is {self._side!r}; accepted: {side!r}, which alone calls {call}")
        if self._closed:
            raise RuntimeError(f"{call} is called on a channel that was closed")
        return CacheAccess.of(self._engine, call)

    def _begin(self, access: CacheAccess, timeout_s: float | None) -> _Session:
        """Start the clock of a call."""
        timeout_s = _check_timeout(access.parallel, self._timeout_s if timeout_s is None else timeout_s)
        if self._session is None:
            kind = _Source if self._side == "source" else _Destination
            self._session = kind(self._store, self._side, access.spec.device, access.scrubs)
        self._session.timeout_s, self._session.deadline = timeout_s, time.monotonic() + timeout_s
        return self._session

    def _fail(self, what: str, error: Exception, cause: BaseException) -> None:
        unforeseen = cause if not isinstance(cause, TransferError) else None
        logger.warning("mambaslots: hand-over %r %s: %s", self._name, what, error, exc_info=unforeseen)
        if not isinstance(cause, AbsentError):
            self._drop(described(error))

    def _drop(self, reason: str = "") -> None:
        """End the connections; the next call makes them anew."""
        session, self._session = self._session, None
        if session is not None and not session.gate.closed:
            session.gate.close()
            session.close(reason)


def send_prefixes(
    engine: DynamicInferenceEngine,
    store: Store,
    name: str,
    prefixes: Iterable[PrefixName] | None = None,
    *,
    states: States = "deepest",
    timeout_s: float = 60.0,
) -> SendReport:
    """Hand cached prefixes to the replica that receives `name`: a `TransferChannel` used once.

    Every rank of the source calls this, between steps, while every rank of the destination calls
    `receive_prefixes`. The arguments, the report and the errors are those of `TransferChannel` and its
    `send`; `name` is of this hand-over alone.
    """
    with TransferChannel(engine, store, name, "source", timeout_s=timeout_s) as channel:
        return channel.send(prefixes, states=states)


def receive_prefixes(
    engine: DynamicInferenceEngine, store: Store, name: str, *, timeout_s: float = 60.0
) -> ImportReport:
    """Import the prefixes that the replica which sends `name` has cached: a `TransferChannel` used once.

    Every rank of the destination calls this, between steps. The source may be split in another way. The
    arguments, the report and the errors are those of `TransferChannel` and its `receive`.
    """
    channels: list[TransferChannel] = []

    def opened() -> TransferChannel:
        channels.append(TransferChannel(engine, store, name, "destination", timeout_s=timeout_s))
        return channels[0]

    try:
        return _receive(CacheAccess.of(engine, "receive_prefixes"), opened, None)
    finally:
        for channel in channels:
            channel.close()


def _receive(
    access: CacheAccess, channel_of: Callable[[], TransferChannel], timeout_s: float | None
) -> ImportReport:
    """As `TransferChannel.receive`; all ranks learn of an error that `channel_of` raises on one of them."""
    channels: list[TransferChannel] = []

    def prepare() -> Callable[[], tuple[PrefixFormat, PrefixForest, str]]:
        channel = channel_of()
        session = channel._begin(access, timeout_s)
        channels.append(channel)
        assert isinstance(session, _Destination)
        return lambda: session.in_time(lambda: session.collect(access))

    def fill(placement: Placement) -> None:
        session = channels[0]._session
        assert isinstance(session, _Destination)
        session.in_time(lambda: session.fill(access, placement, channels[0]._nccl))

    try:
        return import_filled(access, prepare, fill)
    except (TransferError, CopyError) as error:
        for channel in channels:
            channel._fail("was not received", error, error.__cause__ or error)
        return ImportReport(failure=described(error))
    except BaseException as error:
        for channel in channels:
            channel._drop(described(error))
        raise
