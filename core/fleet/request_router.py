"""The request router that Ray Serve calls: it ranks replicas as `KnownReplicas` does."""

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
    """Ranks replicas for Ray. Not first in, first out: what one request chooses must not go to another."""

    def initialize_state(self, *, application: str) -> None:
        """Ray calls this with `request_router_kwargs`."""
        self._known_replicas = known_replicas_of(application)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas, each a rank of its own, best first."""
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        is_silent = self._known_replicas.is_silent
        replicas = {name: replica for name, replica in replicas.items() if not is_silent(name)} or replicas
        request = _request_of(pending_request)
        if pending_request is None or request is None or not replicas:
            return [[replica] for replica in replicas.values()]
        pending_request.routing_context.should_backoff = True  # one round tries all replicas
        cache = self.replica_queue_len_cache
        queue_lengths = {name: cache.get(replica.replica_id) for name, replica in replicas.items()}
        return [[replicas[name]] for name in self._known_replicas.ranked(request, queue_lengths)]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, **options: Any
    ) -> RunningReplica:
        replica: RunningReplica = await super()._choose_replica_for_request(pending_request, **options)
        request = _request_of(pending_request)
        if request is not None:
            self._known_replicas.record_sent(request, replica.replica_id.unique_id)
        return replica

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._known_replicas.remove(replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Ray names the replicas that may be asked."""
        super().update_replicas(replicas)
        self._known_replicas.set_replicas({replica.replica_id.unique_id: replica for replica in replicas})


def _request_of(pending_request: PendingRequest | None) -> EngineRequest | None:
    argument = pending_request.args[0] if pending_request is not None and pending_request.args else None
    return argument if isinstance(argument, EngineRequest) else None
