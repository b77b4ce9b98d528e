"""Calls of replicas by a handle of Ray Serve; Ray's errors become ours."""

import contextvars
from collections.abc import AsyncIterator
from typing import Any

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
from .engine_request import AnswerPart, EngineRequest, ReplicaLostError

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
    """Asks the replicas behind a handle.

    Args:
        handle: of the deployment of `EngineReplica`. Its request router chooses the replica.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._streams = handle.options(method_name="stream", stream=True)

    async def stream(self, request: EngineRequest) -> AsyncIterator[AnswerPart]:
        """Have a request answered. Closing the iterator ends the request.

        Raises:
            ReplicaLostError: the replica that served the request is gone, or gave up.
            NoReplicaError: Ray Serve could not deploy any replica.
        """
        # In a context of its own, because Ray takes all calls of one HTTP request for one to be routed.
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
        """What any replica answers to a question; waits for the first replica."""
        return await self._handle.options(method_name=method).remote(*arguments)

    async def ask_all(self, method: str, *arguments: object, timeout_s: float) -> list[Any]:
        """What the replicas answer that are there and answer in time; [] where none does."""
        try:
            asked = self._handle.broadcast(method, *arguments)
            answers = await asked.results_async(timeout_s=timeout_s, return_exceptions=True)
        except (RayServeException, RayError, TimeoutError):
            return []
        return [answer for answer in answers if not isinstance(answer, BaseException)]


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
