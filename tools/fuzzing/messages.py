"""Messages between processes of one service: prefill and decode, leading and following ranks,
replicas and clients.

Each connection ends in a documented way, whatever the other side sends, and holds nothing afterwards.
"""

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
from fuzzing.engines import OWN, SENT, WarmEngine, quiet
from fuzzing.target import ACCEPTED, REFUSED, any_json, any_value, damaged_bytes, damaged_json
from mambaslots.errors import KVBlockCapacityError, QueueFullError
from mambaslots.fleet.answers import EngineRequest, ReplicaLostError, answer_parts
from mambaslots.inference.engines.async_engine import AsyncEngine
from mambaslots.net.channel import Link, Listener
from mambaslots.net.lockstep.following import Failure, Hello, Outcome
from mambaslots.net.prefill_decode.message_stream import MAX_LINE_BYTES, MessageStream, PeerLostError
from mambaslots.net.prefill_decode.prefill_client import PrefillClient, RemotePrefill
from mambaslots.net.prefill_decode.prefill_session import PrefillSession, PromptRoom
from mambaslots.net.prefill_decode.prefix_computer import PrefixComputer
from mambaslots.net.transfer.hand_over import SendReport
from mambaslots.net.transfer.import_ import ImportReport
from mambaslots.request import SamplingParams
from mambaslots.serve.served_engine import LocalEngine

_WAIT_S = 5.0


@dataclass(frozen=True)
class Lines:
    """What a peer sends: `kind` is "good" where nothing is wrong with it."""

    kind: str
    data: bytes


def draw_lines(random: Random, good: list[Any]) -> Lines:
    """Lines of JSON, of which some are damaged."""
    if random.random() < 0.1:
        return Lines("good", b"".join(json.dumps(message).encode() + b"\n" for message in good))
    messages = [random.choice(good) for _ in range(random.choice((1, 2, 5)))]
    lines = []
    for message in messages:
        way = random.randrange(5)
        if way == 0:
            message = damaged_json(random, message)
        elif way == 1:
            message = any_json(random)
        line = json.dumps(message).encode("utf-8", "surrogatepass") + b"\n"
        lines.append(damaged_bytes(random, line) if way == 2 else line)
    return Lines("damaged", b"".join(lines))


class _Writer:
    """Takes what is sent; `lines` are the messages."""

    def __init__(self) -> None:
        self.sent = b""
        self.transport = SimpleNamespace(abort=lambda: None)

    def write(self, data: bytes) -> None:
        self.sent += data

    async def drain(self) -> None:
        pass


def stream_of(data: bytes) -> tuple[MessageStream, _Writer]:
    """A stream whose peer sends `data` and ends."""
    reader, writer = asyncio.StreamReader(limit=MAX_LINE_BYTES), _Writer()
    reader.feed_data(data)
    reader.feed_eof()
    return MessageStream(reader, writer), writer  # type: ignore[arg-type]


class Sessions:
    """What a decode engine asks of a prefill worker."""

    name = "prefill questions"
    documented: tuple[type[BaseException], ...] = (PeerLostError,)

    def __init__(self) -> None:
        self._warm = WarmEngine(OWN)
        self._good = [
            {"prefill": 0, "tokens": SENT[0][:16], "salt": None},
            {"prefill": 1, "tokens": SENT[2][:24], "salt": "00ff"},
            {"cancel": 0},
        ]

    def draw(self, random: Random) -> Lines:
        return draw_lines(random, self._good)

    def size_of(self, drawn: object) -> int:
        assert isinstance(drawn, Lines)
        return len(drawn.data)

    @quiet()
    def feed(self, drawn: object) -> str:
        assert isinstance(drawn, Lines)
        try:
            end = asyncio.run(asyncio.wait_for(self._served(drawn), _WAIT_S))
            engine = self._warm.engine
            engine.check_integrity()
            assert not engine.has_unfinished_requests()
            assert not engine.pins()
            assert engine.stats().cache.num_held_kv_blocks == 0
        finally:
            self._warm.renew()
        return end

    async def _served(self, drawn: Lines) -> str:
        engine = self._warm.engine
        async with AsyncEngine(engine) as server:
            room = PromptRoom(engine.context.prefix_cache.kv_blocks.total_count, 4)
            free = room._free_blocks, room._free_prompts
            stream, writer = stream_of(drawn.data)
            channel: Any = SimpleNamespace(send=lambda *_, **__: SendReport(states=1, bytes=1))
            computer = PrefixComputer(server, engine)
            with suppress(PeerLostError):
                await PrefillSession(server, computer, room, 8, stream, channel).serve()
            assert (room._free_blocks, room._free_prompts) == free, "a prompt that is gone has its room"
        messages = [json.loads(line) for line in writer.sent.splitlines()]
        assert all({"computed", "sent", "refused"} & message.keys() for message in messages)
        return ACCEPTED if drawn.kind == "good" else REFUSED


