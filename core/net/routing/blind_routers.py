"""Routers that know nothing of prefixes."""

import random
from collections.abc import Sequence

from ...validation import integer
from .router import ReplicaLoad, RouteRequest, check_loads
from .state_events import StateEvents


class BlindRouter:
    """A router that hears of no states. Those of this file differ in `choose` alone."""

    reads_events = False

    def __init__(self, seed: int = 0) -> None:
        """`seed`: of all that is drawn."""
        self._draws = random.Random(integer("seed", seed))

    def note_routed(self, request: RouteRequest, replica: str) -> None:
        """Does nothing."""

    def apply(self, events: StateEvents) -> bool:
        """Does nothing; True."""
        return True

    def forget(self, replica: str) -> None:
        """Does nothing."""


class RandomRouter(BlindRouter):
    """Any replica, drawn anew for each request."""

    def choose(self, request: RouteRequest, loads: Sequence[ReplicaLoad]) -> list[str]:
        """See `Router.choose`."""
        check_loads(loads)
        return self._draws.sample([load.replica for load in loads], len(loads))


class RoundRobinRouter(BlindRouter):
    """One replica after the other, by name."""

    def __init__(self, seed: int = 0) -> None:
        """`seed`: nothing is drawn."""
        super().__init__(seed)
        self._last = ""

    def choose(self, request: RouteRequest, loads: Sequence[ReplicaLoad]) -> list[str]:
        """See `Router.choose`."""
        check_loads(loads)
        names = sorted(load.replica for load in loads)
        first = next((i for i, name in enumerate(names) if name > self._last), 0)
        self._last = names[first]
        return names[first:] + names[:first]


class PowerOfTwoRouter(BlindRouter):
    """The one of two drawn replicas that has fewer requests; then the others, in the order drawn."""

    def choose(self, request: RouteRequest, loads: Sequence[ReplicaLoad]) -> list[str]:
        """See `Router.choose`."""
        check_loads(loads)
        drawn = self._draws.sample(list(loads), len(loads))
        drawn[:2] = sorted(drawn[:2], key=lambda load: load.num_requests)
        return [load.replica for load in drawn]
