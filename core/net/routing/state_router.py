"""A router by the deepest state that a replica can resume from, weighed against the load of the replica."""

import random
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from ...validation import integer
from .state_events import StateEvents
from .state_index import StateIndex

TOLERATED_EXCESS = 0.1
"""A replica may have received a tenth more work than the mean before it is spared. With 0, small excesses
move conversations, and the replicas compute 9 % more tokens of the chat trace; with 0.2 the busiest replica
has 1.14 times the mean, with 0.1 it has 1.05."""
LONGEST_ANSWER = 512
"""The most tokens that an answer counts for: callers often know a limit only, which few answers reach."""
WAITING_REQUESTS = 64  # a state is expected until its replica received so many further requests
MAX_EXPECTED_HASHES = 1 << 16  # the prompts of 160 requests of 100,000 tokens, in blocks of 256
REMEMBERED_REQUESTS = 64
"""Requests of each replica that count as recent. Fewer would not see that a replica is slow before its queue
does; more would make a replica compensate for old differences."""


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """A request as a router sees it.

    Attributes:
        hashes: the hash of each whole block of the prompt, in order; each stands for the prefix up to its
            block's end, and for the salt.
        num_tokens: tokens of the prompt.
        block_size_tokens: tokens of a block.
        num_answer_tokens: the most tokens of the answer; an estimate where the caller knows none.
    """

    hashes: Sequence[int]
    num_tokens: int
    block_size_tokens: int
    num_answer_tokens: int = 0

    @property
    def num_resumable_blocks(self) -> int:
        """The blocks that can be resumed: at least one token is computed. 512 tokens, blocks of 256: 1."""
        return min(len(self.hashes), max(self.num_tokens - 1, 0) // self.block_size_tokens)


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """The load of a replica.

    Attributes:
        replica: its name.
        num_requests: requests that wait or run there.
        num_tokens: tokens that these will still compute; 0 where they are not counted.
    """

    replica: str
    num_requests: int
    num_tokens: int = 0


class StateRouter:
    """Chooses the replica where a request costs the fewest tokens.

    A request costs at a replica the sum of

    - the prompt tokens after the replica's deepest state of the prompt;
    - the replica's queue: its requests times the mean tokens of a request;
    - the recent tokens of the replica beyond 1 + `TOLERATED_EXCESS` times the mean of all replicas. After few
      requests these count for less.

    So a conversation stays where its state is until other replicas have less to do by the length of its
    history, and a popular system prompt spreads to as many replicas as its requests keep busy. A state is
    expected where its prompt was sent, until the replica's messages confirm it: a burst with one new prefix
    is computed by one replica. One thread uses a router; a wrong choice costs time only.

    Example: prompt 10,000 tokens; "a" has a state after 8,192 and two requests waiting, of 500 tokens in the
    mean; "b" is idle without a state: "a" costs 1,808 + 1,000, "b" costs 10,000: "a" first.

    Attributes:
        index: the states of all replicas.
    """

    def __init__(self, seed: int = 0) -> None:
        """`seed`: of the order of equals."""
        self.index = StateIndex()
        self._draws = random.Random(integer("seed", seed))
        self._expected = ExpectedStates()
        self._recent = RecentWork()

    def choose(self, request: RouteRequest, loads: Sequence[ReplicaLoad]) -> list[str]:
        """The replicas in the order in which the request should try them; O(blocks of the prompt + replicas).

        The request counts as sent to the first.

        Raises:
            ValueError: `loads` is empty, or has a replica twice.
        """
        names = [load.replica for load in loads]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"loads names {names}; accepted: one replica or more, each once")
        depths = self._depths(request)
        self._recent.insert(names)
        recent = {name: self._recent.tokens[name] for name in names}
        mean_request, size = self._recent.mean_request, request.block_size_tokens
        tolerated = (1 + TOLERATED_EXCESS) * sum(recent.values()) / len(recent)

        def cost(load: ReplicaLoad) -> tuple[float, float, float]:
            tokens = recent[load.replica]
            computed = request.num_tokens - depths.get(load.replica, 0) * size
            waiting = load.num_requests * mean_request
            excess = self._recent.filled * max(0.0, tokens - tolerated)
            return computed + waiting + excess, tokens, self._draws.random()

        order = [load.replica for load in sorted(loads, key=cost)]
        self._record(request, order[0], depths.get(order[0], 0))
        return order

    def record_routed(self, request: RouteRequest, replica: str) -> None:
        """A request went to another replica than the first that `choose` returned."""
        self._record(request, replica, self._depths(request).get(replica, 0))

    def apply(self, events: StateEvents) -> bool:
        """Apply a message of a replica; False where the router needs a snapshot of the replica."""
        is_complete = self.index.apply(events)
        if is_complete:
            self._expected.remove_published(events.inserted + events.removed, events.replica)
        return is_complete

    def remove(self, replica: str) -> None:
        """Remove a replica that is gone, with all its states."""
        for part in (self.index, self._expected, self._recent):
            part.remove(replica)

    def _depths(self, request: RouteRequest) -> dict[str, int]:
        """Replica -> the blocks after which it can resume the prompt, or is expected to soon."""
        hashes = request.hashes[: request.num_resumable_blocks]
        depths = self.index.deepest(hashes)
        replica, depth = self._expected.deepest(hashes)
        if depth > depths.get(replica, 0):
            depths[replica] = depth
        return depths

    def _record(self, request: RouteRequest, replica: str, depth: int) -> None:
        computed = request.num_tokens - depth * request.block_size_tokens
        self._recent.add(replica, computed + min(request.num_answer_tokens, LONGEST_ANSWER))
        self._expected.add(request.hashes, replica)


