"""A prefill worker and a decode engine in one process, over a store of their own."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import mambaslots as ms
import mambaslots.net as msd
import msgspec
import zmq
from mambaslots.net.message_sockets import Listener
from mambaslots.net.prefill_decode.prefill_messages import Answer, Beat, Hello, Prefill, Question
from mambaslots.net.transfer.format import TransferError
from oracle.serving import assert_answers
from oracle.transfers import engine_of
from torch.distributed import TCPStore

PATIENCE_S = 60.0
MIN_TOKENS = 16
ASKED = ms.SamplingParams(max_tokens=5, return_log_probs=True)
ADDRESS = "mambaslots/prefill/prefill"


class Place:
    """A store, and clients of it."""

    def __init__(self) -> None:
        self.host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def client(self) -> TCPStore:
        return TCPStore("127.0.0.1", self.host.port, is_master=False)

    @asynccontextmanager
    async def worker(self, engine: ms.DynamicInferenceEngine, **settings: Any) -> AsyncIterator[None]:
        """A prefill worker that serves inside; nothing may be left in its engine afterwards."""
        task = asyncio.create_task(msd.PrefillWorker(engine, self.client(), **settings).serve())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            assert not engine.pins()
            assert not engine.has_unfinished_requests()
            engine.check_integrity()

    @asynccontextmanager
    async def server(
        self, engine: ms.DynamicInferenceEngine, connects: bool = True, **settings: Any
    ) -> AsyncIterator[msd.DisaggregatedEngine]:
        """A decode engine; nothing may be left in it afterwards."""
        settings = {"min_prefill_tokens": MIN_TOKENS} | settings
        async with msd.DisaggregatedEngine(engine, self.client(), **settings) as server:
            assert await server.connected(PATIENCE_S if connects else 0.0) == connects
            yield server
        assert not engine.pins()
        assert not engine.has_unfinished_requests()
        engine.check_integrity()

    @asynccontextmanager
    async def impostor(
        self, behave: Callable[["Impostor"], Coroutine[Any, Any, None]]
    ) -> AsyncIterator[None]:
        """In a worker's place: connects as a worker does, is asked, then does as `behave` says and ends."""
        impostor = Impostor()
        self.host.set(ADDRESS, impostor.listener.address.to_bytes())
        task = asyncio.create_task(impostor.serve(self, behave))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            impostor.listener.close()


class Impostor:
    """Lies to one decode engine at a time."""

    def __init__(self) -> None:
        self.listener = Listener(Question, hosts=("127.0.0.1",))
        self.peer = b""
        self.engine = engine_of()

    async def serve(self, place: Place, behave: Callable[["Impostor"], Coroutine[Any, Any, None]]) -> None:
        """Serve an engine; one that found no answer in time, on a busy machine, comes again."""
        asked: Any = await self.next(Hello)
        while True:
            with msd.TransferChannel(
                self.engine, place.client(), asked.channel, "source", timeout_s=5.0
            ) as channel:
                connecting = asyncio.ensure_future(asyncio.to_thread(channel.connect))
                try:
                    await asyncio.shield(connecting)
                    self.send(Beat())
                except (TransferError, zmq.ZMQError):  # the engine is gone
                    asked = await self.next(Hello)
                    continue
                finally:  # one thread at a time uses the channel: it is closed after this call
                    await asyncio.wait([connecting])
                asked = await self.next((Hello, Prefill))
                if isinstance(asked, Hello):
                    continue
                await behave(self)
            address = self.listener.address
            self.listener.close()
            self.listener = Listener(Question, hosts=("127.0.0.1",))
            assert address != self.listener.address
            place.host.set(ADDRESS, self.listener.address.to_bytes())
            asked = await self.next(Hello)

    async def next(self, kind: Any) -> Any:
        """The next question of this kind."""
        while True:
            await self.listener.await_message(0.5)
            received = self.listener.receive(0.0)
            if received is not None and isinstance(received[1], kind):
                self.peer = received[0]
                return received[1]

    def send(self, answer: Answer | bytes) -> None:
        data = answer if isinstance(answer, bytes) else msgspec.msgpack.encode(answer)
        self.listener._socket.send_multipart([self.peer, data])


async def answers(
    server: ms.AsyncEngine, prompts: Sequence[Sequence[int]], salts: Sequence[bytes | str | None] = ()
) -> list[ms.RequestResult]:
    """The results of prompts that are asked at once, each checked against the recurrence."""
    salts = salts or [None] * len(prompts)
    asking = (
        server.generate(list(prompt), ASKED, cache_salt=salt)
        for prompt, salt in zip(prompts, salts, strict=True)
    )
    results = await asyncio.gather(*asking)
    for prompt, result in zip(prompts, results, strict=True):
        assert len(result.tokens) == ASKED.max_tokens
        assert_answers(prompt, result)
    return list(results)


def run(body: Awaitable[None]) -> None:
    """Run a test's body to its end, or fail."""

    async def patient() -> None:
        await asyncio.wait_for(body, PATIENCE_S)

    asyncio.run(patient())
