"""Prefill workers that end, freeze or lie: the decode engine answers all the same, within a bounded time."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import mambaslots.net as msd
import msgspec
import pytest
import zmq
from mambaslots.net import message_sockets
from mambaslots.net.message_sockets import Address, Link, Listener, PeerLostError
from mambaslots.net.prefill_decode import prefill_client, prefill_messages
from mambaslots.net.prefill_decode.prefill_messages import (
    PROTOCOL_VERSION,
    Answer,
    Beat,
    Cancel,
    Computed,
    End,
    Hello,
    Prefill,
    Refused,
)
from oracle.disaggregated import ADDRESS, PATIENCE_S, Impostor, Place, answers, run
from oracle.serving import random_tokens
from oracle.transfers import engine_of

PROMPT = random_tokens(70, seed=7)
MAX_BYTES = 8 << 20
TIMEOUTS = {"timeout_s": 1.0, "silence_s": 0.6, "hand_over_timeout_s": 0.5}


@pytest.fixture
def place() -> Place:
    return Place()


def says(*answers: Answer | bytes) -> Callable[[Impostor], Awaitable[None]]:
    async def behave(impostor: Impostor) -> None:
        for answer in answers:
            impostor.send(answer)
        await asyncio.sleep(2.0)

    return behave


async def ends(impostor: Impostor) -> None:
    pass


async def only_beats(impostor: Impostor) -> None:
    for _ in range(20):
        impostor.send(Beat())
        await asyncio.sleep(0.1)


BEHAVIOURS = {
    "ends": ends,
    "writes garbage": says(b"\x00\xff{[\n"),
    "is silent": says(),
    "only beats": only_beats,
    "sends what is no answer": says(msgspec.msgpack.encode(Cancel(0))),
    "sends no struct": says(msgspec.msgpack.encode([1])),
    "sends a message of protocol 1": says(msgspec.msgpack.encode({"type": "Sent", "number": 0, "bytes": 1})),
    "sends nothing after its announcement": says(Computed(0)),
    "announces what was not asked for": says(Computed(5)),
    "announces no number": says(msgspec.msgpack.encode({"type": "Computed", "number": "x"})),
    "refuses for no reason": says(msgspec.msgpack.encode({"type": "Refused", "number": 0})),
    "refuses what was not asked for": says(Refused(7, "so")),
    "sends more than a message": says(bytes(MAX_BYTES + 1)),
    "serves no more": says(End("it is tired")),
}


@pytest.fixture(autouse=True)
def _small_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_sockets, "MAX_BYTES", MAX_BYTES)


@pytest.mark.parametrize("behaviour", list(BEHAVIOURS))
def test_an_impostor_costs_time_and_no_answer(place: Place, behaviour: str) -> None:
    async def body() -> None:
        decode = engine_of()
        async with place.impostor(BEHAVIOURS[behaviour]), place.server(decode, **TIMEOUTS) as server:
            began = time.monotonic()
            results = await answers(server, [PROMPT, random_tokens(12, seed=1)])
            assert time.monotonic() - began < 15.0  # one that is waited for costs 60 s
            assert [result.num_resumed_tokens for result in results] == [0, 0]
            assert server.prefills.missed == 1

    run(body())


@pytest.mark.parametrize("behaviour", ["sends nothing after its announcement", "announces no number"])
def test_a_lie_ends_the_wait_at_once(place: Place, behaviour: str) -> None:
    """The question that the lie answers is given up with all others, and does not wait for its timeout."""

    async def body() -> None:
        timeouts = {"timeout_s": PATIENCE_S, "silence_s": PATIENCE_S, "hand_over_timeout_s": 0.5}
        async with place.impostor(BEHAVIOURS[behaviour]), place.server(engine_of(), **timeouts) as server:
            began = time.monotonic()
            await answers(server, [PROMPT])
            assert time.monotonic() - began < PATIENCE_S / 2
            assert server.prefills.missed == 1

    run(body())


def test_a_worker_that_comes_later_is_found(place: Place) -> None:
    async def body() -> None:
        async with place.server(engine_of(), connects=False) as server:
            (result,) = await answers(server, [random_tokens(60, seed=1)])
            assert (result.num_resumed_tokens, server.prefills.missed) == (0, 1)
            async with place.impostor(ends):
                assert await server.connected(PATIENCE_S)
                (result,) = await answers(server, [random_tokens(60, seed=2)])
                assert (result.num_resumed_tokens, server.prefills.missed) == (0, 2)
            async with place.worker(engine_of()):
                assert await server.connected(PATIENCE_S)
                (result,) = await answers(server, [random_tokens(60, seed=3)])
                assert result.num_resumed_tokens == 56
            (result,) = await answers(server, [random_tokens(60, seed=4)])
            assert result.num_resumed_tokens == 0

    run(body())


ADDRESSES = (
    "",
    "[]",
    "{}",
    '{"hosts": "x", "port": 1, "key": ""}',
    '{"hosts": ["127.0.0.1"], "port": 1, "key": ""}',
)


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_that_leads_nowhere(place: Place, address: str) -> None:
    async def body() -> None:
        place.host.set(ADDRESS, address)
        async with place.server(engine_of(), connects=False) as server:
            await answers(server, [PROMPT])
            assert not await server.connected(0.1)
            async with place.worker(engine_of()):
                assert await server.connected(PATIENCE_S)

    run(body())


HELLO = msgspec.msgpack.encode(Hello(PROTOCOL_VERSION, "no channel of a decode engine"))
ASKS = (
    b"\xff\x00", msgspec.msgpack.encode([]), msgspec.msgpack.encode({}), b"",
    msgspec.msgpack.encode(Prefill(0, PROMPT, None)), msgspec.msgpack.encode(Hello(0, "")),
    bytes(MAX_BYTES + 1),
)  # fmt: skip
ASKS_LATER = (
    b"\xff\x00", msgspec.msgpack.encode({"type": "Prefill", "number": 0}), HELLO,
    msgspec.msgpack.encode({"type": "Prefill", "number": 0, "tokens": "x", "salt": None}),
    msgspec.msgpack.encode({"type": "Cancel", "number": "x"}), b"\x91" * 100_000,
)  # fmt: skip


@pytest.mark.parametrize("greets", [False, True])
def test_a_worker_survives_what_connects(place: Place, greets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_messages, "CONNECT_TIMEOUT_S", 0.1)

    async def body() -> None:
        async with place.worker(engine_of()), place.server(engine_of()) as server:
            address = Address.from_bytes(await asyncio.to_thread(place.client().get, ADDRESS))
            for garbage in ASKS_LATER if greets else ASKS:
                link = Link(address, Answer, PATIENCE_S)
                if greets:
                    link._socket.send(HELLO)
                link._socket.send(garbage)
                await asyncio.sleep(0.05)
                with suppress(PeerLostError):
                    while (received := link.receive(0.0)) is not None:
                        assert isinstance(received[0], End)
                link.close()
            (result,) = await answers(server, [PROMPT])
            assert result.num_resumed_tokens == 64

    run(body())


def test_a_worker_of_another_protocol_is_a_miss_that_says_so(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_client.messages, "PROTOCOL_VERSION", 7)

    async def body() -> None:
        async with place.worker(engine_of()), place.server(engine_of(), connects=False) as server:
            while "its protocol is 7; accepted: 2" not in (missed := await server.prefill(PROMPT)).failure:
                assert missed.failure
                await asyncio.sleep(0.05)
            assert (await answers(server, [PROMPT]))[0].num_resumed_tokens == 0

    run(body())


def test_a_stranger_does_not_connect(place: Place) -> None:
    async def body() -> None:
        async with place.worker(engine_of()):
            address = Address.from_bytes(await asyncio.to_thread(place.client().get, ADDRESS))
            other = msgspec.structs.replace(address, key=zmq.curve_keypair()[0].decode())
            with pytest.raises(PeerLostError, match="cannot be reached"):
                Link(other, Answer, 0.3)

    run(body())


def test_a_prompt_outside_the_vocabulary_is_refused(place: Place) -> None:
    async def body() -> None:
        async with place.worker(engine_of()), place.server(engine_of()) as server:
            answer = await server._client.prefill([999] * 32, None)
            assert "refuses" in answer.failure
            empty = await server._client.prefill([], None)
            assert "refuses" in empty.failure
            assert (await answers(server, [PROMPT]))[0].num_resumed_tokens == 64

    run(body())


WORKER = """
import asyncio, sys
sys.path[:0] = sys.argv[2:]
import torch
torch.set_num_threads(1)
from mambaslots.net import PrefillWorker
from oracle.transfers import engine_of
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
asyncio.run(PrefillWorker(engine_of(), store).serve())
"""


@pytest.mark.long
def test_a_process_that_freezes_goes_on_and_is_killed(place: Place) -> None:
    path = [entry for entry in sys.path if entry]

    async def body() -> None:
        async with place.server(engine_of(), connects=False, silence_s=1.5) as server:
            command = [sys.executable, "-c", WORKER, str(place.host.port), *path]
            with subprocess.Popen(command) as process:
                try:
                    assert await server.connected(PATIENCE_S)
                    (result,) = await answers(server, [random_tokens(60, seed=1)])
                    assert result.num_resumed_tokens == 56
                    os.kill(process.pid, signal.SIGSTOP)
                    began = time.monotonic()
                    results = await answers(server, [random_tokens(60, seed=seed) for seed in (2, 3)])
                    assert [result.num_resumed_tokens for result in results] == [0, 0]
                    assert time.monotonic() - began < 10
                    os.kill(process.pid, signal.SIGCONT)
                    assert await server.connected(PATIENCE_S)
                    (result,) = await answers(server, [random_tokens(60, seed=4)])
                    assert result.num_resumed_tokens == 56
                    asking = asyncio.create_task(answers(server, [random_tokens(200, seed=5)]))
                    await asyncio.sleep(0.02)
                    process.kill()
                    await asking
                finally:
                    process.kill()
            missed = server.prefills.missed
            (result,) = await answers(server, [random_tokens(60, seed=6)])
            assert (result.num_resumed_tokens, server.prefills.missed) == (0, missed + 1)

    run(body())


def test_a_worker_that_is_cancelled_twice_closes_its_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop cancels tasks that are left, and among them a worker whose sessions are ending."""
    listeners = []

    def listen(*args: Any, **settings: Any) -> Listener:
        listeners.append(Listener(*args, **settings))
        return listeners[-1]

    monkeypatch.setattr("mambaslots.net.prefill_decode.prefill_worker.Listener", listen)

    async def main() -> None:
        place = Place()
        worker = asyncio.create_task(msd.PrefillWorker(engine_of(), place.client()).serve())
        async with place.server(engine_of()):
            pass
        worker.cancel()

    asyncio.run(main())
    assert [listener._socket.closed for listener in listeners] == [True]
