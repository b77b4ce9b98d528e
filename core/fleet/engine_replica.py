"""A replica: an engine, in a process that Ray Serve starts, watches and ends."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from ray import serve

from ..distributed.routing.state_publisher import StatePublisher
from ..inference.engines.async_engine import AsyncEngine
from ..inference.engines.dynamic_engine import DynamicInferenceEngine
from ..serve.served_engine import EngineFacts
from .engine_request import AnswerPart, EngineRequest
from .fleet_settings import FleetSettings
from .replica_answer import answer_parts
from .request_router import BLOCK_SIZE
from .state_feed import StateFeed

logger = logging.getLogger(__name__)

MakeEngine = Callable[[], DynamicInferenceEngine]
"""Makes a replica's engine in the replica's process. It can be pickled."""


class EngineReplica:
    """What Ray Serve deploys as a replica.

    Ray calls the constructor, `check_health` and, when the replica has to end, waits for its requests before
    it calls the destructor.
    """

    async def __init__(self, make_engine: MakeEngine, settings: FleetSettings) -> None:
        self._name: str = serve.get_replica_context().replica_id.unique_id
        engine = make_engine()
        self._facts = EngineFacts.of(engine)
        self._engine = AsyncEngine(engine, max_waiting_requests=10 * settings.max_requests)
        self._engine.start()
        publisher = StatePublisher(engine, self._name)
        self._feed = StateFeed(self._name, settings.channel, self._engine, publisher, self._serve_hand_over)
        self._telling = asyncio.create_task(self._feed.run())

    async def stream(self, request: EngineRequest) -> AsyncIterator[AnswerPart]:
        """Answer a request; a caller that closes the stream cancels it."""
        self._feed.wake()
        try:
            async for part in answer_parts(self._engine, request):
                yield part
        finally:
            self._feed.wake()

    def facts(self) -> EngineFacts:
        """What does not change."""
        return self._facts

    def name(self) -> str:
        return self._name

    def record_replica_metadata(self) -> dict[str, Any]:
        """What routers need to know of the replica; Ray gives it to them."""
        return {BLOCK_SIZE: self._facts.block_size_tokens}

    async def check_health(self) -> None:
        """Raise what the engine's thread has given up for; Ray then puts another replica in this one's place."""
        failure = self._engine.failure
        if failure is not None:
            raise RuntimeError(f"the engine of replica {self._name} has given up") from failure

    def __del__(self) -> None:
        """Ray has waited for the requests: end the thread."""
        feed = getattr(self, "_feed", None)
        if feed is not None:
            feed.leave()
            self._telling.cancel()
