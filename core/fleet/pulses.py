"""What an ingress learns of its replicas: which of them answer, and which states they hold."""

import time
from collections.abc import Callable, Collection
from functools import cache
from threading import Lock

from ..net.routing.state_events import StateEvents
from ..net.routing.state_router import ReplicaLoad, RouteRequest, StateRouter

SILENT_S = 5.0
"""A replica that has answered nothing for so long is silent where another one answers."""
_GIVEN_UP_S = 10.0
"""Where none answers, so long all are taken to be busy."""


class Pulses:
    """When each replica has answered last, its states, and where requests are that no replica has confirmed.

    The ingress notes answers, and Ray's request router asks, in another thread: methods may be called in any.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heard_s: dict[str, float] = {}
        self._sent: dict[str, str] = {}
        self._router = StateRouter()
        self._lock = Lock()  # of the router
        self._complete: set[str] = set()  # replicas of whose states the router misses nothing

    def expect(self, replicas: Collection[str]) -> None:
        """Know these replicas alone; a new one counts as heard now."""
        now = self._clock()
        for gone in self._heard_s.keys() - set(replicas):
            self.forget(gone)
        self._heard_s = {name: self._heard_s.get(name, now) for name in replicas}

    def forget(self, replica: str) -> None:
        self._heard_s.pop(replica, None)
        self._complete.discard(replica)
        with self._lock:
            self._router.forget(replica)

    @property
    def replicas(self) -> list[str]:
        """The replicas that should answer."""
        return list(self._heard_s)

    def note_late(self, replicas: Collection[str]) -> None:
        """Answers of these replicas, which may have had changes of states, are not read any more."""
        self._complete -= set(replicas)

    @property
    def without_states(self) -> frozenset[str]:
        """The replicas that should say all that they hold."""
        return frozenset(self._heard_s) - self._complete

    def note_answer(self, replica: str, events: StateEvents | None = None) -> None:
        """A replica has answered; `events` are the changes of its states since its answer before."""
        if replica not in self._heard_s:
            return
        self._heard_s[replica] = self._clock()
        if events is not None:
            with self._lock:
                is_complete = self._router.apply(events)
            (self._complete.add if is_complete else self._complete.discard)(replica)

    @property
    def num_serving(self) -> int:
        """Replicas that were heard within 5 s; where none was, those of the last 10 s."""
        return self._heard_within(SILENT_S) or self._heard_within(_GIVEN_UP_S)

    def is_silent(self, replica: str) -> bool:
        """Whether a replica was not heard for 5 s, though another one was."""
        heard_s = self._heard_s.get(replica)
        late = heard_s is not None and self._clock() - heard_s >= SILENT_S
        return late and self._heard_within(SILENT_S) > 0

    def _heard_within(self, seconds: float) -> int:
        horizon = self._clock() - seconds
        return sum(heard_s > horizon for heard_s in list(self._heard_s.values()))

    # ---- requests

    def choose(self, request: RouteRequest, loads: list[ReplicaLoad]) -> list[str]:
        """As `StateRouter.choose`."""
        with self._lock:
            return self._router.choose(request, loads)

    def note_routed(self, request: RouteRequest, replica: str) -> None:
        """As `StateRouter.note_routed`."""
        with self._lock:
            self._router.note_routed(request, replica)

    def note_sent(self, request: str, replica: str) -> None:
        """A request waits for the confirmation of this replica."""
        self._sent[request] = replica

    def replica_of(self, request: str) -> str:
        """Where a request is; "" before a replica was chosen."""
        return self._sent.get(request, "")

    def note_ended(self, request: str) -> None:
        self._sent.pop(request, None)


@cache
def pulses_of(application: str) -> Pulses:
    """This process' own of an application of Ray Serve."""
    return Pulses()
