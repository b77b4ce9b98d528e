"""Hand-overs between two replicas of one rank each: two threads of this process, over a TCP store."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import mambaslots as ms
import msgspec
import pytest
import torch
import torch.distributed as dist
import zmq
from mambaslots.net.message_sockets import Link, Listener, PeerLostError
from mambaslots.net.transfer import hand_over_messages, pieces, session
from mambaslots.net.transfer.format import TransferError
from mambaslots.net.transfer.hand_over import SendReport
from mambaslots.net.transfer.pieces import PartCopies
from mambaslots.net.transfer.pipe import MessagePipe
from mambaslots.net.transfer.placement import ImportReport, Placement
from oracle.fresh_process import Begun
from oracle.serving import random_tokens, serve_checked
from oracle.transfers import engine_of, maps_of, receive_once, send_once

PROMPTS = [random_tokens(40, 1), random_tokens(30, 2)]
MINUTE = timedelta(seconds=60)


@pytest.fixture
def host() -> Any:
    """The store that outlives both."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=MINUTE)


@pytest.fixture
def source() -> ms.DynamicInferenceEngine:
    engine = engine_of()
    serve_checked(engine, PROMPTS)
    return engine


def client(host: Any) -> Any:
    return dist.TCPStore("127.0.0.1", host.port, is_master=False, timeout=MINUTE)


def left_over(host: Any) -> list[str]:
    return [key for key in host.list_keys() if "handover" in key]


def both(
    host: Any, source: ms.DynamicInferenceEngine, target: ms.DynamicInferenceEngine, timeout_s: float = 20.0
) -> tuple[SendReport, ImportReport]:
    stores = client(host), client(host)  # first: a new connection may wait 5 s for a name server
    with ThreadPoolExecutor(2) as threads:
        sent = threads.submit(send_once, source, stores[0], "a to b", timeout_s=timeout_s)
        received = threads.submit(receive_once, target, stores[1], "a to b", timeout_s=timeout_s)
        return sent.result(), received.result()


@pytest.mark.usefixtures("kind")
def test_a_warm_replica_fills_a_cold_one(host: Any) -> None:
    source, target = engine_of(), engine_of()
    serve_checked(source, PROMPTS)
    sent, received = both(host, source, target)
    assert (sent.failure, received.failure) == ("", "")
    assert (sent.prefixes, sent.states) == (received.imported.prefixes, received.imported.states)
    assert sent.receivers == 1
    assert sent.bytes > 0
    target.context.check_integrity()
    assert min(result.num_resumed_tokens for result in serve_checked(target, PROMPTS)) > 0
    assert left_over(host) == []


def test_a_replica_with_nothing_to_give(host: Any) -> None:
    sent, received = both(host, engine_of(), engine_of())
    assert received == ImportReport()
    assert sent.failure == ""
    assert left_over(host) == []


def missed(
    host: Any, source: ms.DynamicInferenceEngine, target: ms.DynamicInferenceEngine, timeout_s: float = 20.0
) -> tuple[str, str]:
    """Both failures; the receiver has nothing new, and serves on."""
    before = maps_of(target)
    sent, received = both(host, source, target, timeout_s)
    assert received == ImportReport(failure=received.failure)
    assert received.failure
    assert maps_of(target) == before
    target.context.check_integrity()
    serve_checked(target, PROMPTS)
    serve_checked(source, PROMPTS)
    return sent.failure, received.failure


def test_other_weights(
    host: Any, source: ms.DynamicInferenceEngine, caplog: pytest.LogCaptureFixture
) -> None:
    failures = missed(host, source, engine_of(weights_version="weights 2"))
    for failure in failures:
        assert "weights_version is 'weights 1'; accepted: 'weights 2'" in failure
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert left_over(host) == []


