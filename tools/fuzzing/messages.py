"""Messages between processes of one service: prefill and decode, leading and following ranks,
replicas and clients.

Each connection ends in a documented way, whatever the other side sends, and holds nothing afterwards.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
from fuzzing.engines import OWN, SENT, WarmEngine, quiet
from fuzzing.target import ACCEPTED, REFUSED, any_json, any_value, damaged_bytes, damaged_json
from mambaslots.errors import KVBlockCapacityError, QueueFullError
from mambaslots.fleet.replica_answers import EngineRequest, ReplicaLostError, answer_parts
from mambaslots.inference.engines.async_engine import AsyncEngine
from mambaslots.net.lockstep.call_messages import Failure, Hello, Outcome
from mambaslots.net.message_sockets import Link, Listener, PeerLostError
from mambaslots.net.prefill_decode import prefill_messages
from mambaslots.net.prefill_decode.prefill_client import PrefillClient, RemotePrefill
from mambaslots.net.prefill_decode.prefill_messages import Answer, Cancel, Computed, Prefill, Question
from mambaslots.net.prefill_decode.prefill_worker import PrefillSession, PromptRoom
from mambaslots.net.transfer.hand_over import SendReport
from mambaslots.net.transfer.placement import ImportReport
from mambaslots.params_and_results import SamplingParams
from mambaslots.serve.served_engine import LocalEngine

_WAIT_S = 5.0


@dataclass(frozen=True)
class Sent:
    """What a peer sends: `kind` is "good" where nothing is wrong with it."""

    kind: str
    messages: tuple[bytes, ...]


def draw_messages(random: Random, good: list[Any]) -> Sent:
    """Messages, of which some are damaged."""
    if random.random() < 0.1:
        return Sent("good", tuple(map(msgspec.msgpack.encode, good)))
    messages = []
    for _ in range(random.choice((1, 2, 5))):
        message = msgspec.to_builtins(random.choice(good))
        way = random.randrange(5)
        if way == 0:
            message = damaged_json(random, message)
        elif way == 1:
            message = any_json(random)
        try:
            data = msgspec.msgpack.encode(message)
        except (OverflowError, ValueError):  # large integers, half characters
            data = b"\xc1"
        messages.append(damaged_bytes(random, data) if way == 2 else data)
    return Sent("damaged", tuple(messages))


class _End:
    """In place of a `Link` whose peer sends `messages` and ends."""

    def __init__(self, messages: tuple[bytes, ...]) -> None:
        self._messages = iter(messages)

    def receive(self, timeout_s: float) -> tuple[Any, None]:
        try:
            return msgspec.msgpack.decode(next(self._messages), type=Answer), None
        except (StopIteration, msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError) as error:
            raise PeerLostError(str(error)) from error

    def send(self, message: object) -> None:
        pass


class Sessions:
    """What a decode engine asks of a prefill worker."""

    name = "prefill questions"
    documented: tuple[type[BaseException], ...] = (PeerLostError,)

    def __init__(self) -> None:
        self._warm = WarmEngine(OWN)
        self._good = [Prefill(0, SENT[0][:16], None), Prefill(1, SENT[2][:24], b"\0\xff"), Cancel(0)]

    def draw(self, random: Random) -> Sent:
        return draw_messages(random, self._good)

    def size_of(self, drawn: object) -> int:
        assert isinstance(drawn, Sent)
        return sum(map(len, drawn.messages))

    @quiet()
    def feed(self, drawn: object) -> str:
        assert isinstance(drawn, Sent)
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

    async def _served(self, drawn: Sent) -> str:
        engine = self._warm.engine
        listener = Listener(Question, hosts=("127.0.0.1",))
        link = Link(listener.address, Answer, _WAIT_S)
        try:
            async with AsyncEngine(engine) as server:
                room = PromptRoom(
                    engine.context.prefix_cache.kv_blocks.total_count, 4, engine.config.block_size_tokens
                )
                free = room._free_blocks, room._free_prompts
                channel: Any = SimpleNamespace(send=lambda *_, **__: SendReport(states=1, bytes=1))
                for message in drawn.messages:
                    link._socket.send(message)
                num_asked = 0
                session = None
                while (received := listener.receive(0.02)) is not None:
                    session = session or PrefillSession(server, room, None, listener, received[0])  # type: ignore[arg-type]
                    session.questions.put_nowait(received[1])
                    num_asked += isinstance(received[1], Prefill)
                if session is None:
                    return REFUSED
                answering = asyncio.create_task(session.answer(channel))
                until = time.monotonic() + _WAIT_S / 2
                while num_asked and not answering.done() and time.monotonic() < until:
                    answer = link.receive(0.0)
                    num_asked -= answer is not None and not isinstance(answer[0], Computed)
                    await asyncio.sleep(0.001)
                answering.cancel()
                await asyncio.gather(answering, return_exceptions=True)
                assert (room._free_blocks, room._free_prompts) == free, "a prompt that is gone has its room"
        finally:
            link.close()
            listener.close()
        return ACCEPTED if drawn.kind == "good" else REFUSED


class Clients:
    """What a prefill worker answers to a decode engine."""

    name = "prefill answers"
    documented: tuple[type[BaseException], ...] = (PeerLostError,)

    def __init__(self) -> None:
        self._good = [Computed(0), Computed(1), prefill_messages.Beat()]

    def draw(self, random: Random) -> Sent:
        good = [*self._good, prefill_messages.Refused(1, "so"), prefill_messages.End("so")]
        return draw_messages(random, self._good if random.random() < 0.3 else good)

    def size_of(self, drawn: object) -> int:
        assert isinstance(drawn, Sent)
        return sum(map(len, drawn.messages))

    @quiet()
    def feed(self, drawn: object) -> str:
        assert isinstance(drawn, Sent)
        return asyncio.run(asyncio.wait_for(self._fed(drawn), _WAIT_S))

    async def _fed(self, drawn: Sent) -> str:
        async def call(function: Callable[[Any], Any]) -> Any:
            return function(None)

        client = PrefillClient(call, None, "fuzz", silence_s=1.0, hand_over_timeout_s=1.0)  # type: ignore[arg-type]
        link: Any = _End(drawn.messages)
        client._link = link
        channel: Any = SimpleNamespace(receive=ImportReport, num_bytes=5)
        asked = [asyncio.create_task(client.prefill([1, 2, 3], None)) for _ in range(2)]
        await asyncio.sleep(0)
        why = ""
        try:
            while True:  # as `run` does
                await client._handle(await client._next_answer(link), channel)
        except PeerLostError as lost:
            why = str(lost) or "it has ended"
        assert why
        client.give_up(why)
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
            "request_id": "r", "prompt": tuple(SENT[0]), "num_given_tokens": 0,
            "sampling": SamplingParams(max_tokens=2, seed=1), "cache_salt": None, "plan": None,
            "tenant": None,
        }  # fmt: skip
        for _ in range(random.choice((0, 1, 1, 2))):
            name = random.choice(
                ["prompt", "prompt", "num_given_tokens", "sampling", "cache_salt", "plan", "tenant"]
            )
            fields[name] = any_value(random)
            if name == "prompt" and random.random() < 0.6:
                fields[name] = (*SENT[0][: random.randrange(20)], any_value(random))
            if name == "num_given_tokens" and random.random() < 0.6:
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
        assert last.finish_reason is not None
        return ACCEPTED
