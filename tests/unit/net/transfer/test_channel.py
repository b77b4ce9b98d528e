"""Channels that live on between two replicas of one rank each: two threads of this process."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import mambaslots as ms
import pytest
import torch
import torch.distributed as dist
from mambaslots.net import TransferChannel
from mambaslots.net.message_sockets import Link
from mambaslots.net.transfer import hand_over_messages, session
from mambaslots.net.transfer.hand_over import SendReport
from mambaslots.net.transfer.pieces import Staging
from mambaslots.net.transfer.pipe import MessagePipe, NcclFacts
from mambaslots.net.transfer.placement import ImportReport
from oracle.serving import random_tokens, serve_checked
from oracle.transfers import engine_of, maps_of

SYSTEM = random_tokens(24, 7)
PROMPTS = [SYSTEM + random_tokens(17, seed) for seed in range(6)]
MINUTE = timedelta(seconds=60)


@pytest.fixture
def host() -> Any:
    """The store that outlives both."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=MINUTE)


def client(host: Any) -> Any:
    return dist.TCPStore("127.0.0.1", host.port, is_master=False, timeout=MINUTE)


def left_over(host: Any) -> list[str]:
    return [key for key in host.list_keys() if "handover" in key]


class Pair:
    """Two engines and their ends of a channel."""

    def __init__(self, host: Any, *engines: ms.DynamicInferenceEngine) -> None:
        self.host = host
        self.source, self.target = engines or (engine_of(), engine_of())
        self.ends = [self.end("source"), self.end("destination")]

    def end(self, side: Any) -> TransferChannel:
        engine = self.source if side == "source" else self.target
        return TransferChannel(engine, client(self.host), "a to b", side, timeout_s=10.0)

    def hand_over(
        self, prefixes: Any = None, timeout_s: float | None = None
    ) -> tuple[SendReport, ImportReport]:
        with ThreadPoolExecutor(1) as threads:
            sent = threads.submit(self.ends[0].send, prefixes, timeout_s=timeout_s)
            received = self.ends[1].receive(timeout_s=timeout_s)
            return sent.result(), received

    def close(self) -> None:
        for end in self.ends:
            end.close()


@pytest.fixture
def pair(host: Any) -> Iterator[Pair]:
    made = Pair(host)
    yield made
    made.close()
    assert left_over(host) == []


def serve(engine: ms.DynamicInferenceEngine, prompts: list[list[int]]) -> list[int]:
    """Right answers; how many tokens each prompt resumed."""
    resumed = [result.num_resumed_tokens for result in serve_checked(engine, prompts)]
    engine.context.check_integrity()
    return resumed


