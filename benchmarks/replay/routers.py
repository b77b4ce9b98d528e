"""Routers that the router by states is compared with."""

import random
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from mambaslots.net.routing.state_events import StateEvents
from mambaslots.net.routing.state_router import ReplicaLoad, RouteRequest, StateRouter
from mambaslots.validation import integer


class Router(Protocol):
    """Chooses among replicas, by its seed and the calls alone.

    A class with `reads_events` False needs no events.
    """

    def choose(self, request: RouteRequest, loads: Sequence[ReplicaLoad]) -> Sequence[str]:
        """The replicas in the order in which the request should try them, best first.

        The router takes the request for one that goes to the first.

        Args:
            request: what is to be served.
            loads: the replicas that may serve it, at least one.
        """
        ...

    def record_routed(self, request: RouteRequest, replica: str) -> None:
        """Note that a request went to another replica than the first that `choose` named."""
        ...

    def apply(self, events: StateEvents) -> bool:
        """Note what a replica publishes of its states; False where the router needs a snapshot."""
        ...

    def remove(self, replica: str) -> None:
        """Note that a replica is gone, with all its states."""
        ...


def check_loads(loads: Sequence[ReplicaLoad]) -> None:
    """Raise a ValueError where there is no replica, or one twice."""
    if not loads or len({load.replica for load in loads}) < len(loads):
        names = [load.replica for load in loads]
        raise ValueError(f"loads names {names}; accepted: one replica or more, each once")


class BlindRouter:
    """A router that receives no states. Those of this file differ in `choose` alone."""

    reads_events = False

    def __init__(self, seed: int = 0) -> None:
        """`seed`: of all that is drawn."""
        self._draws = random.Random(integer("seed", seed))

    def record_routed(self, request: RouteRequest, replica: str) -> None:
        """Does nothing."""

    def apply(self, events: StateEvents) -> bool:
        """Does nothing; True."""
        return True

    def remove(self, replica: str) -> None:
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


MAX_BLOCKS = 1 << 20
"""Of each replica: 268 million tokens in blocks of 256, in about 150 MB."""


class PrefixRouter:
    """The replica to which the longest part of the prompt was sent before, whatever became of it there.

    It decides as `PrefixCacheAffinityRouter` of ray[serve] 2.60 does with its defaults, over hashes of blocks
    in the place of characters:

    - Where less than a tenth of the prompt was sent to any replica, the replicas that were sent the fewest
      distinct blocks are candidates.
    - Else the candidates are the replicas that were sent the longest known part of the prompt.
    - Of the candidates, the one with the shortest queue is taken, and of equals the first.
    - Where queues differ by more than `imbalanced_threshold` requests, the candidates are two that are drawn.
      The threshold is infinite by default.
    - Nothing is forgotten. This class forgets what was sent longest ago beyond `MAX_BLOCKS` of a replica.

    Ray's tree of texts splits its nodes where texts part. Hashes of blocks need no tree, because each stands
    for all before it.
    """

    reads_events = False

    def __init__(
        self,
        seed: int = 0,
        *,
        imbalanced_threshold: float = float("inf"),
        match_rate_threshold: float = 0.1,
    ) -> None:
        """
        Args:
            seed: of what is drawn where queues differ too much.
            imbalanced_threshold: requests by which queues may differ.
            match_rate_threshold: the part of a prompt that must be known.
        """
        self._draws = random.Random(integer("seed", seed))
        self._imbalanced_threshold = imbalanced_threshold
        self._match_rate_threshold = match_rate_threshold
        # Replica -> hashes of the blocks that were sent there, the last ones at the end.
        self._sent: dict[str, OrderedDict[int, None]] = {}

    def choose(self, request: RouteRequest, loads: Sequence[ReplicaLoad]) -> list[str]:
        """See `Router.choose`."""
        check_loads(loads)
        for load in loads:
            self._sent.setdefault(load.replica, OrderedDict())
        candidates = self._candidates(request, loads)
        # Sorting keeps the order of equals.
        order = sorted(loads, key=lambda load: (load not in candidates, load.num_requests))
        self.record_routed(request, order[0].replica)
        return [load.replica for load in order]

    def record_routed(self, request: RouteRequest, replica: str) -> None:
        """See `Router.record_routed`."""
        sent = self._sent.setdefault(replica, OrderedDict())
        for key in reversed(request.hashes):  # the deepest block is forgotten first
            sent[key] = None
            sent.move_to_end(key)
        while len(sent) > MAX_BLOCKS:
            sent.popitem(last=False)

    def apply(self, events: StateEvents) -> bool:
        """Does nothing; True."""
        return True

    def remove(self, replica: str) -> None:
        """See `Router.remove`."""
        self._sent.pop(replica, None)

    def _candidates(self, request: RouteRequest, loads: Sequence[ReplicaLoad]) -> list[ReplicaLoad]:
        queues = [load.num_requests for load in loads]
        if max(queues) - min(queues) > self._imbalanced_threshold:
            return self._draws.sample(list(loads), min(2, len(loads)))
        matching, num_blocks = list(loads), 0
        for key in request.hashes:
            matched = [load for load in matching if key in self._sent[load.replica]]
            if not matched:
                break
            matching, num_blocks = matched, num_blocks + 1
        if num_blocks * request.block_size_tokens < self._match_rate_threshold * request.num_tokens:
            fewest = min(len(self._sent[load.replica]) for load in loads)
            return [load for load in loads if len(self._sent[load.replica]) == fewest]
        return matching


ROUTERS: Mapping[str, Callable[[int], Router]] = MappingProxyType(
    {
        "state": StateRouter,
        "prefix": PrefixRouter,
        "random": RandomRouter,
        "round-robin": RoundRobinRouter,
        "power-of-two": PowerOfTwoRouter,
    }
)
"""Name -> what makes a router from a seed."""
