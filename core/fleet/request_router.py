"""Ray Serve's request router that asks a `StateRouter` which replica holds a request's state."""

import asyncio
import logging
from typing import Any

from ray.serve.request_router import (
    LocalityMixin,
    MultiplexMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from ..net.routing.state_router import RouteRequest, StateRouter
from .channel_reader import ChannelReader
from .engine_request import EngineRequest
from .replica_loads import ReplicaLoads

logger = logging.getLogger(__name__)

BLOCK_SIZE = "block_size_tokens"
"""The entry of a replica's metadata that says how many tokens a block has."""


class FleetRequestRouter(LocalityMixin, MultiplexMixin, RequestRouter):  # type: ignore[misc]
    """Ranks replicas as a `StateRouter` does.

    Ray gives it the replicas that live, their queue lengths and each request; an `EngineRequest` brings the
    hashes of its blocks. Ray tries the replicas in the order that this class returns: a replica whose queue
    is full gets no request. What the router knows of states may be old, which costs a miss.

    Ray calls it in one event loop. It is not first in first out: what is chosen for one request must not
    go to another.
    """

    def initialize_state(self, *, channel: str, seed: int = 0) -> None:
        """Ray calls this with `request_router_kwargs`.

        Args:
            channel: the name of the actor of a `StateChannel`.
            seed: of the router's random choices.
        """
        self._router = StateRouter(seed)
        self._loads = ReplicaLoads()
        self._channel = channel
        self._reading: asyncio.Task[None] | None = None

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas, each a rank of its own, best first."""
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if not replicas:
            return []
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # one round tries all replicas
            order = self._loads.order_of(_request_id(pending_request), replicas)
            if order:  # all were full; a router that was asked again would count the request again
                return [[replicas[name]] for name in order]
        queue_lengths = {
            name: self.replica_queue_len_cache.get(replica.replica_id) for name, replica in replicas.items()
        }
        loads = self._loads.loads(replicas, queue_lengths)
        request = _route_request(pending_request, candidate_replicas[0])
        if request is None or pending_request is None:  # a question that any replica answers
            loads.sort(key=lambda load: load.num_requests)
            return [[replicas[load.replica]] for load in loads]
        lost = set(pending_request.args[0].lost)
        left = [load for load in loads if load.replica not in lost]
        best = self._router.choose(request, left or loads)
        order = (*best, *(lost & replicas.keys() if left else ()))
        self._loads.note_chosen(_request_id(pending_request), order, _num_tokens(request))
        return [[replicas[name]] for name in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """A replica has the request."""
        if self._loads.note_routed(_request_id(pending_request), replica_id.unique_id):
            request = _route_request(pending_request, self.curr_replicas.get(replica_id))
            if request is not None:
                self._router.note_routed(request, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """A request has ended, or a replica has refused it."""
        self._loads.note_ended(internal_request_id, replica_id.unique_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """A replica is dead."""
        super().on_replica_actor_died(replica_id)
        self._router.forget(replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Ray names the replicas that may be asked."""
        if self._reading is None:
            self._reading = self._event_loop.create_task(ChannelReader(self._channel, self._router).run())
        gone = set(self.curr_replicas) - {replica.replica_id for replica in replicas}
        super().update_replicas(replicas)
        for replica_id in gone:
            self._router.forget(replica_id.unique_id)


def _route_request(
    pending_request: PendingRequest | None, replica: RunningReplica | None
) -> RouteRequest | None:
    """What a router is asked about a call; None for a call that has no prompt."""
    first = pending_request.args[0] if pending_request is not None and pending_request.args else None
    if not isinstance(first, EngineRequest) or replica is None:
        return None
    block_size = replica.replica_metadata.get(BLOCK_SIZE, 1)
    return RouteRequest(first.keys, len(first.prompt), block_size, first.num_answer_tokens)


def _num_tokens(request: RouteRequest) -> int:
    return request.num_tokens + request.num_answer_tokens


def _request_id(pending_request: PendingRequest) -> str:
    return str(pending_request.metadata.internal_request_id)
