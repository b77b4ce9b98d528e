"""How replicas are routed to, and what came of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from ...net.routing.routers import ROUTERS
from ..setting import ReplayResult

ONE_CACHE = "one cache"
"""Stands where a router's name would: one engine that is as large as all replicas together."""
EVENT_DELAY_MS = 50.0
"""From the end of a step to the router's index."""


@dataclass(frozen=True)
class Routing:
    """Which replicas there are, and what chooses among them.

    Attributes:
        num_replicas: how many; each has the memory of the setting.
        router: one of `ROUTERS`, or `ONE_CACHE`.
        seed: of the router.
        event_delay_ms: from the end of a step to the router's index.
    """

    num_replicas: int
    router: str
    seed: int = 0
    event_delay_ms: float = EVENT_DELAY_MS

    @property
    def is_one_cache(self) -> bool:
        return self.router == ONE_CACHE


def router_named(name: str) -> str:
    """`name`, where a router has it; ValueError for others."""
    if name not in ROUTERS:
        raise ValueError(f"router is {name!r}; accepted: {', '.join(ROUTERS)}")
    return name


@dataclass(frozen=True)
class ReplicaResult:
    """What one replica made of the requests that came to it.

    Attributes:
        served: prompts, and what was resumed.
        num_generated_tokens: of the answers.
    """

    served: ReplayResult
    num_generated_tokens: int

    @property
    def num_computed_tokens(self) -> int:
        """Prompt tokens that were not resumed, and the tokens of answers: the replica's load."""
        lost = self.served.lost_by_reason
        return sum(lost.values()) - lost.get("too_long", 0) + self.num_generated_tokens


@dataclass(frozen=True)
class RoutedResult:
    """What the replicas made of a trace.

    Attributes:
        replicas: each replica's part.
        replica_of: the number of the replica that served each request of the trace.
        first_token_s: of each request that fits into a pool, the seconds from its coming to its first token.
        duration_s: seconds until the last answer ended.
        num_sessions: sessions of the trace.
        num_moved_sessions: sessions whose requests went to more than one replica.
        num_events: messages about states that the router got; 0 where it reads none.
        event_bytes: their bytes.
    """

    replicas: tuple[ReplicaResult, ...]
    replica_of: tuple[int, ...]
    first_token_s: tuple[float, ...]
    duration_s: float
    num_sessions: int
    num_moved_sessions: int
    num_events: int = 0
    event_bytes: int = 0

    @property
    def num_requests(self) -> int:
        return sum(replica.served.num_requests for replica in self.replicas)

    @property
    def prompt_tokens(self) -> int:
        return sum(replica.served.prompt_tokens for replica in self.replicas)

    @property
    def resumed_tokens(self) -> int:
        return sum(replica.served.resumed_tokens for replica in self.replicas)

    @property
    def lost_by_reason(self) -> dict[str, int]:
        """Computed prompt tokens by reason, of all replicas."""
        reasons = dict.fromkeys(why for replica in self.replicas for why in replica.served.lost_by_reason)
        return {
            why: sum(replica.served.lost_by_reason.get(why, 0) for replica in self.replicas)
            for why in reasons
        }

    @property
    def share(self) -> float:
        """Resumed tokens / prompt tokens."""
        return self.resumed_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def token_imbalance(self) -> float:
        """The most tokens that a replica computed, over their mean."""
        return _imbalance([replica.num_computed_tokens for replica in self.replicas])

    @property
    def request_imbalance(self) -> float:
        """The most requests that a replica served, over their mean."""
        return _imbalance([replica.served.num_requests for replica in self.replicas])

    @property
    def mean_first_token_s(self) -> float:
        return fmean(self.first_token_s or [0.0])

    @property
    def p95_first_token_s(self) -> float:
        """The smallest time that 95 % of the requests do not exceed."""
        ordered = sorted(self.first_token_s) or [0.0]
        return ordered[-(-95 * len(ordered) // 100) - 1]

    @property
    def event_bytes_per_request(self) -> float:
        return self.event_bytes / self.num_requests if self.num_requests else 0.0

    @property
    def event_bytes_per_s(self) -> float:
        return self.event_bytes / self.duration_s if self.duration_s else 0.0


def _imbalance(numbers: Sequence[int]) -> float:
    """Largest over mean; 1 where all are 0."""
    return max(numbers) / fmean(numbers) if any(numbers) else 1.0
