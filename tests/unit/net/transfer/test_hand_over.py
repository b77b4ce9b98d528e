"""Hand-overs between two replicas of one rank each: two threads of this process, over a TCP store."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import mambaslots as ms
import pytest
import torch
import torch.distributed as dist
from mambaslots.net import (
    ImportReport,
    SendReport,
    receive_prefixes,
    send_prefixes,
)
from mambaslots.net.transfer import exchange, link, pieces, placement
from mambaslots.net.transfer.cache_access import CacheAccess
from mambaslots.net.transfer.link import PairLink
from mambaslots.net.transfer.pieces import PartCopies
from mambaslots.net.transfer.pipe import Done, GlooPipe
from mambaslots.net.transfer.rendezvous import Rendezvous
from oracle.serving import random_tokens, serve_checked
from oracle.transfers import engine_of, maps_of

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
    with ThreadPoolExecutor(2) as threads:
        sent = threads.submit(send_prefixes, source, client(host), "a to b", timeout_s=timeout_s)
        received = threads.submit(receive_prefixes, target, client(host), "a to b", timeout_s=timeout_s)
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


@pytest.mark.parametrize("protocol", [2, None, "1", True])
def test_another_protocol_is_refused_by_name(host: Any, protocol: object) -> None:
    """What another release says is not read on: its messages may mean something else."""
    hello = json.dumps({"protocol": protocol, "of": "another release"})
    client(host).set("mambaslots/handover/a to b/source/0", hello)
    failure = receive_prefixes(engine_of(), client(host), "a to b", timeout_s=5.0).failure
    assert f"rank 0 of the source is no rank of a hand-over: protocol is {protocol!r}; accepted: 1" in failure


def test_a_piece_altered_on_the_way(
    host: Any, source: ms.DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = GlooPipe.send

    def altered(self: GlooPipe, piece: torch.Tensor, packed: Any) -> Any:
        sent = piece.clone()
        sent[-100] ^= 4
        return real(self, sent, packed)

    monkeypatch.setattr(GlooPipe, "send", altered)
    failures = missed(host, source, engine_of())
    assert all("they were altered on their way" in text for text in failures)
    assert failures[0].startswith("rank 0 of the destination: ")
    assert left_over(host) == []


def test_pieces_in_another_order(
    host: Any, source: ms.DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two neighbours of one length change places."""
    real, held, swapped = GlooPipe.send, [], []

    def send(self: GlooPipe, piece: torch.Tensor, packed: Any) -> Any:
        if swapped:
            return real(self, piece, packed)
        if held and len(held[0]) == len(piece):
            swapped.append(real(self, piece, packed))
        if held:
            real(self, held.pop(), packed)
        if not swapped:
            held.append(piece.clone())
        return Done()

    monkeypatch.setattr(pieces, "PIECE_BYTES", 2048)
    monkeypatch.setattr(GlooPipe, "send", send)
    _, failure = missed(host, source, engine_of())
    assert swapped
    assert "they were altered on their way" in failure


@pytest.mark.parametrize("by", [-1, 1])
def test_pieces_of_another_length(
    host: Any, source: ms.DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch, by: int
) -> None:
    real = GlooPipe.send

    def send(self: GlooPipe, piece: torch.Tensor, packed: Any) -> Any:
        sent = torch.zeros(len(piece) + by * 512, dtype=torch.uint8)
        return real(self, sent, packed)

    monkeypatch.setattr(GlooPipe, "send", send)
    assert all(missed(host, source, engine_of(), timeout_s=3.0))


def altered_messages(monkeypatch: pytest.MonkeyPatch, key: str, change: Callable[[Any], Any]) -> None:
    """Each side tells `change(value)` where it would tell a value of this key."""
    real = PairLink.send_values

    def send_values(self: PairLink, values: dict[str, Any]) -> None:
        real(self, {name: change(value) if name == key else value for name, value in values.items()})

    monkeypatch.setattr(PairLink, "send_values", send_values)


