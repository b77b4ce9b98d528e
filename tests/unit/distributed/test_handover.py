"""Hand-overs between two replicas of one rank each: two threads of this process, over a TCP store."""

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
from mambaslots.distributed import handover, handover_link
from mambaslots.distributed.handover_meeting import Meeting
from mambaslots.distributed.state_transfer import ImportReport, SendReport, receive_prefixes, send_prefixes
from mambaslots.model_shard import Part
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


def test_a_warm_replica_fills_a_cold_one(host: Any, source: ms.DynamicInferenceEngine) -> None:
    target = engine_of()
    sent, received = both(host, source, target)
    assert (sent.failure, received.failure) == ("", "")
    assert (sent.prefixes, sent.states) == (received.imported.prefixes, received.imported.states)
    assert sent.receivers == 1
    assert sent.bytes > 0
    target.context.check_integrity()
    assert min(result.resumed_tokens for result in serve_checked(target, PROMPTS)) > 0
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


def test_bytes_altered_on_the_way(
    host: Any, source: ms.DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = handover.encode_prefixes

    def altered(export: Any) -> bytes:
        data = bytearray(real(export))
        data[-100] ^= 4
        return bytes(data)

    monkeypatch.setattr(handover, "encode_prefixes", altered)
    _, failure = missed(host, source, engine_of())
    assert "truncated or altered" in failure
    assert left_over(host) == []


def test_another_part_than_agreed(
    host: Any, source: ms.DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = handover.decode_prefixes

    def fewer(data: bytes) -> Any:
        piece = real(data)
        return piece.cut(piece.shard.__class__(**{**vars(piece.shard), "kv_heads": Part(0, 1, 2)}))

    monkeypatch.setattr(handover, "decode_prefixes", fewer)
    _, failure = missed(host, source, engine_of())
    assert "as was agreed" in failure


@pytest.mark.parametrize("after", ["nothing", "the length", "half"])
def test_a_source_that_ends_half_way(
    host: Any, source: ms.DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    def send(self: handover_link.HandoverLink, data: bytes) -> None:
        if after != "nothing":
            self._send(torch.tensor([len(data)]), 0)
        if after == "half":
            self._send(torch.zeros(len(data) // 2, dtype=torch.uint8), 0)
        raise RuntimeError("killed")

    monkeypatch.setattr(handover_link.HandoverLink, "send", send)
    begin = time.monotonic()
    failures = missed(host, source, engine_of(), timeout_s=4.0)
    assert "rank 0 of the destination was lost: killed" in failures[0]
    assert "rank 0 of the source was lost" in failures[1] or "truncated" in failures[1]
    assert time.monotonic() - begin < 10
    assert left_over(host) == []


def test_a_receiver_that_ends_half_way(
    host: Any, source: ms.DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def receive(self: handover_link.HandoverLink) -> bytes:
        self._receive(torch.empty(1, dtype=torch.int64), 0)
        raise RuntimeError("killed")

    monkeypatch.setattr(handover_link.HandoverLink, "receive", receive)
    failures = missed(host, source, engine_of(), timeout_s=2.0)
    assert "rank 0 of the destination was lost" in failures[0]


def test_a_source_that_is_silent(
    host: Any, source: ms.DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover_link.HandoverLink, "send", lambda self, data: time.sleep(3.0))
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
from mambaslots.distributed import handover_link, send_prefixes
from oracle.serving import random_tokens, serve_checked
from oracle.transfers import engine_of

def send(link, data):
    link._send(torch.tensor([len(data)]), 0)
    os._exit(9)

handover_link.HandoverLink.send = send
engine = engine_of()
serve_checked(engine, [random_tokens(40, 1)])
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
send_prefixes(engine, store, "a to b")
"""


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


def test_a_garbled_seat(host: Any, source: ms.DynamicInferenceEngine) -> None:
    for rank, seat in enumerate([b"", b"{}", b"[" * 5000, b'{"ranks": 1}', b"\xff"]):
        name = f"garbled {rank}"
        host.set(f"mambaslots/handover/{name}/destination/0", seat.decode("latin1"))
        failure = send_prefixes(source, client(host), name, timeout_s=1.0).failure
        assert "rank 0 of the destination is no rank of a hand-over" in failure


def test_bad_arguments(host: Any, source: ms.DynamicInferenceEngine) -> None:
    for call in (send_prefixes, receive_prefixes):
        for store, name, timeout_s, text in (
            (None, "x", 1.0, "store"), (host, "", 1.0, "name"), (host, 5, 1.0, "name"),
            (host, "x", 0, "timeout_s"), (host, "x", float("nan"), "timeout_s"),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=f"{text} is"):
                call(source, store, name, timeout_s=timeout_s)  # type: ignore[operator]
    with pytest.raises(ValueError, match="ref_zero"):
        receive_prefixes(engine_of(prefix_caching_eviction_policy="ref_zero"), host, "x")
    with pytest.raises(ValueError, match="prefixes"):
        send_prefixes(source, host, "x", [5])  # type: ignore[list-item]
    assert left_over(host) == []


def test_the_last_to_leave_takes_the_keys(host: Any, source: ms.DynamicInferenceEngine) -> None:
    meetings = [Meeting(source, client(host), "m", side, 5.0) for side in ("source", "destination")]
    for meeting in meetings:
        meeting.__enter__()
    for meeting in meetings:
        assert len(meeting.pairs()) == 1
    meetings[0].__exit__()
    assert len(left_over(host)) == 3
    meetings[1].__exit__()
    assert left_over(host) == []
