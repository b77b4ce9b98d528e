"""The ingress: the server's application, in a process that Ray Serve starts, and its calls of replicas."""

import asyncio
import contextvars
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

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
from ..serve.service import Service
from ..serve.settings import ServerSettings
from . import FleetSettings
from .answers import AnswerPart, EngineRequest, ReplicaLostError
from .fleet_engine import FleetEngine

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


class ReplicaCalls:
    """Calls of replicas by a handle of Ray Serve, whose request router chooses the replica."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._streams = handle.options(method_name="stream", stream=True)

    async def stream(self, request: EngineRequest) -> AsyncGenerator[AnswerPart]:
        """The parts of an answer. Closing the iterator ends the request.

        ReplicaLostError: the replica is gone, or gave up. NoReplicaError: Ray Serve could not deploy any.
        """
        # In a context of its own, because Ray routes all calls of one HTTP request as one.
        parts = contextvars.Context().run(self._streams.remote, request)
        ended = False
        try:
            async for part in parts:
                yield part
            ended = True
        except ReplicaLostError as error:  # of Ray's class, too: with the replica's traceback
            raise ReplicaLostError(_last_line(error)) from None
        except _LOST as error:
            raise ReplicaLostError(_last_line(error)) from error
        except DeploymentUnavailableError as error:
            raise NoReplicaError(_last_line(error)) from error
        finally:
            if not ended:
                parts.cancel()

    async def ask(self, method: str, *arguments: object) -> Any:
        """The answer of any replica; waits for the first replica."""
        return await self._handle.options(method_name=method).remote(*arguments)

    async def ask_all(self, method: str, *arguments: object, timeout_s: float) -> list[Any]:
        """The answers of the replicas that answer in time."""
        try:
            asked = self._handle.broadcast(method, *arguments)
            answers = await asked.results_async(timeout_s=timeout_s, return_exceptions=True)
        except (RayServeException, RayError, TimeoutError):
            return []
        return [answer for answer in answers if not isinstance(answer, BaseException)]


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


logger = logging.getLogger(__name__)


_COUNT_S = 1.0
"""Between two counts of the replicas that answer."""
_REPORT_S = 10.0
_SILENT_S = 10.0
"""Without an answer for so long, no replica serves."""


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
        self._calls = ReplicaCalls(replicas)
        self._load_text = load_text
        self._salt_key = SaltKey(salt_key)
        self._server = server
        self._settings = settings
        self._num_replicas = 1

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Ray calls this after the constructor."""
        facts = await self._calls.ask("facts")
        self._counting = asyncio.create_task(self._count_replicas())
        engine = FleetEngine(
            facts,
            self._salt_key,
            self._calls.stream,
            num_replicas=lambda: self._num_replicas,
            reports=lambda: self._calls.ask_all("report", timeout_s=_REPORT_S),
            max_waiting_requests=self._server.max_waiting_requests,
        )
        app = make_app_over(engine, self._load_text(), self._server)
        self._service: Service = app.state.service
        add_host_check(app, self._server)
        return app

    async def drain(self) -> bool:
        """Refuse new requests, and wait for the others as long as the settings say."""
        return await self._service.drain()

    async def _count_replicas(self) -> None:
        """Count the replicas that answer every second. Where none does, the last count stays for 10 s:
        replicas that are busy are there.
        """
        loop = asyncio.get_running_loop()
        answered_s = loop.time()
        while True:
            number = len(await self._calls.ask_all("status", timeout_s=_COUNT_S))
            if number:
                answered_s = loop.time()
            if number or loop.time() - answered_s > _SILENT_S:
                self._num_replicas = number
            await asyncio.sleep(_COUNT_S)
