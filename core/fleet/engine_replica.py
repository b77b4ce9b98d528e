"""A replica: an engine, in a process that Ray Serve starts, watches and ends."""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from ray import serve

from ..net.routing.state_publisher import StatePublisher
from ..serve.served_engine import EngineFacts, LocalEngine
from .engine_request import AnswerPart, EngineRequest, ReplicaLostError
from .fleet_settings import FleetSettings
from .pulse import Pulse
from .ranks import MakeEngine, Ranks
from .replica_answers import answer_parts
from .replica_report import ReplicaReport, replica_report
from .request_router import BLOCK_SIZE
from .state_channel import HandOver
from .state_feed import StateFeed
from .warming import serve_hand_over, take_over

logger = logging.getLogger(__name__)


class EngineReplica:
    """What Ray Serve deploys as a replica.

    Ray calls the constructor, then `check_health` from time to time. Where the replica has to end, Ray waits
    for its requests before it calls the destructor.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, make_engine: MakeEngine, settings: FleetSettings
    ) -> None:
        """
        Args:
            make_engine: makes the engine of each rank.
            settings: how many requests there may be, and where states are told.
        """
        self._name: str = serve.get_replica_context().replica_id.unique_id
        self._ranks = Ranks(make_engine, settings)
        engine = self._ranks.engine
        self._engine = LocalEngine(
            engine,
            model_name=settings.model_name,
            max_waiting_requests=10 * settings.max_requests,  # Ray sends fewer
            trace=_print_line if settings.trace else None,
        )
        self._engine.start()
        self._feed = StateFeed(
            self._name,
            settings.channel,
            self._engine.engine,
            StatePublisher(engine, self._name) if engine.config.enable_prefix_caching else None,
            self._serve_hand_over,
        )
        self._telling = asyncio.create_task(self._feed.run())
        self._watching = asyncio.create_task(self._end_when_lost())
        self._warm_timeout_s = settings.warm_timeout_s
        if settings.warm_timeout_s and engine.config.enable_prefix_caching:
            await take_over(self._name, settings.channel, self._engine.engine, settings.warm_timeout_s)

    async def stream(self, request: EngineRequest) -> AsyncIterator[AnswerPart]:
        """Answer a request; a caller that closes the stream cancels it."""
        self._feed.wake()
        try:
            answer: Any = answer_parts(self._engine, request, self._name)
            async with aclosing(answer) as parts:
                async for part in parts:
                    yield part
        except ReplicaLostError as error:
            if self._engine.failure is not None or (self._ranks.are_others and error.__cause__ is not None):
                self._end_process(error)  # a split engine that failed is broken
            raise
        finally:
            self._feed.wake()

    async def facts(self) -> EngineFacts:
        """What does not change."""
        return self._engine.facts

    async def pulse(self) -> Pulse:
        """That the replica is there."""
        processes = (os.getpid(), *await self._ranks.processes())
        return Pulse(self._name, socket.gethostname(), processes, self._engine.num_running)

    async def report(self) -> ReplicaReport:
        """The replica's figures now."""
        return await replica_report(self._engine, self._name)

    def record_replica_metadata(self) -> dict[str, Any]:
        """What routers need to know of the replica; Ray gives it to them."""
        return {BLOCK_SIZE: self._engine.facts.block_size_tokens}

    async def check_health(self) -> None:
        """Raise what the engine's thread has given up for; Ray then starts another replica instead."""
        failure = self._engine.failure
        if failure is not None:
            raise RuntimeError(f"the engine of replica {self._name} has given up") from failure

    async def _end_when_lost(self) -> None:
        """End this process where the engine has given up, or a rank is lost."""
        lost = asyncio.create_task(self._ranks.lost()) if self._ranks.are_others else None
        while self._engine.failure is None and (lost is None or not lost.done()):
            await asyncio.sleep(0.1)
        self._end_process(self._engine.failure if lost is None or not lost.done() else lost.result())

    def _end_process(self, reason: BaseException | None) -> None:
        """End at once. Ray sees that, sends no more requests here, and whoever waits for an answer asks
        another replica. A replica that raised errors would get more requests, because its queue is short.
        """
        logger.error("mambaslots: replica %s is lost: %s", self._name, reason)
        logging.shutdown()
        os._exit(1)

    def __del__(self) -> None:
        """Ray has waited for the requests; the engine's thread ends with the process."""
        feed = getattr(self, "_feed", None)
        if feed is not None:
            feed.leave()

    async def _serve_hand_over(self, order: HandOver) -> None:
        await serve_hand_over(self._engine.engine, order, self._warm_timeout_s)


def _print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
