"""A router by the deepest state that a replica can resume from, weighed against how busy it is."""

import random
from collections.abc import Sequence

from ...validation import integer
from .prospects import Prospects
from .recent_work import RecentWork
from .router import ReplicaLoad, RouteRequest, check_loads
from .state_events import StateEvents
from .state_index import StateIndex

TOLERATED_EXCESS = 0.1
"""A replica may have had a tenth more work than the mean before it is spared. Without tolerance small
excesses move conversations, and the replicas compute 9 % more tokens of the chat trace. With 0.2 some replica
has 1.14 times the mean there, with 0.1 it is 1.05."""
LONGEST_ANSWER = 512
"""Answers count for no more tokens. Callers often know a limit only, which few answers reach."""


class StateRouter:
    """The replica that costs the fewest tokens, counting those that make others wait.

    A request costs at a replica the sum of

    - the prompt tokens that the replica computes: those behind its deepest state of the prompt;
    - the tokens of the replica's queue: its requests, each as much as requests were in the mean, because
      `ReplicaLoad.num_tokens` has prompts whole that are resumed for the most part;
    - the tokens that the replica was sent of late beyond 1 + `TOLERATED_EXCESS` times the mean of all. After
      few requests these count for less: one conversation on idle replicas stays with its state.

    So a conversation stays where its state is until the others have that much less to do as its history is
    long, and a head that many prompts share spreads to as many replicas as its requests keep busy.

    Until the states of a prompt are told, they are expected where the prompt was sent, so that a burst with
    one new prefix is computed by one replica.

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
        self._prospects = Prospects()
        self._recent = RecentWork()

    def choose(self, request: RouteRequest, loads: Sequence[ReplicaLoad]) -> list[str]:
        """See `Router.choose`. O(blocks of the prompt + replicas)."""
        check_loads(loads)
        depths = self._depths(request)
        recent = self._recent.of(load.replica for load in loads)
        mean_request, size = self._recent.mean_request, request.block_size_tokens
        tolerated = (1 + TOLERATED_EXCESS) * sum(recent.values()) / len(recent)

        def cost(load: ReplicaLoad) -> tuple[float, float, float]:
            tokens = recent[load.replica]
            computed = request.num_tokens - depths.get(load.replica, 0) * size
            queued = load.num_requests * mean_request
            excess = self._recent.filled * max(0.0, tokens - tolerated)
            return computed + queued + excess, tokens, self._draws.random()

        order = [load.replica for load in sorted(loads, key=cost)]
        self._note(request, order[0], depths.get(order[0], 0))
        return order

    def note_routed(self, request: RouteRequest, replica: str) -> None:
        """See `Router.note_routed`."""
        self._note(request, replica, self._depths(request).get(replica, 0))

    def apply(self, events: StateEvents) -> bool:
        """See `Router.apply`."""
        is_complete = self.index.apply(events)
        if is_complete:
            self._prospects.settle(events.inserted, events.replica)
            self._prospects.settle(events.removed, events.replica)
        return is_complete

    def forget(self, replica: str) -> None:
        """See `Router.forget`."""
        for part in (self.index, self._prospects, self._recent):
            part.forget(replica)

    def _depths(self, request: RouteRequest) -> dict[str, int]:
        """Replica -> the blocks behind which it can resume the prompt, or is expected to soon."""
        keys = request.keys[: request.num_resumable_blocks]
        depths = self.index.deepest(keys)
        replica, depth = self._prospects.deepest(keys)
        if depth > depths.get(replica, 0):
            depths[replica] = depth
        return depths

    def _note(self, request: RouteRequest, replica: str, depth: int) -> None:
        computed = request.num_tokens - depth * request.block_size_tokens
        self._recent.add(replica, computed + min(request.num_answer_tokens, LONGEST_ANSWER))
        self._prospects.add(request.keys, replica)
