"""Prefill workers that end, freeze or lie: the decode engine answers all the same, within a bounded time."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import pytest
from mambaslots.net.prefill_decode.message_stream import MessageStream
from oracle.disaggregated import PATIENCE_S, Place, answers, run
from oracle.serving import random_tokens
from oracle.transfers import engine_of

PROMPT = random_tokens(70, seed=7)
TIMEOUTS = {"timeout_s": 1.0, "silence_s": 0.6, "hand_over_timeout_s": 0.5}


@pytest.fixture
def place() -> Place:
    return Place()


def says(*messages: object) -> Callable[[MessageStream], Awaitable[None]]:
    async def behave(stream: MessageStream) -> None:
        await stream.receive(PATIENCE_S)
        for message in messages:
            await stream.send(message, PATIENCE_S)  # type: ignore[arg-type]
        await asyncio.sleep(2.0)

    return behave


async def leaves(stream: MessageStream) -> None:
    await stream.receive(PATIENCE_S)


async def writes_garbage(stream: MessageStream) -> None:
    await stream.receive(PATIENCE_S)
    stream._writer.write(b"\x00\xff{[\n" * 10)
    await asyncio.sleep(2.0)


async def ends_within_a_line(stream: MessageStream) -> None:
    await stream.receive(PATIENCE_S)
    stream._writer.write(b'{"beat": tr')
    await stream._writer.drain()


async def only_beats(stream: MessageStream) -> None:
    await stream.receive(PATIENCE_S)
    for _ in range(20):
        await stream.send({"beat": True}, PATIENCE_S)
        await asyncio.sleep(0.1)


BEHAVIOURS = {
    "leaves": leaves,
    "writes garbage": writes_garbage,
    "ends within a line": ends_within_a_line,
    "is silent": says(),
    "only beats": only_beats,
    "sends no object": says([1]),
    "sends what is no message": says({"what": 1}),
    "has sent what did not come": says({"sent": 0, "bytes": 1}),
    "has sent bytes that are no number": says({"sent": 0, "bytes": "x"}),
    "sends nothing behind its announcement": says({"computed": 0}),
    "announces what was not asked for": says({"computed": 5}),
    "announces no number": says({"computed": "x"}),
    "refuses for no reason": says({"refused": 0}),
    "refuses what was not asked for": says({"refused": 7}),
}


@pytest.mark.parametrize("behaviour", list(BEHAVIOURS))
def test_an_impostor_costs_time_and_no_answer(place: Place, behaviour: str) -> None:
    async def body() -> None:
        decode = engine_of()
        async with place.impostor(BEHAVIOURS[behaviour]), place.server(decode, **TIMEOUTS) as server:
            began = time.monotonic()
            results = await answers(server, [PROMPT, random_tokens(12, seed=1)])
            assert time.monotonic() - began < 5.0
            assert [result.num_resumed_tokens for result in results] == [0, 0]
            assert server.prefills.missed == 1

    run(body())


@pytest.mark.parametrize("behaviour", ["has sent what did not come", "has sent bytes that are no number"])
def test_a_lie_ends_the_wait_at_once(place: Place, behaviour: str) -> None:
    """The question that the lie answers is given up with all others, and does not wait for its timeout."""

    async def body() -> None:
        timeouts = {"timeout_s": 8.0, "silence_s": 6.0, "hand_over_timeout_s": 0.5}
        async with place.impostor(BEHAVIOURS[behaviour]), place.server(engine_of(), **timeouts) as server:
            began = time.monotonic()
            await answers(server, [PROMPT])
            assert time.monotonic() - began < 5.0
            assert server.prefills.missed == 1

    run(body())


def test_a_worker_that_comes_later_is_found(place: Place) -> None:
    async def body() -> None:
        async with place.server(engine_of(), connects=False) as server:
            (result,) = await answers(server, [random_tokens(60, seed=1)])
            assert (result.num_resumed_tokens, server.prefills.missed) == (0, 1)
            async with place.impostor(leaves):
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
    '{"host": 3, "port": 1, "secret": ""}',
    '{"host": "127.0.0.1", "port": 1, "secret": ""}',
)


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_that_leads_nowhere(place: Place, address: str) -> None:
    async def body() -> None:
        place.host.set("mambaslots/prefill/prefill", address)
        async with place.server(engine_of(), connects=False) as server:
            await answers(server, [PROMPT])
            assert not await server.connected(0.1)
            async with place.worker(engine_of()):
                assert await server.connected(PATIENCE_S)

    run(body())


ASKS = (
    b"\xff\x00\n", b"[]\n", b"{}\n", b'{"secret": 3}\n', b'{"secret": "\\ud800"}\n',
    b'{"secret": "' + b"0" * 32 + b'"}\n', b"",
)  # fmt: skip
ASKS_LATER = (
    b"\xff\x00\n", b"{}\n", b'{"prefill": 0}\n', b'{"prefill": 0, "tokens": "x", "salt": null}\n',
    b'{"prefill": 0, "tokens": [1], "salt": "no digits"}\n', b'{"cancel": "x"}\n', b"[" * 100_000 + b"\n",
)  # fmt: skip


@pytest.mark.parametrize("greets", [False, True])
def test_a_worker_survives_any_client(place: Place, greets: bool) -> None:
    async def body() -> None:
        async with place.worker(engine_of()), place.server(engine_of()) as server:
            address = await asyncio.to_thread(lambda: place.client().get("mambaslots/prefill/prefill"))
            where = json.loads(address)
            for garbage in ASKS_LATER if greets else ASKS:
                reader, writer = await asyncio.open_connection(where["host"], where["port"])
                if greets:
                    writer.write(json.dumps({"secret": where["secret"]}).encode() + b"\n")
                    while b"channel" not in (line := await reader.readline()):
                        assert b"beat" in line
                writer.write(garbage)
                if not garbage:
                    writer.close()
                rest = await asyncio.wait_for(reader.read(), PATIENCE_S)
                assert b"computed" not in rest
                writer.close()
            (result,) = await answers(server, [PROMPT])
            assert result.num_resumed_tokens == 64

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
