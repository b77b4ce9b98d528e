"""The ingress: the server's application, in a process that Ray Serve starts, and its calls of replicas."""

import asyncio
import contextvars
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, cast

from fastapi import FastAPI
from ray.exceptions import (
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RaySystemError,
    WorkerCrashedError,
)
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException, ReplicaUnavailableError

from ..errors import NoReplicaError
from ..inference.contexts.cache.hashing import SaltKey
from ..loaded_model import LoadedText
from ..serve.app import make_app_over
from ..serve.gate import add_host_check
from ..serve.generation import EngineFacts
from ..serve.service import Service
from ..serve.settings import ServerSettings
from . import FleetSettings
from .answers import AnswerPart, EngineRequest, ReplicaLostError
from .fleet_engine import FleetEngine
from .guard import kill_when_still
from .pulses import Pulses, pulses_of

_LOST = (
    RayActorError,
    WorkerCrashedError,
    RaySystemError,
    NodeDiedError,
    LocalRayletDiedError,
    OutOfMemoryError,
    ObjectLostError,  # a part of the answer, with the machine that had it
    ReplicaUnavailableError,
)
"""What Ray raises where the process of a replica, or the way to it, is gone."""


_LOOK_S = 1.0
"""Between two looks whether a replica that sends nothing is silent."""


class ReplicaCalls:
    """Calls of replicas by a handle of Ray Serve, whose request router chooses the replica."""

    def __init__(self, handle: Any, pulses: Pulses) -> None:
        """`pulses`: those that the handle's router reads."""
        self._handle = handle
        self._pulses = pulses
        self._streams = handle.options(method_name="stream", stream=True)

    async def stream(self, request: EngineRequest) -> AsyncGenerator[AnswerPart]:
        """The parts of an answer. Closing the iterator ends the request.

        ReplicaLostError: the replica is gone, gave up, or is silent. NoReplicaError: Ray Serve could not
        deploy any.
        """
        # In a context of its own, because Ray routes all calls of one HTTP request as one.
        parts = contextvars.Context().run(self._streams.remote, request)
        reading = aiter(parts)
        ended = False
        waiting: asyncio.Future[AnswerPart | None] | None = None
        try:
            while not ended:
                waiting = asyncio.ensure_future(anext(reading, None))
                while not (await asyncio.wait((waiting,), timeout=_LOOK_S))[0]:
                    replica = self._pulses.replica_of(request.request_id)
                    if self._pulses.is_silent(replica):
                        raise ReplicaLostError(
                            f"replica {replica} answers nothing, not even whether it is there"
                        )
                part = waiting.result()
                if part is None:
                    ended = True
                else:
                    yield part
        except ReplicaLostError as error:  # of Ray's class, too: with the replica's traceback
            raise ReplicaLostError(_last_line(error)) from None
        except _LOST as error:
            raise ReplicaLostError(_last_line(error)) from error
        except DeploymentUnavailableError as error:
            raise NoReplicaError(_last_line(error)) from error
        finally:
            self._pulses.note_ended(request.request_id)
            if waiting is not None:
                waiting.cancel()
            if not ended:
                parts.cancel()

    async def ask_all(self, method: str, timeout_s: float) -> list[Any]:
        """The answers of the replicas that answer in time."""
        return [answer async for answer in self.answers(method, timeout_s)]

    async def answers(self, method: str, timeout_s: float) -> AsyncGenerator[Any]:
        """The replicas' answers as they come. One that is late or raises is left out, and delays no other.

        Ray's own `results_async(timeout_s)` raises where one is late.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        try:
            async with asyncio.timeout_at(deadline):
                results = await self._handle.broadcast(method)._fetch_replica_results_async()
        except (RayServeException, RayError, TimeoutError):
            return
        pending = {asyncio.ensure_future(result.get_async()) for result in results}
        try:
            while pending:
                left_s = max(0.0, deadline - asyncio.get_running_loop().time())
                done, pending = await asyncio.wait(
                    pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    return
                for one in done:
                    if not one.cancelled() and one.exception() is None:
                        yield one.result()
        finally:
            for one in pending:
                one.cancel()


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


logger = logging.getLogger(__name__)


_PULSE_S = 1.0
"""Between two questions whether the replicas are there."""
_LONGEST_PULSE_S = 10.0
"""An answer that took so long says nothing."""
_REPORT_S = 5.0
_FIRST_S = 2.0


class Ingress:
    """What Ray Serve deploys as the application's ingress: the server over a `FleetEngine`."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self,
        replicas: Any,
        load_text: Callable[[], LoadedText],
        salt_key: bytes,
        server: ServerSettings,
        settings: FleetSettings,
    ) -> None:
        """`replicas`: the handle of their deployment. `load_text` loads text and defaults of the model."""
        kill_when_still(settings.still_s)
        self._pulses = pulses_of(settings.channel)
        self._calls = ReplicaCalls(replicas, self._pulses)
        self._load_text = load_text
        self._salt_key = SaltKey(salt_key)
        self._server = server
        self._settings = settings

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Ray calls this after the constructor."""
        facts = await self._facts()
        self._listening = asyncio.create_task(self._listen())
        engine = FleetEngine(
            facts,
            self._salt_key,
            self._calls.stream,
            num_replicas=lambda: self._pulses.num_serving,
            reports=lambda: self._calls.ask_all("report", _REPORT_S),
            max_waiting_requests=self._server.max_waiting_requests,
        )
        app = make_app_over(engine, self._load_text(), self._server)
        self._service: Service = app.state.service
        add_host_check(app, self._server)
        return app

    async def drain(self) -> bool:
        """Refuse new requests, and wait for the others as long as the settings say."""
        return await self._service.drain()

    async def _facts(self) -> EngineFacts:
        """Those of the first replica that answers."""
        while True:
            async with aclosing(self._calls.answers("facts", _FIRST_S)) as answers:
                async for facts in answers:
                    return cast(EngineFacts, facts)
            await asyncio.sleep(_PULSE_S)

    async def _listen(self) -> None:
        """Ask every replica each second whether it is there; a slow answer delays no question."""
        asking: set[asyncio.Task[None]] = set()
        while True:
            task = asyncio.create_task(self._hear())
            asking.add(task)
            task.add_done_callback(asking.discard)
            await asyncio.sleep(_PULSE_S)

    async def _hear(self) -> None:
        async for status in self._calls.answers("status", _LONGEST_PULSE_S):
            self._pulses.note_answer(status.replica)