class ExpectedStates:
    """Prefixes that were sent to a replica whose state has not been published yet."""

    def __init__(self) -> None:
        # hash -> replica and the request's index there, from 1; least recently sent first
        self._entries: OrderedDict[int, tuple[str, int]] = OrderedDict()
        self._num_sent: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, hashes: Sequence[int], replica: str) -> None:
        """A prompt with these blocks was sent to a replica."""
        self._num_sent[replica] += 1
        entry = replica, self._num_sent[replica]
        entries = self._entries
        for prefix_hash in hashes:
            entries[prefix_hash] = entry
            entries.move_to_end(prefix_hash)
        while entries and (len(entries) > MAX_EXPECTED_HASHES or self._is_expired(next(iter(entries)))):
            entries.popitem(last=False)

    def remove_published(self, hashes: Sequence[int], replica: str) -> None:
        """Remove the entries of a replica that has published these states or their eviction."""
        for prefix_hash in hashes:
            if prefix_hash in self._entries and self._entries[prefix_hash][0] == replica:
                del self._entries[prefix_hash]

    def remove(self, replica: str) -> None:
        """Remove the entries of a replica that is gone; O(entries)."""
        self._num_sent.pop(replica, None)
        for prefix_hash in [h for h, (name, _) in self._entries.items() if name == replica]:
            del self._entries[prefix_hash]

    def deepest(self, hashes: Sequence[int]) -> tuple[str, int]:
        """The replica that was sent the longest part of a prompt, and its blocks; ("", 0) for none."""
        for depth in range(len(hashes), 0, -1):
            if hashes[depth - 1] in self._entries and not self._is_expired(hashes[depth - 1]):
                return self._entries[hashes[depth - 1]][0], depth
        return "", 0

    def _is_expired(self, prefix_hash: int) -> bool:
        replica, request_index = self._entries[prefix_hash]
        return self._num_sent[replica] - request_index >= WAITING_REQUESTS


class RecentWork:
    """Tokens of each replica's last `REMEMBERED_REQUESTS` requests in the mean; later ones count for more."""

    def __init__(self) -> None:
        self.tokens: dict[str, float] = {}  # of each inserted replica
        self._total = 0.0
        self._num_requests = 0.0

    @property
    def mean_request(self) -> float:
        """Mean tokens of a request; 0 before the first."""
        return self._total / self._num_requests if self._num_requests else 0.0

    @property
    def filled(self) -> float:
        """From 0 before the first request to 1 once each replica had 16 in the mean."""
        return min(1.0, self._num_requests / (16 * len(self.tokens))) if self.tokens else 0.0

    def insert(self, replicas: Sequence[str]) -> None:
        """Let the new ones of these replicas begin with the mean of the others of these."""
        tokens = [self.tokens[name] for name in replicas if name in self.tokens]
        mean = sum(tokens) / len(tokens) if tokens else 0.0
        for name in replicas:
            self.tokens.setdefault(name, mean)

    def add(self, replica: str, num_tokens: int) -> None:
        """Record a request of `num_tokens` that was sent to a replica; O(replicas)."""
        self.insert([replica])
        decay = 1 - 1 / (REMEMBERED_REQUESTS * len(self.tokens))
        for name in self.tokens:
            self.tokens[name] *= decay
        self._total, self._num_requests = self._total * decay + num_tokens, self._num_requests * decay + 1
        self.tokens[replica] += num_tokens

    def remove(self, replica: str) -> None:
        """Remove a replica; nothing happens for an unknown one."""
        self.tokens.pop(replica, None)
