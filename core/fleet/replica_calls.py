"""Calls of replicas: a request to the one that Ray Serve's request router chooses, a question to any."""

import asyncio
import contextvars
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.request_router import PendingRequest

from ..errors import NoReplicaError
from .known_replicas import KnownReplicas
from .replica_answers import AnswerPart, EngineRequest, ReplicaLostError

logger = logging.getLogger(__name__)

_POLL_INTERVAL_S = 1.0  # between two looks whether a replica that sends nothing is silent


class ReplicaCalls:
    """Calls of replicas by a handle of Ray Serve, whose request router chooses the replica."""

    def __init__(self, handle: Any, known_replicas: KnownReplicas) -> None:
        """`known_replicas`: what the handle's router reads. From now on Ray keeps them up to date."""
        self._known_replicas = known_replicas
        self._streams = handle.options(method_name="stream", stream=True)

    async def stream(self, request: EngineRequest) -> AsyncGenerator[AnswerPart]:
        """The parts of an answer; closing the iterator ends the request.

        ReplicaLostError: the replica is gone, gave up, or is silent. NoReplicaError: Ray deployed none.
        """
        # In a context of its own, because Ray routes all calls of one HTTP request as one.
        self._known_replicas.begin(request.request_id)
        parts = contextvars.Context().run(self._streams.remote, request)
        part_iterator = aiter(parts)
        part: AnswerPart | None = AnswerPart()  # the last one; None once all have come
        try:
            while (part := await self._next_part(part_iterator, request.request_id)) is not None:
                yield part
        except ReplicaLostError as error:  # of Ray's class, too: with the replica's traceback
            raise ReplicaLostError(_last_line(error)) from None
        except RayTaskError:  # a mistake in the replica
            raise
        except (RayError, ReplicaUnavailableError, OSError) as error:  # it, or the way to it, is gone
            raise ReplicaLostError(_last_line(error)) from error
        except DeploymentUnavailableError as error:
            raise NoReplicaError(_last_line(error)) from error
        finally:
            self._known_replicas.end(request.request_id)
            if part is not None:
                parts.cancel()

    async def _next_part(self, parts: AsyncIterator[AnswerPart], request_id: str) -> AnswerPart | None:
        """The next part, or None after the last; ReplicaLostError where the replica is silent."""
        next_part = asyncio.ensure_future(anext(parts, None))
        try:
            while not (await asyncio.wait((next_part,), timeout=_POLL_INTERVAL_S))[0]:
                replica = self._known_replicas.replica_of(request_id)
                if self._known_replicas.is_silent(replica):
                    raise ReplicaLostError(f"replica {replica} answers nothing, not even whether it is there")
            return next_part.result()
        finally:
            next_part.cancel()


async def answer_of(replica: Any, method: str, *arguments: object) -> Any:
    """The answer of one replica, a `RunningReplica`, however many requests it has; raises what Ray raises."""
    from ray.serve._private.common import RequestMetadata  # has no public name in Ray 2.60

    name = secrets.token_hex(8)
    call = PendingRequest([*arguments], {}, RequestMetadata(name, name, call_method=method))
    return await replica.try_send_request(call, with_rejection=False).get_async()


async def answers_of(replicas: Iterable[Any], method: str, timeout_s: float, *arguments: object) -> list[Any]:
    """The answers of replicas. One that is late or raises is left out."""
    tasks = [asyncio.ensure_future(answer_of(replica, method, *arguments)) for replica in replicas]
    if not tasks:
        return []
    _, late_tasks = await asyncio.wait(tasks, timeout=timeout_s)
    for task in late_tasks:
        task.cancel()
    answers = []
    for task in tasks:
        if task in late_tasks or task.cancelled():
            continue
        error = task.exception()
        if error is None:
            answers.append(task.result())
        elif not isinstance(error, RayError):
            logger.warning("mambaslots: no answer to %r: %s: %s", method, type(error).__name__, error)
    return answers


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
