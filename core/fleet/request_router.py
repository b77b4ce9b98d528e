"""Ray Serve's request router that asks a `StateRouter` which replica holds a request's state."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray.serve.request_router import (
    LocalityMixin,
    MultiplexMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from ..net.routing.state_router import ReplicaLoad, RouteRequest
from .pulses import pulses_of
from .replica_answers import EngineRequest

_LONGEST_SENDING_S = 30.0


@dataclass(slots=True)
class _Sent:
    """A request of this router."""

    replica: str
    since_s: float
    order: tuple[str, ...]
    is_routed: bool = False


class ReplicaLoads:
    """Counts the requests that a router has chosen a replica for and that have not ended.

    Ray's queue lengths lack those that are chosen and not sent yet: a burst would go to one replica. A
    request that is chosen for a replica and never sent is forgotten after 30 s.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sent: dict[str, _Sent] = {}

    def note_chosen(self, request: str, order: Sequence[str]) -> None:
        """A request is to try replicas in this order; a second choice replaces the first."""
        self._sent[request] = _Sent(order[0], self._clock(), tuple(order))

    def order_of(self, request: str, replicas: Collection[str]) -> tuple[str, ...]:
        """The order chosen among these replicas for a request that none has accepted yet, or ()."""
        self._forget_unsent()
        sent = self._sent.get(request)
        return () if sent is None or sent.is_routed or set(sent.order) != set(replicas) else sent.order

    def note_routed(self, request: str, replica: str) -> bool:
        """A replica has a request. Returns whether another replica was chosen for it."""
        sent = self._sent.get(request)
        if sent is None:
            return False
        sent.is_routed = True
        other, sent.replica = sent.replica, replica
        return other != replica

    def note_ended(self, request: str, replica: str) -> None:
        """Forget a request, unless another replica has been chosen for it since."""
        sent = self._sent.get(request)
        if sent is not None and sent.replica == replica:
            del self._sent[request]

    def loads(self, replicas: Iterable[str], queue_lengths: Mapping[str, int | None]) -> list[ReplicaLoad]:
        """The loads now. `queue_lengths`: requests of each replica, as Ray last knew, or None."""
        self._forget_unsent()
        counts = Counter(sent.replica for sent in self._sent.values())
        return [ReplicaLoad(name, max(counts[name], queue_lengths.get(name) or 0)) for name in replicas]

    def _forget_unsent(self) -> None:
        horizon = self._clock() - _LONGEST_SENDING_S
        for request, sent in list(self._sent.items()):
            if not sent.is_routed and sent.since_s < horizon:
                del self._sent[request]


class FleetRequestRouter(LocalityMixin, MultiplexMixin, RequestRouter):  # type: ignore[misc]
    """Ranks replicas as a `StateRouter` does, that of `Pulses`; Ray calls it in one event loop.

    An `EngineRequest` has the hashes of its blocks. Ray tries the replicas in the order that this class
    returns: a replica whose queue is full gets no request. It is not first in first out: what is chosen for
    one request must not go to another. A replica that is silent gets none while another one answers.
    """

    def initialize_state(self, *, application: str) -> None:
        """Ray calls this with `request_router_kwargs`."""
        self._loads = ReplicaLoads()
        self._pulses = pulses_of(application)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas, each a rank of its own, best first."""
        names = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        replicas = {name: one for name, one in names.items() if not self._pulses.is_silent(name)} or names
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
        request = _route_request(pending_request)
        if request is None or pending_request is None:  # a question that any replica answers
            loads.sort(key=lambda load: load.num_requests)
            return [[replicas[load.replica]] for load in loads]
        lost = set(pending_request.args[0].lost)
        left = [load for load in loads if load.replica not in lost]
        best = self._pulses.choose(request, left or loads)
        order = (*best, *(lost & replicas.keys() if left else ()))
        self._loads.note_chosen(_request_id(pending_request), order)
        return [[replicas[name]] for name in order]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, **options: Any
    ) -> RunningReplica:
        """Ray sends the request to what this returns, and waits until the replica has confirmed it."""
        replica: RunningReplica = await super()._choose_replica_for_request(pending_request, **options)
        first = pending_request.args[0] if pending_request.args else None
        if isinstance(first, EngineRequest):
            self._pulses.note_sent(first.request_id, replica.replica_id.unique_id)
        return replica

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        if self._loads.note_routed(_request_id(pending_request), replica_id.unique_id):
            request = _route_request(pending_request)
            if request is not None:
                self._pulses.note_routed(request, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._loads.note_ended(internal_request_id, replica_id.unique_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._pulses.forget(replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Ray names the replicas that may be asked."""
        super().update_replicas(replicas)
        self._pulses.expect([replica.replica_id.unique_id for replica in replicas])


def _route_request(pending_request: PendingRequest | None) -> RouteRequest | None:
    """The router's view of a call; None for a call that has no prompt."""
    first = pending_request.args[0] if pending_request is not None and pending_request.args else None
    return first.route if isinstance(first, EngineRequest) else None


def _request_id(pending_request: PendingRequest) -> str:
    return str(pending_request.metadata.internal_request_id)
