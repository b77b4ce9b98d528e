"""A replica: an engine, in a process that Ray Serve starts, watches and ends."""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from ray import serve

from ..distributed.routing.state_publisher import StatePublisher
from ..inference.engines.dynamic_engine import DynamicInferenceEngine
from ..serve.local_engine import LocalEngine
from ..serve.served_engine import EngineFacts
from .engine_request import AnswerPart, EngineRequest
from .fleet_settings import FleetSettings
from .pulse import Pulse
from .replica_answers import answer_parts
from .replica_report import ReplicaReport
from .request_router import BLOCK_SIZE
from .state_feed import StateFeed

logger = logging.getLogger(__name__)

MakeEngine = Callable[[], DynamicInferenceEngine]
"""Makes a replica's engine in the replica's process. It can be pickled."""


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
            make_engine: makes the engine.
            settings: how many requests there may be, and where states are told.
        """
        self._name: str = serve.get_replica_context().replica_id.unique_id
        engine = make_engine()
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

    async def stream(self, request: EngineRequest) -> AsyncIterator[AnswerPart]:
        """Answer a request; a caller that closes the stream cancels it."""
        self._feed.wake()
        try:
            answer: Any = answer_parts(self._engine, request, self._name)
            async with aclosing(answer) as parts:
                async for part in parts:
                    yield part
        finally:
            self._feed.wake()

    async def facts(self) -> EngineFacts:
        """What does not change."""
        return self._engine.facts

    async def pulse(self) -> Pulse:
        """That the replica is there."""
        return Pulse(self._name, socket.gethostname(), os.getpid(), self._engine.num_running)

    async def report(self) -> ReplicaReport:
        """The replica's figures now."""
        text, _ = await self._engine.metrics_text()
        return ReplicaReport(self._name, text)

    def record_replica_metadata(self) -> dict[str, Any]:
        """What routers need to know of the replica; Ray gives it to them."""
        return {BLOCK_SIZE: self._engine.facts.block_size_tokens}

    async def check_health(self) -> None:
        """Raise what the engine's thread has given up for; Ray then starts another replica instead."""
        failure = self._engine.failure
        if failure is not None:
            raise RuntimeError(f"the engine of replica {self._name} has given up") from failure

    def __del__(self) -> None:
        """Ray has waited for the requests; the engine's thread ends with the process."""
        feed = getattr(self, "_feed", None)
        if feed is not None:
            feed.leave()

    async def _serve_hand_over(self, hand_over: Any) -> None:
        pass


def _print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