def test_a_refusal_is_read_though_the_connection_is_closed_by_then(
    host: Any, source: ms.DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The destination refuses and closes while the source reads the destination's address again."""
    asked_again, endpoint, decode = threading.Event(), session.Source._endpoint, session.decode

    def endpoint_after_the_end(self: session.Source, rank: int) -> hand_over_messages.Endpoint:
        if self.peers:
            asked_again.set()
            while any(peer.is_connected() for peer in self.peers.values()):
                self.check_deadline("the refusal")
                time.sleep(0.001)
        return endpoint(self, rank)

    def decode_late(*arguments: Any) -> Any:
        assert asked_again.wait(20)
        return decode(*arguments)

    monkeypatch.setattr(session.Source, "_endpoint", endpoint_after_the_end)
    monkeypatch.setattr(session, "decode", decode_late)
    for failure in missed(host, source, engine_of(weights_version="weights 2"), timeout_s=5.0):
        assert "weights_version is 'weights 1'; accepted: 'weights 2'" in failure


def test_a_destination_that_refuses_closes_once_the_source_has_read_why(
    host: Any, source: ms.DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that are unread where a connection is closed reset it, and what the peer has not read is lost."""
    has_read, closed_after = threading.Event(), list[bool]()
    take, close = hand_over_messages.Peer.take, Listener.close

    def take_late(peer: hand_over_messages.Peer, message: Any, payload: Any) -> None:
        if isinstance(message, hand_over_messages.Refusal):
            time.sleep(0.1)
            has_read.set()
        take(peer, message, payload)

    def close_and_note(listener: Listener) -> None:
        closed_after.append(has_read.is_set())
        close(listener)

    monkeypatch.setattr(hand_over_messages.Peer, "take", take_late)
    monkeypatch.setattr(Listener, "close", close_and_note)
    missed(host, source, engine_of(weights_version="weights 2"))
    assert closed_after == [True]


@pytest.mark.parametrize("protocol", [1, 2, None, "3", True])
def test_another_protocol_is_refused_by_name(
    host: Any, source: ms.DynamicInferenceEngine, protocol: object
) -> None:
    """The messages of another release may mean something else."""
    address = {"protocol": protocol, "address": {}, "ranks": 1}
    client(host).set("mambaslots/handover/a to b/0", json.dumps(address))
    failure = send_once(source, client(host), "a to b", timeout_s=5.0).failure
    text = f"rank 0 of the destination is no rank of a hand-over: protocol is {protocol!r}; accepted: 3"
    assert text in failure


def test_a_piece_altered_on_the_way(
    host: Any, source: ms.DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = MessagePipe.send

    def altered(self: MessagePipe, piece: torch.Tensor, packed: Any) -> Any:
        sent = piece.clone()
        sent[-100] ^= 4
        return real(self, sent, packed)

    monkeypatch.setattr(MessagePipe, "send", altered)
    failures = missed(host, source, engine_of())
    assert all("they were altered on their way" in text for text in failures)
    assert failures[0].startswith("rank 0 of the destination: ")
    assert left_over(host) == []


def test_pieces_in_another_order(
    host: Any, source: ms.DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two neighbours of one length change places."""
    real, held, swapped = MessagePipe.send, [], []

    def send(self: MessagePipe, piece: torch.Tensor, packed: Any) -> Any:
        if swapped:
            return real(self, piece, packed)
        if held and len(held[0]) == len(piece):
            swapped.append(real(self, piece, packed))
        if held:
            real(self, held.pop(), packed)
        if not swapped:
            held.append(piece.clone())
        return Gone()

    monkeypatch.setattr(pieces, "PIECE_BYTES", 2048)
    monkeypatch.setattr(MessagePipe, "send", send)
    _, failure = missed(host, source, engine_of())
    assert swapped
    assert "they were altered on their way" in failure


@pytest.mark.parametrize("by", [-1, 1])
def test_pieces_of_another_length(
    host: Any, source: ms.DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch, by: int
) -> None:
    real = MessagePipe.send

    def send(self: MessagePipe, piece: torch.Tensor, packed: Any) -> Any:
        sent = torch.zeros(len(piece) + by * 512, dtype=torch.uint8)
        return real(self, sent, packed)

    monkeypatch.setattr(MessagePipe, "send", send)
    assert all(missed(host, source, engine_of(), timeout_s=3.0))


class Gone:
    """The passage of a piece that is acknowledged at once."""

    def poll_launched(self) -> bool:
        return True

    def poll_done(self) -> bool:
        return True


def altered_messages(monkeypatch: pytest.MonkeyPatch, key: str, change: Callable[[Any], Any]) -> None:
    """Each side sends `change(value)` in the field of this name."""

    def altered(message: Any) -> Any:
        if key not in message.__struct_fields__:
            return message
        return msgspec.structs.replace(message, **{key: change(getattr(message, key))})

    link, listener = Link.send, Listener.send
    monkeypatch.setattr(Link, "send", lambda self, one, payload=None: link(self, altered(one), payload))
    monkeypatch.setattr(
        Listener, "send", lambda self, peer, one, payload=None: listener(self, peer, altered(one), payload)
    )


def described(part: str, **changes: Callable[[Any], Any]) -> Callable[[bytes], bytes]:
    """Changes fields of a part of the description in an offer."""

    def change(data: bytes) -> bytes:
        found = msgspec.msgpack.decode(data)
        for name, new in changes.items():
            found[part][name] = new(found[part][name])
        return msgspec.msgpack.encode(found)

    return change


def huge(tensors: Any) -> Any:
    return {name: tensor | {"num_layers": 1048576} for name, tensor in tensors.items()}


def of_other_total(part: Any) -> Any:
    return [axis | {"total": 1048576} for axis in part]


@pytest.mark.parametrize(
    ("key", "change", "text"),
    [
        ("values", lambda value: value[:-1], "have other checksums than it says"),
        ("values", lambda value: None, "rank 0 of the source was lost"),
        ("prefixes", described("format", tensors=huge), "1048576"),
        ("prefixes", described("shard", kv=of_other_total), "as the format says"),
        ("prefixes", lambda value: b"\x91" * 5000, "the export is malformed"),
        ("prefixes", lambda value: value[:-1], "the export is malformed"),
        ("prefixes", described("forest", tokens=lambda old: [*old[:-1], old[-1][:-1] + b"\1"]), "a token is"),
        ("prefixes", described("forest", tokens=lambda old: old[:-1]), "tokens are those of other blocks"),
        ("prefixes", described("forest", parents=lambda old: old[:-1]), "tokens are those of other blocks"),
        ("prefixes", described("forest", roots=lambda old: []), "parents[0] is -1"),
        ("blocks", lambda value: [*value, 5000], "asks for blocks that were not offered"),
        ("blocks", lambda value: value + value, "asks for blocks that were not offered, or for one twice"),
        ("blocks", lambda value: "all", "sent an invalid message"),
        ("blocks", lambda value: [-1], "sent an invalid message"),
        ("states", lambda value: [0, *value[1:]], "asks for states that were not offered"),
        ("part", lambda value: value | {"kv": value["ssm.0"]}, "shard.kv is of"),
        ("part", lambda value: {}, "shard is of []"),
    ],
)
def test_a_peer_that_lies(
    host: Any,
    source: ms.DynamicInferenceEngine,
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    change: Callable[[Any], Any],
    text: str,
) -> None:
    """Nothing is allocated by its numbers."""
    altered_messages(monkeypatch, key, change)
    failures = missed(host, source, engine_of(), timeout_s=4.0)
    assert any(text in failure for failure in failures), failures
    assert left_over(host) == []


@pytest.mark.parametrize("message", [b"{}", b"\0" * 32 + b"{}", b"\x91" * 5000])
def test_a_peer_that_sends_garbage(
    host: Any, source: ms.DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch, message: bytes
) -> None:
    monkeypatch.setattr(Listener, "send", lambda self, peer, *_: self._socket.send_multipart([peer, message]))
    begin = time.monotonic()
    failures = missed(host, source, engine_of(), timeout_s=60.0)
    assert "sent an invalid message" in failures[0]
    assert time.monotonic() - begin < 30


def killed(*_: object) -> None:
    raise RuntimeError("killed")


@pytest.mark.parametrize("after", ["nothing", "the offer", "the answer", "half", "all"])
def test_a_source_that_ends_half_way(
    host: Any, source: ms.DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 4096)
    if after == "nothing":
        monkeypatch.setattr(session, "Offer", killed)
    elif after == "the offer":
        monkeypatch.setattr(session, "_offered", killed)
    elif after == "the answer":
        monkeypatch.setattr(MessagePipe, "send", killed)
    else:
        monkeypatch.setattr(
            session, "send_pieces" if after == "all" else "PieceLayout", ending(monkeypatch, after)
        )
    begin = time.monotonic()
    failures = missed(host, source, engine_of(), timeout_s=1.5 if after == "nothing" else 4.0)
    assert "killed" in failures[0]
    assert "killed" in failures[1] or "rank 0 of the source" in failures[1]
    assert time.monotonic() - begin < 10
    assert left_over(host) == []


def ending(monkeypatch: pytest.MonkeyPatch, after: str) -> Any:
    """What ends the source after half of its pieces, or after all of them."""
    if after == "half":
        real, count = MessagePipe.send, []

        def send(self: MessagePipe, piece: torch.Tensor, packed: Any) -> Any:
            count.append(None)
            return killed() if len(count) > 3 else real(self, piece, packed)

        monkeypatch.setattr(MessagePipe, "send", send)
        return session.PieceLayout
    real_pieces = session.send_pieces

    def send_pieces(*arguments: Any) -> Any:
        real_pieces(*arguments)
        killed()

    return send_pieces


def test_a_receiver_that_ends_half_way(
    host: Any, source: ms.DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MessagePipe, "receive", killed)
    failures = missed(host, source, engine_of(), timeout_s=2.0)
    assert "rank 0 of the destination" in failures[0]
    assert "killed" in failures[1]


def test_a_source_that_is_silent(
    host: Any, source: ms.DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of the destination is over once the source sends its first piece, which does not leave."""
    is_sending, has_ended = threading.Event(), threading.Event()

    def send(*_: object) -> None:
        is_sending.set()
        has_ended.wait(30)

    monkeypatch.setattr(MessagePipe, "send", send)
    remaining_s = session.Destination.remaining_s
    monkeypatch.setattr(
        session.Destination, "remaining_s", lambda self: -1.0 if is_sending.is_set() else remaining_s(self)
    )
    target, stores = engine_of(), (client(host), client(host))
    with ThreadPoolExecutor(2) as threads:
        sent = threads.submit(send_once, source, stores[0], "a to b", timeout_s=30.0)
        received = receive_once(target, stores[1], "a to b", timeout_s=30.0)
        assert not sent.done()
        has_ended.set()
        assert "rank 0 of the source was lost: no piece came or went" in received.failure
        assert sent.result().failure


DIES = """
import os, sys
sys.path[:0] = sys.argv[2:]
import torch.distributed as dist
from mambaslots.net.transfer.pipe import MessagePipe
from oracle.fresh_process import Begun
from oracle.serving import random_tokens, serve_checked
from oracle.transfers import engine_of, send_once

MessagePipe.send = lambda *_: os._exit(9)
engine = engine_of()
serve_checked(engine, [random_tokens(40, 1)])
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
send_once(engine, store, "a to b")
"""


@pytest.mark.long
def test_a_process_that_dies_while_it_sends(host: Any) -> None:
    target = engine_of()
    path = [entry for entry in sys.path if entry]
    with subprocess.Popen([sys.executable, "-c", DIES, str(host.port), *path]) as peer:
        report = receive_once(target, client(host), "a to b", timeout_s=60.0)
    assert peer.returncode == 9
    assert "rank 0 of the source was lost" in report.failure
    assert report == ImportReport(failure=report.failure)
    target.context.check_integrity()
    serve_checked(target, PROMPTS)


def test_a_stranger_cannot_connect(host: Any, source: ms.DynamicInferenceEngine) -> None:
    """The key of the listener stands in the store alone."""
    with Listening() as listener:
        other = msgspec.structs.replace(listener.address, key=zmq.curve_keypair()[0].decode())
        with pytest.raises(PeerLostError, match="another process listens there"):
            Link(other, hand_over_messages.Message, 0.5)
        Link(listener.address, hand_over_messages.Message, 5.0).close()


class Listening:
    def __enter__(self) -> Listener:
        self.listener = Listener(hand_over_messages.Message, hosts=("127.0.0.1",))
        return self.listener

    def __exit__(self, *_: object) -> None:
        self.listener.close()


def cut(port: int) -> None:
    """End this process's connections to a port, as a network does."""
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if os.readlink(file).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(file.name))) as one:
                    if one.getpeername()[1:2] == (port,):
                        one.shutdown(socket.SHUT_RDWR)


def test_an_offer_over_a_connection_that_is_lost(
    host: Any, source: ms.DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source connects again, and offers again."""
    send, offers = Link.send, []

    def send_or_lose(link: Link, message: Any, payload: Any = None) -> None:
        if isinstance(message, hand_over_messages.Offer):
            offers.append(link)
            if len(offers) == 1:
                cut(int(link._socket.LAST_ENDPOINT.rpartition(b":")[2]))
                return
        send(link, message, payload)

    monkeypatch.setattr(Link, "send", send_or_lose)
    target = engine_of()
    sent, received = both(host, source, target, timeout_s=8.0)
    assert (sent.failure, received.failure) == ("", "")
    assert len(offers) == 2
    assert min(result.num_resumed_tokens for result in serve_checked(target, PROMPTS)) > 0


class SourceForTwoRanks(session.Source):
    """Rank 0 of the destination answers and then has another connection; rank 1 does not answer."""

    def __init__(self) -> None:
        self.lease, self.timeout_s, self.deadline = pieces.PoolLease(), 5.0, time.monotonic() + 5.0
        self.peers, self.offered = {}, list[str]()

    def connect(self) -> None:
        ports = (2, 1) if self.peers else (0, 1)
        self.peers = {("", port): self.peers.get(("", port)) or self._peer(port) for port in ports}

    def _peer(self, port: int) -> hand_over_messages.Peer:
        name = f"rank {port % 2} at port {port}"
        return hand_over_messages.Peer(name, lambda *_: self.offered.append(name), lambda: True, None)

    def receive_messages(self, peer: hand_over_messages.Peer, timeout_s: float) -> None:
        if peer.name.endswith("0"):
            peer.inbox.append(hand_over_messages.PieceRequest())


def test_a_destination_whose_rank_is_lost_after_its_answer() -> None:
    lost_by = SourceForTwoRanks()
    with pytest.raises(TransferError, match="rank 0 at port 0 was lost after its answer"):
        lost_by._answers(hand_over_messages.Offer(0, 1, b"", None))
    assert lost_by.offered == ["rank 0 at port 0", "rank 1 at port 1"]


def test_connecting_that_does_not_end(
    host: Any, source: ms.DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_ended = threading.Event()
    monkeypatch.setattr(session, "Link", lambda *_: has_ended.wait(60))
    target, stores = engine_of(), (client(host), client(host))
    begin = time.monotonic()
    with ThreadPoolExecutor(2) as threads:
        sent = threads.submit(send_once, source, stores[0], "a to b", timeout_s=1.0)
        received = receive_once(target, stores[1], "a to b", timeout_s=1.0)
        assert "did not come in 1 s" in received.failure
        text = "the store or a peer stopped answering; gave up after 1 s"
        assert sent.result() == SendReport(failure=text)
        assert time.monotonic() - begin < 30
    has_ended.set()


FROZEN = """
import time, torch.distributed as dist
host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(host.port, flush=True)
time.sleep(60)
"""


@pytest.mark.sampled(after=("while it waits",))
@pytest.mark.parametrize("after", ["before the call", "while it waits"])
def test_a_store_that_stops_answering(source: ms.DynamicInferenceEngine, after: str) -> None:
    with closing(Begun(code=FROZEN)) as process:
        port = int(process.first_line())
        calls: list[tuple[Callable[..., Any], str]] = [(send_once, "x"), (receive_once, "y")]
        stores: list[Any] = [dist.TCPStore("127.0.0.1", port, is_master=False) for _ in calls]
        waits = 0.0 if after == "before the call" else 0.5
        begin, before = time.monotonic(), maps_of(source)
        with ThreadPoolExecutor(2) as threads:
            if not waits:
                process.signal(signal.SIGSTOP)
            reports = [
                threads.submit(call, source, store, name, timeout_s=1.5)
                for store, (call, name) in zip(stores, calls, strict=True)
            ]
            time.sleep(waits)
            process.signal(signal.SIGSTOP)
            failures = [report.result().failure for report in reports]
        took = time.monotonic() - begin
        process.signal(signal.SIGKILL)
    assert took < 30
    assert all(failures)
    assert maps_of(source) == before
    serve_checked(source, PROMPTS)


@pytest.mark.parametrize("call", [send_once, receive_once])
def test_no_peer_comes(host: Any, source: ms.DynamicInferenceEngine, call: Callable[..., Any]) -> None:
    store, before, begin = client(host), maps_of(source), time.monotonic()
    report = call(source, store, "alone", timeout_s=0.5)
    assert 0.4 < time.monotonic() - begin < 30
    assert "did not come in 0.5 s" in report.failure
    assert maps_of(source) == before
    assert left_over(host) == []


def test_a_store_that_is_gone(source: ms.DynamicInferenceEngine) -> None:
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=MINUTE)
    store = client(host)
    del host
    for call in (send_once, receive_once):
        begin = time.monotonic()
        assert call(source, store, "x", timeout_s=5.0).failure
        assert time.monotonic() - begin < 30


def test_a_garbled_address(host: Any, source: ms.DynamicInferenceEngine) -> None:
    garbage = [
        b"",
        b"{}",
        b"[" * 5000,
        b'{"ranks": 1}',
        b"\xff",
        b'{"protocol": 3, "address": 3, "ranks": 1}',
    ]
    for number, hello in enumerate(garbage):
        name = f"garbled {number}"
        host.set(f"mambaslots/handover/{name}/0", hello.decode("latin1"))
        failure = send_once(source, client(host), name, timeout_s=1.0).failure
        assert "rank 0 of the destination is no rank of a hand-over" in failure


@pytest.mark.parametrize("piece_bytes", [16, 1000, 5000])
def test_what_is_sent_in_pieces_is_one(
    host: Any, source: ms.DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", piece_bytes)
    target = engine_of()
    sent, received = both(host, source, target)
    assert (sent.failure, received.failure) == ("", "")
    assert received.imported.states == sent.states
    serve_checked(target, PROMPTS)


def test_a_copy_that_fails_is_a_miss(
    host: Any, source: ms.DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(PartCopies, "scatter", broken)
    reason = "prefixes could not be imported: no room"
    assert missed(host, source, engine_of()) == (f"rank 0 of the destination: {reason}", reason)


@pytest.mark.parametrize("broken", ["the first gather", "the last gather", "committing"])
def test_what_fails_within_the_replica_is_no_miss(
    host: Any, source: ms.DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    target, gathers = engine_of(), []
    real = ms.ParallelGroups.gather

    def gather(*arguments: Any) -> Any:
        gathers.append(None)
        if len(gathers) == ["the first gather", "the last gather"].index(broken) + 1:
            raise RuntimeError("a rank was lost")
        return real(*arguments)

    def commit(self: object) -> None:
        raise RuntimeError("a rank was lost")

    if broken == "committing":
        monkeypatch.setattr(Placement, "commit", commit)
    else:
        monkeypatch.setattr(ms.ParallelGroups, "gather", gather)
    stores = client(host), client(host)
    with ThreadPoolExecutor(1) as threads:
        sent = threads.submit(send_once, source, stores[0], "a to b", timeout_s=20.0)
        with pytest.raises(RuntimeError, match=r"^a rank was lost$"):
            receive_once(target, stores[1], "a to b", timeout_s=20.0)
        failure = sent.result().failure
    assert failure == ("rank 0 of the destination: a rank was lost" if broken == "the first gather" else "")
    monkeypatch.undo()
    target.context.check_integrity()
    serve_checked(target, PROMPTS)


def test_bad_arguments(host: Any, source: ms.DynamicInferenceEngine) -> None:
    for call in (send_once, receive_once):
        for store, name, timeout_s, text in (
            (None, "x", 1.0, "store"), (host, "", 1.0, "name"), (host, 5, 1.0, "name"),
            (host, "\ud800", 1.0, "name"), (host, "x", 0, "timeout_s"),
            (host, "x", float("nan"), "timeout_s"),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=f"{text} is"):
                call(source, store, name, timeout_s=timeout_s)
    with pytest.raises(ValueError, match="prefixes"):
        send_once(source, host, "x", [5.0])
    assert left_over(host) == []
