"""What an ingress knows of its replicas: which of them answer, and which states and requests they hold."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from threading import RLock
from typing import Any

from ..net.routing.state_events import StateEvents
from ..net.routing.state_router import ReplicaLoad, StateRouter
from .replica_answers import EngineRequest

SILENT_S = 5.0  # a replica that has answered nothing for so long is silent where another one answers
_GIVEN_UP_S = 10.0  # where none answers, so long all are taken to be busy


@dataclass
class _Assignment:
    """The replica to which a request is sent, or will be, and the order in which it tries them."""

    replica: str = ""
    order: tuple[str, ...] = ()
    is_sent: bool = False


class KnownReplicas:
    """When each replica has answered last, its states, and the requests sent to it; for any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.replicas: dict[str, Any] = {}  # name -> Ray's `RunningReplica`; never mutated
        self._clock = clock
        self._lock = RLock()  # of changes of `replicas` and what follows
        self._answered_s: dict[str, float] = {}
        self._complete_replicas: set[str] = set()  # replicas of whose states the router misses nothing
        self._router = StateRouter()
        self._assignments: dict[str, _Assignment] = {}  # by id of the request

    def set_replicas(self, replicas: Mapping[str, Any]) -> None:
        """Know these replicas alone; a new one counts as if it had answered now."""
        now = self._clock()
        with self._lock:
            for name in self._answered_s.keys() - replicas:
                self.remove(name)
            self._answered_s = {name: self._answered_s.get(name, now) for name in replicas}
            self.replicas = dict(replicas)

    def remove(self, replica: str) -> None:
        """A replica is gone."""
        with self._lock:
            self.replicas = {name: handle for name, handle in self.replicas.items() if name != replica}
            self._answered_s.pop(replica, None)
            self._complete_replicas.discard(replica)
            self._router.remove(replica)

    def lacks_states(self, replica: str) -> bool:
        """Whether a replica should say all that it holds."""
        return replica not in self._complete_replicas

    def record_answer(self, replica: str, events: StateEvents | None = None) -> None:
        """A replica has answered; `events` are the changes of its states since its answer before."""
        with self._lock:
            if replica not in self._answered_s:
                return
            self._answered_s[replica] = self._clock()
            if events is not None:
                if self._router.apply(events):
                    self._complete_replicas.add(replica)
                else:
                    self._complete_replicas.discard(replica)

    def mark_incomplete(self, replica: str) -> None:
        """An answer, which may have had changes of states, is not read."""
        self._complete_replicas.discard(replica)

    @property
    def num_serving(self) -> int:
        """Replicas that answered within 5 s; where none did, those of the last 10 s."""
        return self._answered_within(SILENT_S) or self._answered_within(_GIVEN_UP_S)

    def is_silent(self, replica: str) -> bool:
        """Whether a replica has answered nothing for 5 s, though another one has."""
        answered_s = self._answered_s.get(replica)
        is_late = answered_s is not None and self._clock() - answered_s >= SILENT_S
        return is_late and self._answered_within(SILENT_S) > 0

    @property
    def answering(self) -> list[Any]:
        """The `replicas` that are not silent."""
        return [replica for name, replica in self.replicas.items() if not self.is_silent(name)]

    def _answered_within(self, seconds: float) -> int:
        horizon = self._clock() - seconds
        return sum(answered_s > horizon for answered_s in list(self._answered_s.values()))

    def begin(self, request_id: str) -> None:
        """A request is about to be sent to a replica."""
        with self._lock:
            self._assignments[request_id] = _Assignment()

    def end(self, request_id: str) -> None:
        """A replica has ended a request, or is lost."""
        with self._lock:
            self._assignments.pop(request_id, None)

    def ranked(self, request: EngineRequest, queue_lengths: Mapping[str, int | None]) -> tuple[str, ...]:
        """The replicas in the order in which a request tries them, those that it has lost last."""
        with self._lock:
            assignment = self._assignments.get(request.request_id, _Assignment())
            if set(assignment.order) != queue_lengths.keys():
                # Ray's queue lengths lack what is assigned and not sent: a burst would go to one replica.
                num_assigned = Counter(assigned.replica for assigned in self._assignments.values())
                loads = [
                    ReplicaLoad(name, max(num_assigned[name], length or 0))
                    for name, length in queue_lengths.items()
                ]
                candidates = [load for load in loads if load.replica not in request.lost]
                ranking = self._router.choose(request.route, candidates or loads)
                assignment.order = (*ranking, *(queue_lengths.keys() - ranking))
                assignment.replica = ranking[0]
            return assignment.order

    def record_sent(self, request: EngineRequest, replica: str) -> None:
        """Ray sends a request to this replica, and waits until the replica has confirmed it."""
        with self._lock:
            assignment = self._assignments.get(request.request_id, _Assignment())
            assignment.is_sent = True
            if assignment.replica != replica:
                assignment.replica = replica
                self._router.record_routed(request.route, replica)

    def replica_of(self, request_id: str) -> str:
        """Where a request was sent; "" before that."""
        assignment = self._assignments.get(request_id)
        return assignment.replica if assignment and assignment.is_sent else ""


@cache
def known_replicas_of(application: str) -> KnownReplicas:
    """This process' own of an application of Ray Serve."""
    return KnownReplicas()