@pytest.mark.parametrize(
    ("key", "change", "text"),
    [
        ("checksums", lambda value: value[:-1], "have other checksums than it says"),
        ("checksums", lambda value: None, "have other checksums than it says"),
        ("blocks", lambda value: [*value, 5000], "asks for what was not offered: blocks[9] is 5000"),
        ("blocks", lambda value: value + value, "asks for 18 blocks; accepted: each of 9 once"),
        ("blocks", lambda value: "all", "asks for what was not offered: blocks is 'all'"),
        ("states", lambda value: [0, *value[1:]], "asks for states of [0]; accepted: offered ones"),
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
    assert any(text in failure for failure in missed(host, source, engine_of()))
    assert left_over(host) == []


@pytest.mark.parametrize("message", [b"", b"{}", b"\0" * 32 + b"{}", b"[" * 5000])
def test_a_peer_that_sends_garbage(
    host: Any, source: ms.DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch, message: bytes
) -> None:
    monkeypatch.setattr(PairLink, "send_values", lambda self, values: PairLink.send(self, message))
    begin = time.monotonic()
    failures = missed(host, source, engine_of(), timeout_s=5.0)
    assert all(failures)
    assert time.monotonic() - begin < 5


def test_an_offer_that_is_garbled(
    host: Any, source: ms.DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = exchange.Offer.to_bytes

    def to_bytes(self: exchange.Offer) -> bytes:
        data = bytearray(real(self))
        data[-7] ^= 1
        return bytes(data)

    monkeypatch.setattr(exchange.Offer, "to_bytes", to_bytes)
    assert all("truncated or altered" in failure for failure in missed(host, source, engine_of()))


def killed(*_: object) -> None:
    raise RuntimeError("killed")


@pytest.mark.parametrize("after", ["nothing", "the offer", "the answer", "half", "all"])
def test_a_source_that_ends_half_way(
    host: Any, source: ms.DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 4096)
    if after == "nothing":
        monkeypatch.setattr(exchange.Offer, "to_bytes", killed)
    elif after == "the offer":
        monkeypatch.setattr(exchange.Offer, "rows_of", killed)
    elif after == "the answer":
        monkeypatch.setattr(GlooPipe, "send", killed)
    else:
        monkeypatch.setattr(
            exchange, "send_pieces" if after == "all" else "PieceLayout", ending(monkeypatch, after)
        )
    begin = time.monotonic()
    failures = missed(host, source, engine_of(), timeout_s=4.0)
    assert "killed" in failures[0]
    assert "killed" in failures[1] or "rank 0 of the source was lost" in failures[1]
    assert time.monotonic() - begin < 10
    assert left_over(host) == []


def ending(monkeypatch: pytest.MonkeyPatch, after: str) -> Any:
    """What ends the source after half of its pieces, or after all of them."""
    if after == "half":
        real, count = GlooPipe.send, []

        def send(self: GlooPipe, piece: torch.Tensor, packed: Any) -> Any:
            count.append(None)
            return killed() if len(count) > 3 else real(self, piece, packed)

        monkeypatch.setattr(GlooPipe, "send", send)
        return exchange.PieceLayout
    real_pieces = exchange.send_pieces

    def send_pieces(*arguments: Any) -> Any:
        real_pieces(*arguments)
        killed()

    return send_pieces


def test_a_receiver_that_ends_half_way(
    host: Any, source: ms.DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GlooPipe, "receive", killed)
    failures = missed(host, source, engine_of(), timeout_s=2.0)
    assert "rank 0 of the destination" in failures[0]
    assert "killed" in failures[1]


def test_a_source_that_is_silent(
    host: Any, source: ms.DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GlooPipe, "send", lambda *_: time.sleep(3.0))
    begin = time.monotonic()
    with ThreadPoolExecutor(2) as threads:
        sent = threads.submit(send_prefixes, source, client(host), "a to b", timeout_s=10.0)
        received = receive_prefixes(engine_of(), client(host), "a to b", timeout_s=1.0)
        assert time.monotonic() - begin < 2.5
        assert "rank 0 of the source was lost" in received.failure
        sent.result()


DIES = """
import os, sys
sys.path[:0] = sys.argv[2:]
import torch, torch.distributed as dist
from mambaslots.net import send_prefixes
from mambaslots.net.transfer.link import PairLink
from mambaslots.net.transfer.pieces import PartCopies
from mambaslots.net.transfer.pipe import GlooPipe
from oracle.serving import random_tokens, serve_checked
from oracle.transfers import engine_of, maps_of

def send(link, data):
    link._send(torch.tensor([len(data) + 5000]), 0)
    os._exit(9)

PairLink.send = send
engine = engine_of()
serve_checked(engine, [random_tokens(40, 1)])
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
send_prefixes(engine, store, "a to b")
"""


@pytest.mark.long
def test_a_process_that_dies_while_it_sends(host: Any) -> None:
    target = engine_of()
    path = [entry for entry in sys.path if entry]
    with subprocess.Popen([sys.executable, "-c", DIES, str(host.port), *path]) as peer:
        report = receive_prefixes(target, client(host), "a to b", timeout_s=60.0)
    assert peer.returncode == 9
    assert "rank 0 of the source was lost" in report.failure
    assert report == ImportReport(failure=report.failure)
    target.context.check_integrity()
    serve_checked(target, PROMPTS)


CONNECTS = """
import sys
sys.path[:0] = sys.argv[2:]
import torch.distributed as dist
from mambaslots.net import send_prefixes
from oracle.transfers import engine_of, maps_of
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
send_prefixes(engine_of(), store, "a to b")
"""


def test_a_process_that_dies_while_it_connects(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its address is known by then, and gloo tries it again and again."""
    real, path = dist.ProcessGroupGloo, [entry for entry in sys.path if entry]
    with subprocess.Popen([sys.executable, "-c", CONNECTS, str(host.port), *path]) as peer:

        def connect(store: Any, *arguments: Any) -> Any:
            store.wait(["0/0"], MINUTE)
            peer.kill()
            peer.wait()
            return real(store, *arguments)

        monkeypatch.setattr(link.dist, "ProcessGroupGloo", connect)
        target = engine_of()
        host.wait(["mambaslots/handover/a to b/source/0"], MINUTE)
        begin = time.monotonic()
        failure = receive_prefixes(target, client(host), "a to b", timeout_s=3.0).failure
    assert peer.returncode == -signal.SIGKILL
    assert time.monotonic() - begin < 4.5
    assert "rank 0 of the source was lost" in failure
    target.context.check_integrity()
    serve_checked(target, PROMPTS)


def test_connecting_that_does_not_end(
    host: Any, source: ms.DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link.dist, "ProcessGroupGloo", lambda *_: time.sleep(4.0))
    begin = time.monotonic()
    with ThreadPoolExecutor(2) as threads:
        sent = threads.submit(send_prefixes, source, client(host), "a to b", timeout_s=1.0)
        received = receive_prefixes(engine_of(), client(host), "a to b", timeout_s=1.0)
        text = "the store or a peer stopped answering; gave up after 1 s"
        assert received == ImportReport(failure=text)
        assert sent.result() == SendReport(failure=text)
    assert time.monotonic() - begin < 3.0


FROZEN = """
import time, torch.distributed as dist
host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(host.port, flush=True)
time.sleep(60)
"""


@pytest.mark.sampled(after=("while it waits",))
@pytest.mark.parametrize("after", ["before the call", "while it waits"])
def test_a_store_that_stops_answering(source: ms.DynamicInferenceEngine, after: str) -> None:
    with subprocess.Popen([sys.executable, "-c", FROZEN], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        calls: list[tuple[Callable[..., Any], str]] = [(send_prefixes, "x"), (receive_prefixes, "y")]
        stores: list[Any] = [dist.TCPStore("127.0.0.1", port, is_master=False) for _ in calls]
        waits = 0.0 if after == "before the call" else 0.5
        begin, before = time.monotonic(), maps_of(source)
        with ThreadPoolExecutor(2) as threads:
            if not waits:
                process.send_signal(signal.SIGSTOP)
            reports = [
                threads.submit(call, source, store, name, timeout_s=1.5)
                for store, (call, name) in zip(stores, calls, strict=True)
            ]
            time.sleep(waits)
            process.send_signal(signal.SIGSTOP)
            failures = [report.result().failure for report in reports]
        took = time.monotonic() - begin
        process.kill()
    assert took < 4.0
    assert all(failures)
    assert maps_of(source) == before
    serve_checked(source, PROMPTS)


@pytest.mark.parametrize("call", [send_prefixes, receive_prefixes])
def test_nobody_comes(host: Any, source: ms.DynamicInferenceEngine, call: Callable[..., Any]) -> None:
    begin, before = time.monotonic(), maps_of(source)
    report = call(source, client(host), "alone", timeout_s=0.5)
    assert 0.4 < time.monotonic() - begin < 2.0
    assert "did not come in 0.5 s" in report.failure
    assert maps_of(source) == before
    assert left_over(host) == []


def test_a_store_that_is_gone(source: ms.DynamicInferenceEngine) -> None:
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=MINUTE)
    store = client(host)
    del host
    for call in (send_prefixes, receive_prefixes):
        begin = time.monotonic()
        assert call(source, store, "x", timeout_s=5.0).failure  # type: ignore[operator]
        assert time.monotonic() - begin < 7.0


def rendezvous_of(engine: ms.DynamicInferenceEngine, host: Any, name: str, side: Any) -> Rendezvous:
    return Rendezvous(CacheAccess.of(engine, "test"), client(host), name, side, 5.0)


def test_a_garbled_hello(host: Any, source: ms.DynamicInferenceEngine) -> None:
    for number, hello in enumerate([b"", b"{}", b"[" * 5000, b'{"ranks": 1}', b"\xff"]):
        name = f"garbled {number}"
        host.set(f"mambaslots/handover/{name}/destination/0", hello.decode("latin1"))
        failure = send_prefixes(source, client(host), name, timeout_s=1.0).failure
        assert "rank 0 of the destination is no rank of a hand-over" in failure


def test_a_hello_whose_part_is_of_another_whole(host: Any, source: ms.DynamicInferenceEngine) -> None:
    """Nothing is allocated by a peer's numbers."""
    hello = json.loads(rendezvous_of(source, host, "x", "destination")._hello.to_bytes())
    for part in hello["shard"].values():
        for axis in part:
            axis[2] = 1 << 20
    host.set("mambaslots/handover/wide/destination/0", json.dumps(hello))
    failure = send_prefixes(source, client(host), "wide", timeout_s=1.0).failure
    assert "shard.kv is of 1048576 layers; accepted: 1, as the format says" in failure
    for tensor in hello["format"]["tensors"].values():
        tensor |= {"num_layers": 1 << 20, "num_units": 1 << 20}
    host.set("mambaslots/handover/as wide/destination/0", json.dumps(hello))
    failure = send_prefixes(source, client(host), "as wide", timeout_s=1.0).failure
    assert "kv.num_layers is 1; accepted: 1048576, as here" in failure


def test_a_hello_of_another_version(host: Any, source: ms.DynamicInferenceEngine) -> None:
    hello = json.loads(rendezvous_of(source, host, "x", "destination")._hello.to_bytes())
    hello["format"] = {"format_version": 2, "mamba_layers": 3}
    host.set("mambaslots/handover/old/destination/0", json.dumps(hello))
    failure = send_prefixes(source, client(host), "old", timeout_s=1.0).failure
    assert failure == "format_version is 2; accepted: 3"


@pytest.mark.parametrize("piece_bytes", [16, 1000, 5000])
def test_what_is_sent_in_pieces_is_one(
    host: Any, source: ms.DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(link, "CHUNK_BYTES", 1000)
    target = engine_of()
    sent, received = both(host, source, target)
    assert (sent.failure, received.failure) == ("", "")
    assert received.imported.states == sent.states
    serve_checked(target, PROMPTS)


@pytest.mark.parametrize("length", [0, -1, 1 << 45])
def test_an_announcement_alone_takes_no_memory(
    host: Any, source: ms.DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    def send(self: PairLink, message: bytes) -> None:
        self._send(torch.tensor([length]), 0)

    monkeypatch.setattr(PairLink, "send", send)
    _, failure = missed(host, source, engine_of(), timeout_s=4.0)
    assert f"a message of {length} bytes is announced; accepted: from 1 to 4294967296" in failure


def test_a_copy_that_fails_is_a_miss(
    host: Any, source: ms.DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(PartCopies, "scatter", broken)
    reason = "prefixes could not be imported: no room"
    assert missed(host, source, engine_of()) == (f"rank 0 of the destination: {reason}", reason)


@pytest.mark.parametrize("broken", ["the first gather", "the last gather", "publishing"])
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

    def publish(self: object) -> None:
        raise RuntimeError("a rank was lost")

    if broken == "publishing":
        monkeypatch.setattr(placement.Placement, "publish", publish)
    else:
        monkeypatch.setattr(ms.ParallelGroups, "gather", gather)
    with ThreadPoolExecutor(1) as threads:
        sent = threads.submit(send_prefixes, source, client(host), "a to b", timeout_s=20.0)
        with pytest.raises(RuntimeError, match=r"^a rank was lost$"):
            receive_prefixes(target, client(host), "a to b", timeout_s=20.0)
        told = sent.result().failure
    assert told == ("rank 0 of the destination: a rank was lost" if broken == "the first gather" else "")
    monkeypatch.undo()
    target.context.check_integrity()
    serve_checked(target, PROMPTS)


def test_bad_arguments(host: Any, source: ms.DynamicInferenceEngine) -> None:
    for call in (send_prefixes, receive_prefixes):
        for store, name, timeout_s, text in (
            (None, "x", 1.0, "store"), (host, "", 1.0, "name"), (host, 5, 1.0, "name"),
            (host, "\ud800", 1.0, "name"), (host, "x", 0, "timeout_s"),
            (host, "x", float("nan"), "timeout_s"),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=f"{text} is"):
                call(source, store, name, timeout_s=timeout_s)  # type: ignore[operator]
    with pytest.raises(ValueError, match="prefixes"):
        send_prefixes(source, host, "x", [5.0])  # type: ignore[list-item]
    assert left_over(host) == []


def test_the_last_to_leave_takes_the_keys(host: Any, source: ms.DynamicInferenceEngine) -> None:
    sides = [rendezvous_of(source, host, "m", side) for side in ("source", "destination")]
    for side in sides:
        side.arrive()
    for side in sides:
        assert len(side.pairs()) == 1
    sides[0].leave()
    assert len(left_over(host)) == 3
    sides[1].leave()
    assert left_over(host) == []
