"""Calls of replicas: a request to the one that a router for Ray Serve ranks first, a question to any."""

import asyncio
import contextvars
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.request_router import (
    LocalityMixin,
    MultiplexMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from ..errors import NoReplicaError
from .known_replicas import KnownReplicas, known_replicas_of
from .replica_answers import AnswerPart, EngineRequest, ReplicaLostError

logger = logging.getLogger(__name__)

_POLL_INTERVAL_S = 1.0
"""Between two looks whether a replica that sends nothing is silent."""


class ReplicaCalls:
    """Calls of replicas by a handle of Ray Serve, whose request router chooses the replica."""

    def __init__(self, handle: Any, known: KnownReplicas) -> None:
        """`known`: what the handle's router reads. From now on Ray keeps its replicas up to date."""
        self._known = known
        self._streams = handle.options(method_name="stream", stream=True)

    async def stream(self, request: EngineRequest) -> AsyncGenerator[AnswerPart]:
        """The parts of an answer; closing the iterator ends the request.

        ReplicaLostError: the replica is gone, gave up, or is silent. NoReplicaError: Ray deployed none.
        """
        # In a context of its own, because Ray routes all calls of one HTTP request as one.
        self._known.begin(request.request_id)
        parts = contextvars.Context().run(self._streams.remote, request)
        reading = aiter(parts)
        part: AnswerPart | None = AnswerPart()  # the last one; None once all have come
        try:
            while (part := await self._next_part(reading, request.request_id)) is not None:
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
            self._known.end(request.request_id)
            if part is not None:
                parts.cancel()

    async def _next_part(self, reading: AsyncIterator[AnswerPart], request_id: str) -> AnswerPart | None:
        """The next part, or None after the last; ReplicaLostError where the replica is silent."""
        waiting = asyncio.ensure_future(anext(reading, None))
        try:
            while not (await asyncio.wait((waiting,), timeout=_POLL_INTERVAL_S))[0]:
                replica = self._known.replica_of(request_id)
                if self._known.is_silent(replica):
                    raise ReplicaLostError(f"replica {replica} answers nothing, not even whether it is there")
            return waiting.result()
        finally:
            waiting.cancel()


async def answer_of(replica: Any, method: str, *arguments: object) -> Any:
    """The answer of one replica, a `RunningReplica`, however many requests it has; raises what Ray raises."""
    from ray.serve._private.common import RequestMetadata  # has no public name in Ray 2.60

    name = secrets.token_hex(8)
    asked = PendingRequest([*arguments], {}, RequestMetadata(name, name, call_method=method))
    return await replica.try_send_request(asked, with_rejection=False).get_async()


async def answers_of(replicas: Iterable[Any], method: str, timeout_s: float, *arguments: object) -> list[Any]:
    """The answers of replicas. One that is late or raises is left out."""
    tasks = [asyncio.ensure_future(answer_of(replica, method, *arguments)) for replica in replicas]
    if not tasks:
        return []
    _, late = await asyncio.wait(tasks, timeout=timeout_s)
    for task in late:
        task.cancel()
    answers = []
    for task in tasks:
        if task in late or task.cancelled():
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


# ---- which replica Ray Serve chooses


class FleetRequestRouter(LocalityMixin, MultiplexMixin, RequestRouter):  # type: ignore[misc]
    """Ranks replicas as `KnownReplicas` does; Ray calls it in one event loop, and tries them in this order.

    Not first in first out: what is chosen for one request must not go to another.
    """

    def initialize_state(self, *, application: str) -> None:
        """Ray calls this with `request_router_kwargs`."""
        self._known = known_replicas_of(application)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas, each a rank of its own, best first."""
        named = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        heard = {name: replica for name, replica in named.items() if not self._known.is_silent(name)}
        replicas = heard or named
        request = _request_of(pending_request)
        if pending_request is None or request is None or not replicas:
            return [[replica] for replica in replicas.values()]
        pending_request.routing_context.should_backoff = True  # one round tries all replicas
        length_of = self.replica_queue_len_cache.get
        queue_lengths = {name: length_of(replica.replica_id) for name, replica in replicas.items()}
        return [[replicas[name]] for name in self._known.ranked(request, queue_lengths)]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, **options: Any
    ) -> RunningReplica:
        replica: RunningReplica = await super()._choose_replica_for_request(pending_request, **options)
        request = _request_of(pending_request)
        if request is not None:
            self._known.record_sent(request, replica.replica_id.unique_id)
        return replica

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._known.remove(replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Ray names the replicas that may be asked."""
        super().update_replicas(replicas)
        self._known.set_replicas({replica.replica_id.unique_id: replica for replica in replicas})


def _request_of(pending_request: PendingRequest | None) -> EngineRequest | None:
    first = pending_request.args[0] if pending_request is not None and pending_request.args else None
    return first if isinstance(first, EngineRequest) else None