def test_many_hand_overs_take_one_connection(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    real = session.Link
    monkeypatch.setattr(session, "Link", lambda *given: made.append(real(*given)) or made[-1])
    for prompt in PROMPTS:
        serve(pair.source, [prompt])
        sent, received = pair.hand_over([(prompt, None)])
        assert (sent.failure, received.failure) == ("", "")
        assert received.imported.states == sent.states == 1
        assert serve(pair.target, [prompt])[0] >= 32
    assert len(made) == 1
    assert [end.transport for end in pair.ends] == ["messages", "messages"]


def test_a_channel_that_is_connected_says_what_it_would_take(pair: Pair) -> None:
    for end in pair.ends:
        end._nccl = NcclFacts("1", "a GPU")
        assert end.transport == "nccl"
    assert [end.connect() for end in reversed(pair.ends)] == ["", ""]
    assert [end.transport for end in pair.ends] == ["nccl", "nccl"]


@pytest.mark.usefixtures("kind")
def test_the_deepest_state_of_a_prefix_goes_or_all_states(pair: Pair) -> None:
    serve(pair.source, [PROMPTS[0][:25]])
    serve(pair.source, PROMPTS[:1])
    cached = pair.source.context.prefix_cache.slots.cached_states.slot_of_block
    sent, received = pair.hand_over([(PROMPTS[0], None)])
    assert (sent.states, received.imported.states) == (1, 1)
    assert received.imported.tokens == 40
    assert serve(pair.target, PROMPTS[:1]) == [40]
    pair.target.reset_prefix_cache()
    sent, received = pair.hand_over()
    assert 1 < received.imported.states == sent.states == len(cached)


def test_only_what_the_receiver_lacks_is_sent(pair: Pair) -> None:
    serve(pair.source, PROMPTS[:2])
    first, _ = pair.hand_over([(PROMPTS[0], None)])
    again, known = pair.hand_over([(PROMPTS[0], None)])
    assert again.failure == ""
    assert again.bytes == 0 < first.bytes
    assert known.known.states == 1
    other, received = pair.hand_over([(PROMPTS[1], None)])
    assert received.known.blocks == 3  # those of the tokens that both begin with
    assert received.imported.blocks == 2
    assert 0 < other.bytes < first.bytes


def test_what_finds_no_room_is_not_sent(host: Any) -> None:
    source, small = engine_of(), engine_of(num_kv_blocks=14, num_mamba_slots=7, max_requests=1)
    pair = Pair(host, source, small)
    serve(source, PROMPTS)
    sent, received = pair.hand_over()
    assert (sent.failure, received.failure) == ("", "")
    assert received.left_out.states > 0
    assert received.imported.states + received.left_out.states == sent.states
    per_state = sum(pool[:, :1].nbytes for name, pool in pools_of(source).items() if name != "kv")
    per_block = pools_of(source)["kv"][:, :1].nbytes
    wanted = received.imported.states * per_state + received.imported.blocks * per_block
    assert wanted <= sent.bytes < wanted + 1000
    serve(small, PROMPTS)
    pair.close()


def pools_of(engine: ms.DynamicInferenceEngine) -> Any:
    from mambaslots.net.transfer.exports import CacheAccess

    return CacheAccess(engine, "test").pools


def test_a_peer_that_was_late_is_met_by_the_next_call(pair: Pair) -> None:
    serve(pair.source, PROMPTS[:1])
    pair.hand_over([(PROMPTS[0], None)])
    for end, call in zip(pair.ends, ("send", "receive"), strict=True):
        begin = time.monotonic()
        report = getattr(end, call)(timeout_s=0.3)
        assert re.search("did not come in 0.3 s|connection is closed", report.failure)  # after an old offer
        assert time.monotonic() - begin < 30
    sent, received = pair.hand_over()
    assert (sent.failure, received.failure) == ("", "")


def test_a_refusal_of_the_hand_over_before_refuses_no_meeting(pair: Pair) -> None:
    serve(pair.source, PROMPTS[:1])
    pair.hand_over([(PROMPTS[0], None)])
    assert pair.ends[1].receive(timeout_s=0.05).failure  # it refuses all later offers, and closes
    assert [end.connect() for end in reversed(pair.ends)] == ["", ""]


@pytest.mark.parametrize("broken", [True, False])
def test_with_scrub_no_piece_stays_in_the_staging(
    host: Any, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    """Neither behind a hand-over nor where it fails once pieces have come."""
    pair = Pair(host, engine_of(free_memory="zero"), engine_of(free_memory="zero"))
    staged: list[Staging] = []
    packed = list[bool]()
    reserve = Staging.reserve

    def reserved(staging: Staging, layout: Any) -> Any:
        staged.append(staging)
        return reserve(staging, layout)

    def breaks(*_: object) -> None:
        packed.extend(bool(buffer.any()) for staging in staged for buffer in staging.buffers)
        if any(packed) and broken:
            raise RuntimeError("the link broke")

    monkeypatch.setattr(Staging, "reserve", reserved)
    serve(pair.source, PROMPTS)
    send = Link.send

    def sends(link: Link, message: Any, payload: Any = None) -> None:
        if isinstance(message, hand_over_messages.Checksums):
            breaks()
        send(link, message, payload)

    monkeypatch.setattr(Link, "send", sends)
    sent, _ = pair.hand_over([(PROMPTS[0], None)], timeout_s=3.0)
    assert bool(sent.failure) == broken
    pair.close()
    assert any(packed)
    assert len(set(staged)) == 2
    assert not any(bool(buffer.any()) for staging in staged for buffer in staging.buffers)


@pytest.mark.parametrize("broken", ["send", "receive"])
def test_a_channel_that_failed_is_made_anew(pair: Pair, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    serve(pair.source, PROMPTS)
    pair.hand_over([(PROMPTS[0], None)])

    def fails(*_: object) -> Any:
        raise RuntimeError("the link broke")

    before = maps_of(pair.target)
    with monkeypatch.context() as patch:
        patch.setattr(MessagePipe, broken, fails)
        sent, received = pair.hand_over(timeout_s=5.0)
    assert sent.failure
    assert received == ImportReport(failure=received.failure)
    assert maps_of(pair.target) == before
    sent, received = pair.hand_over()
    assert (sent.failure, received.failure) == ("", "")
    assert min(serve(pair.target, PROMPTS)) > 0


@pytest.mark.parametrize("side", ["source", "destination"])
def test_a_replica_that_starts_again_is_met_under_the_same_name(pair: Pair, side: str) -> None:
    """It has lost all that connected it, and the other side does not know."""
    serve(pair.source, PROMPTS)
    pair.hand_over([(PROMPTS[0], None)])
    index = int(side == "destination")
    forgotten, pair.ends[index] = pair.ends[index], pair.end(side)
    sent, received = pair.hand_over()
    assert (sent.failure, received.failure) == ("", "")
    assert min(serve(pair.target, PROMPTS)) > 0
    forgotten._disconnect()


def test_other_weights_are_refused_and_then_met(pair: Pair) -> None:
    serve(pair.source, PROMPTS[:1])
    pair.hand_over()
    pair.target.set_weights_version("weights 2")
    sent, received = pair.hand_over(timeout_s=5.0)
    assert sent.failure
    assert received.failure
    pair.target.set_weights_version("weights 1")
    sent, received = pair.hand_over()
    assert (sent.failure, received.failure) == ("", "")


@pytest.mark.parametrize("first", ["source", "destination"])
def test_a_side_that_comes_first_after_a_refusal_waits_for_the_other_one(pair: Pair, first: str) -> None:
    """What the other one said before it was refused is in the store still."""
    serve(pair.source, PROMPTS[:1])
    pair.target.set_weights_version("weights 2")
    assert all(report.failure for report in pair.hand_over(timeout_s=5.0))
    pair.target.set_weights_version("weights 1")
    calls: list[Callable[[], SendReport | ImportReport]] = [pair.ends[0].send, pair.ends[1].receive]
    if first == "destination":
        calls.reverse()
    with ThreadPoolExecutor(1) as threads:
        early = threads.submit(calls[0])
        time.sleep(0.3)
        assert calls[1]().failure == ""
        assert early.result().failure == ""


@pytest.mark.sampled
@pytest.mark.parametrize("first", ["source", "destination"])
@pytest.mark.parametrize("before", ["connected", "failed", "restarted", "source alone", "destination alone"])
def test_weights_of_both_sides_change_before_the_next_hand_over(
    pair: Pair, first: str, before: str, request: pytest.FixtureRequest
) -> None:
    """What a side said of its old weights may be in the store still when the other one comes."""
    serve(pair.source, PROMPTS[:1])
    if before == "connected":
        pair.hand_over()
    elif before == "failed":
        with patch.object(MessagePipe, "send", side_effect=RuntimeError("no way")):
            assert all(report.failure for report in pair.hand_over(timeout_s=2.0))
    elif before == "restarted":  # the first to connect has lost all that it knew of the other side
        pair.hand_over()
        forgotten = pair.ends[first != "source"]
        pair.ends[first != "source"] = pair.end(first)
        request.addfinalizer(forgotten._disconnect)
    else:
        end = pair.ends[before != "source alone"]
        assert (end.send if before == "source alone" else end.receive)(timeout_s=0.3).failure
    for engine in (pair.source, pair.target):
        engine.set_weights_version("weights 2")
    serve(pair.source, PROMPTS[:1])
    calls: list[Callable[[], SendReport | ImportReport]] = [pair.ends[0].send, pair.ends[1].receive]
    if first == "destination":
        calls.reverse()
    with ThreadPoolExecutor(1) as threads:
        early = threads.submit(calls[0])
        time.sleep(0.3)
        assert calls[1]().failure == ""
        assert early.result().failure == ""
    assert serve(pair.target, PROMPTS[:1])[0] >= 32


def test_connecting_ahead(pair: Pair) -> None:
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(pair.ends[0].connect)
        assert pair.ends[1].connect() == ""
        assert other.result() == ""
    serve(pair.source, PROMPTS[:1])
    assert pair.hand_over()[1].imported.states > 0


def test_a_thread_that_is_left_behind_touches_no_pool(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pieces come when the caller has given up, and the engine goes on with its pools."""
    serve(pair.source, PROMPTS[:1])
    asked, come = threading.Event(), threading.Event()
    real, await_futures, caller = MessagePipe.receive, session.await_futures, threading.current_thread()
    left_behind: list[threading.Thread] = []

    def receive(self: MessagePipe, piece: torch.Tensor, free: Any) -> Any:
        left_behind.append(threading.current_thread())
        asked.set()
        assert come.wait(60)
        return real(self, piece, free)

    def wait(futures: Any, timeout_s: float) -> Any:
        """The destination's time is over as soon as it waits for a piece, however slow the machine is."""
        if threading.current_thread() is not caller:
            return await_futures(futures, timeout_s)
        while not (asked.is_set() or futures[0].done()):
            time.sleep(0.001)
        return await_futures(futures, 0.0)

    monkeypatch.setattr(MessagePipe, "receive", receive)
    monkeypatch.setattr(session, "await_futures", wait)
    before = maps_of(pair.target)
    with ThreadPoolExecutor(1) as threads:
        sent = threads.submit(pair.ends[0].send, timeout_s=30.0)
        received = pair.ends[1].receive(timeout_s=30.0)
        assert "gave up after 30 s" in received.failure
        assert maps_of(pair.target) == before
        memory = [tensor.clone() for tensor in pools_of(pair.target).values()]
        come.set()
        left_behind[0].join(60)
        assert not left_behind[0].is_alive()
        assert sent.result().failure  # the thread has ended the connections, too
    assert all(torch.equal(a, b) for a, b in zip(memory, pools_of(pair.target).values(), strict=True))
    monkeypatch.undo()
    serve(pair.target, PROMPTS[:1])


def test_bad_arguments(host: Any) -> None:
    engine, store = engine_of(), client(host)
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: TransferChannel(engine, store, "x", "left"), "side is 'left'; accepted: "),  # type: ignore[arg-type]
        (lambda: TransferChannel(engine, store, "x", "source", transport="rdma"), "transport is 'rdma'"),  # type: ignore[arg-type]
        (lambda: TransferChannel(engine, store, "", "source"), "name is ''"),
        (lambda: TransferChannel(engine, None, "x", "source"), "store is None"),
        (lambda: TransferChannel(engine, store, "x", "source", timeout_s=0), "timeout_s is 0"),
        (lambda: TransferChannel(None, store, "x", "source"), "engine is None"),  # type: ignore[arg-type]
    ]
    with TransferChannel(engine, store, "x", "source") as channel:
        calls += [
            (channel.receive, "side is 'source'; accepted: 'destination'"),
            (lambda: channel.send([5.0]), "prefixes"),  # type: ignore[list-item]
            (lambda: channel.send(timeout_s=-1.0), "timeout_s is -1"),
        ]
        for call, text in calls:
            with pytest.raises(ValueError, match=text.replace("(", r"\(")):
                call()
    with pytest.raises(RuntimeError, match="send is called on a channel that was closed"):
        channel.send()
    channel.close()
    assert left_over(host) == []
