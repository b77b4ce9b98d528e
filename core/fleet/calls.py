"""Calls of replicas by a handle of Ray Serve: one request to one of them, a question to all."""

import asyncio
import contextvars
from collections.abc import AsyncGenerator
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
from .pulses import Pulses
from .replica_answers import AnswerPart, EngineRequest, ReplicaLostError

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


async def replica_answers(
    replicas: Any, method: str, timeout_s: float, *arguments: object
) -> AsyncGenerator[Any]:
    """The replicas' answers as they come. One that is late or raises is left out, and delays no other.

    `replicas` is a handle. Ray's own `results_async(timeout_s)` raises where one is late.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    try:
        async with asyncio.timeout_at(deadline):
            results = await replicas.broadcast(method, *arguments)._fetch_replica_results_async()
    except (RayServeException, RayError, TimeoutError):
        return
    pending = {asyncio.ensure_future(result.get_async()) for result in results}
    try:
        while pending:
            left_s = max(0.0, deadline - asyncio.get_running_loop().time())
            done, pending = await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
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
