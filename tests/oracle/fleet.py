"""Replicas in this process: engines whose answers break off where a test says so."""

import asyncio
import pickle
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import mambaslots as ms
from mambaslots.fleet.fleet_engine import FleetEngine
from mambaslots.fleet.replica_answers import AnswerPart, EngineRequest, ReplicaLostError, answer_parts
from mambaslots.fleet.replica_reports import ReplicaReport, replica_report
from mambaslots.serve.served_engine import EngineFacts, LocalEngine

SALT_KEY = b"one key of all replicas"


@dataclass
class Replicas:
    """Engines behind a `call` that chooses them in turn.

    Attributes:
        engines: one a replica.
        losses: for the next calls, in their order: after how many tokens the replica is lost; None for none.
        loss_of: the same for a request and the number of its call, where `losses` is empty.
        refusals: errors for the next calls, which refuse their requests.
        requests: what was called so far.
        num_serving: how many replicas there are for the fleet; None for all.
        is_cut: whether parts are cut into single tokens, so that a loss can lie between any two.
    """

    engines: Sequence[ms.DynamicInferenceEngine]
    losses: list[int | None] = field(default_factory=list)
    loss_of: Callable[[EngineRequest, int], int | None] = lambda request, number: None
    refusals: list[Exception] = field(default_factory=list)
    requests: list[EngineRequest] = field(default_factory=list)
    num_serving: int | None = None
    is_cut: bool = True
    model_name: str = "tiny"
    local: list[LocalEngine] = field(init=False)

    def __post_init__(self) -> None:
        self.local = [LocalEngine(engine, model_name=self.model_name) for engine in self.engines]

    def fleet(self, **settings: Any) -> FleetEngine:
        """A fleet over these replicas."""
        engine = self.engines[0]
        return FleetEngine(
            _copied(EngineFacts.of(engine)),
            engine.salt_key,
            self.call,
            num_replicas=lambda: len(self.engines) if self.num_serving is None else self.num_serving,
            reports=self.reports,
            **settings,
        )

    async def call(self, request: EngineRequest) -> AsyncGenerator[AnswerPart]:
        """Serve a request at the next replica, and lose it where `losses` says."""
        number = len(self.requests) % len(self.local)
        loss = self.losses.pop(0) if self.losses else self.loss_of(request, len(self.requests))
        self.requests.append(request)
        if self.refusals:
            yield _copied(AnswerPart(error=self.refusals.pop(0), replica=str(number)))
            return
        num_sent = 0
        parts = answer_parts(self.local[number], _copied(request), str(number))
        try:
            async for part in parts:
                for piece in _pieces(part) if self.is_cut else (part,):
                    if loss is not None and num_sent + len(piece.tokens) > loss:
                        raise ReplicaLostError(f"replica {number} is gone")
                    num_sent += len(piece.tokens)
                    yield _copied(piece)
                if loss is not None and num_sent == loss and part.tokens:
                    raise ReplicaLostError(f"replica {number} is gone")
        finally:
            await parts.aclose()

    async def reports(self) -> list[ReplicaReport]:
        return [_copied(await replica_report(local, f"r{i}", {})) for i, local in enumerate(self.local)]

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Replicas"]:
        """The engines, served. At the end nothing runs, and integrity holds."""
        self.start()
        try:
            yield self
            for _ in range(500):
                if not any(local.num_running + local.num_waiting for local in self.local):
                    break
                await asyncio.sleep(0.01)
        finally:
            await self.close()

    def start(self) -> None:
        for local in self.local:
            local.start()

    async def close(self) -> None:
        """End the engines, and check that nothing runs."""
        for local in self.local:
            await local.close()
        for engine in self.engines:
            stats = engine.stats()
            assert (stats.num_running, stats.num_waiting, stats.cache.num_held_kv_blocks) == (0, 0, 0)
            engine.check_integrity()


def in_fleet[T](replicas: Replicas, use: Callable[[FleetEngine], Any], **settings: Any) -> Any:
    """What the coroutine `use(fleet)` returns, in a loop of its own."""

    async def main() -> Any:
        async with replicas.running():
            fleet = replicas.fleet(**settings)
            fleet.start()
            value = await use(fleet)
            assert await fleet.drain(20)
            assert (fleet.num_running, fleet.num_waiting) == (0, 0)
            assert await fleet.close(20)
            return value

    return asyncio.run(main())


def _pieces(part: AnswerPart) -> Iterator[AnswerPart]:
    """The part, with one token at most in each piece."""
    for i, token in enumerate(part.tokens):
        yield AnswerPart((token,), part.prompt if i == 0 else None)
    if not part.tokens:
        yield part


def _copied[T](value: T) -> T:
    """What another process gets of `value`."""
    copy: T = pickle.loads(pickle.dumps(value))
    return copy
