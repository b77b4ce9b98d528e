"""A router by the deepest state that a replica can resume from, weighed against its queue."""

import random
from collections import OrderedDict
from collections.abc import Sequence

from ...validation import integer
from .router import ReplicaLoad, RouteRequest
from .state_events import StateEvents
from .state_index import StateIndex

PROSPECT_REQUESTS = 1024
"""So many requests are routed before a state that has not come is expected no more."""


class StateRouter:
    """The replica that is done with the request first: tokens that wait there, and tokens that it computes.

    A replica computes a prompt but for the tokens in front of its deepest state of the prompt. Where a
    request was sent, its states are expected until `PROSPECT_REQUESTS` more requests were routed, so that
    requests with a new prefix follow the first one.

    Attributes:
        index: what the replicas told.
    """

    reads_events = True

    def __init__(self, seed: int = 0, *, index: StateIndex | None = None) -> None:
        """
        Args:
            seed: of the order of equals.
            index: what is known; None for a new one.
        """
        self.index = StateIndex() if index is None else index
        self._draws = random.Random(integer("seed", seed))
        self._prospects: OrderedDict[int, tuple[str, int]] = OrderedDict()  # hash -> replica, when
        self._num_routed = 0
        self._mean_tokens = 0.0

    def choose(self, request: RouteRequest, loads: Sequence[ReplicaLoad]) -> list[str]:
        """See `Router.choose`."""
        keys = request.keys[: request.num_resumable_blocks]
        depths = self.index.deepest(keys)
        expected = self._expected(keys)
        size = request.block_size_tokens
        whole = request.num_tokens + request.num_answer_tokens
        self._mean_tokens += (whole - self._mean_tokens) / min(self._num_routed + 1, 64)

        def cost(load: ReplicaLoad) -> tuple[float, int, float]:
            depth = max(depths.get(load.replica, 0), expected.get(load.replica, 0))
            waiting = load.num_tokens or load.num_requests * self._mean_tokens
            return waiting + request.num_tokens - depth * size, load.num_requests, self._draws.random()

        order = [load.replica for load in sorted(loads, key=cost)]
        self._num_routed += 1
        self.note_routed(request, order[0])
        return order

    def note_routed(self, request: RouteRequest, replica: str) -> None:
        """See `Router.note_routed`."""
        for key in request.keys:
            self._prospects.pop(key, None)
            self._prospects[key] = replica, self._num_routed
        while self._prospects:
            key, (_, routed) = next(iter(self._prospects.items()))
            if routed + PROSPECT_REQUESTS > self._num_routed:
                break
            del self._prospects[key]

    def apply(self, events: StateEvents) -> bool:
        """See `Router.apply`."""
        return self.index.apply(events)

    def forget(self, replica: str) -> None:
        """See `Router.forget`."""
        self.index.forget(replica)
        for key in [key for key, (name, _) in self._prospects.items() if name == replica]:
            del self._prospects[key]

    def _expected(self, keys: Sequence[int]) -> dict[str, int]:
        """Behind how many blocks a replica is expected to be able to resume soon."""
        for depth in range(len(keys), 0, -1):
            if keys[depth - 1] in self._prospects:
                return {self._prospects[keys[depth - 1]][0]: depth}
        return {}