class Clients:
    """What a prefill worker answers to a decode engine."""

    name = "prefill answers"
    documented: tuple[type[BaseException], ...] = (PeerLostError,)

    def __init__(self) -> None:
        self._good = [
            {"computed": 0},
            {"sent": 0, "bytes": 5},
            {"computed": 1},
            {"sent": 1, "bytes": 0},
            {"beat": True},
        ]

    def draw(self, random: Random) -> Lines:
        good = [*self._good, {"refused": 1, "why": "so"}]
        return draw_lines(random, self._good if random.random() < 0.3 else good)

    def size_of(self, drawn: object) -> int:
        assert isinstance(drawn, Lines)
        return len(drawn.data)

    @quiet()
    def feed(self, drawn: object) -> str:
        assert isinstance(drawn, Lines)
        return asyncio.run(asyncio.wait_for(self._fed(drawn), _WAIT_S))

    async def _fed(self, drawn: Lines) -> str:
        async def call(function: Callable[[Any], Any]) -> Any:
            return function(None)

        client = PrefillClient(call, None, "fuzz", silence_s=1.0, hand_over_timeout_s=1.0)  # type: ignore[arg-type]
        stream, _ = stream_of(drawn.data)
        client._stream = stream
        channel: Any = SimpleNamespace(receive=ImportReport)
        asked = [asyncio.create_task(client.prefill([1, 2, 3], None)) for _ in range(2)]
        await asyncio.sleep(0)
        why = ""
        try:
            await client._listen(stream, channel)
        except PeerLostError as lost:
            why = str(lost)
        assert why
        client._forget(why)  # as `run` does
        answers = await asyncio.gather(*asked)
        assert all(isinstance(answer, RemotePrefill) for answer in answers)
        assert not client._pending
        return ACCEPTED if not any(answer.failure for answer in answers) else REFUSED


class Answers:
    """What a process sends that may connect to the leading rank of a split model."""

    name = "lockstep connections"
    documented: tuple[type[BaseException], ...] = ()

    def __init__(self) -> None:
        self._good = [
            Hello(1),
            Outcome(),
            Outcome("ValueError", "so", True),
            Failure("ended with KeyError()"),
        ]

    def draw(self, random: Random) -> tuple[str, bytes]:
        data = msgspec.msgpack.encode(random.choice(self._good))
        kind = random.choice(("good", "damaged", "damaged", "any"))
        if kind == "damaged":
            data = damaged_bytes(random, data)
        elif kind == "any":
            data = random.randbytes(random.choice((1, 2, 35, 500)))
        return kind, data

    def size_of(self, drawn: object) -> int:
        assert isinstance(drawn, tuple)
        return len(drawn[1])

    @quiet()
    def feed(self, drawn: object) -> str:
        assert isinstance(drawn, tuple)
        kind, data = drawn
        listener = Listener(Hello | Outcome | Failure, hosts=("127.0.0.1",))
        link = Link(listener.address, Hello, _WAIT_S)
        try:
            link._socket.send(data or b"\0")
            received = listener.receive(_WAIT_S if kind == "good" else 0.05)
            assert received is not None or kind != "good"
            return REFUSED if received is None else ACCEPTED
        finally:
            link.close()
            listener.close()


class FleetRequests:
    """Requests that a replica of a fleet gets: any value in any field."""

    name = "fleet requests"
    documented: tuple[type[BaseException], ...] = (ReplicaLostError,)
    _REFUSALS = (ValueError, QueueFullError, KVBlockCapacityError)

    def __init__(self) -> None:
        self._warm = WarmEngine(OWN)

    def draw(self, random: Random) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "request_id": "r", "prompt": tuple(SENT[0]), "num_generated": 0,
            "sampling": SamplingParams(num_tokens_to_generate=2, seed=1), "cache_salt": None, "plan": None,
            "tenant": None,
        }  # fmt: skip
        for _ in range(random.choice((0, 1, 1, 2))):
            name = random.choice(
                ["prompt", "prompt", "num_generated", "sampling", "cache_salt", "plan", "tenant"]
            )
            fields[name] = any_value(random)
            if name == "prompt" and random.random() < 0.6:
                fields[name] = (*SENT[0][: random.randrange(20)], any_value(random))
            if name == "num_generated" and random.random() < 0.6:
                fields[name] = random.choice((-1, 1, 2, 33, 34, 2**31, 2**63, True))
        return fields

    def size_of(self, drawn: object) -> int:
        return len(repr(drawn))

    @quiet()
    def feed(self, drawn: object) -> str:
        assert isinstance(drawn, dict)
        try:
            end = asyncio.run(asyncio.wait_for(self._answered(EngineRequest(**drawn)), _WAIT_S))
            self._warm.engine.check_integrity()
            assert not self._warm.engine.has_unfinished_requests()
        finally:
            self._warm.renew()
        return end

    async def _answered(self, request: EngineRequest) -> str:
        local = LocalEngine(self._warm.engine, model_name="tiny")
        local.start()
        last = None
        try:
            async for part in answer_parts(local, request, "a"):
                last = part
        except ReplicaLostError:
            return REFUSED
        finally:
            await local.close()
        assert last is not None
        if last.error is not None:
            assert isinstance(last.error, self._REFUSALS), repr(last.error)
            return REFUSED
        assert last.end is not None
        return ACCEPTED
