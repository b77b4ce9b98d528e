"""Ray Serve's request router that asks a `StateRouter` which replica holds a request's state."""

from typing import Any

from ray.serve.request_router import (
    LocalityMixin,
    MultiplexMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from .known_replicas import known_replicas_of
from .replica_answers import EngineRequest


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
