"""What a router is asked, and what it answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .state_events import StateEvents


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """A request as a router sees it.

    Attributes:
        keys: the hash of each whole block of the prompt, in order. A hash stands for the prefix that ends
            with its block, and for the salt.
        num_tokens: tokens of the prompt.
        block_size_tokens: tokens of a block.
        num_answer_tokens: the most tokens of the answer; an estimate where the caller knows none.
    """

    keys: Sequence[int]
    num_tokens: int
    block_size_tokens: int
    num_answer_tokens: int = 0

    @property
    def num_resumable_blocks(self) -> int:
        """The blocks behind which the prompt could resume: one token at least is computed."""
        return min(len(self.keys), max(self.num_tokens - 1, 0) // self.block_size_tokens)


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """How busy a replica is.

    Attributes:
        replica: its name.
        num_requests: requests that wait or run there.
        num_tokens: tokens that these are still expected to compute, prompts and answers; 0 where nobody
            counts them.
    """

    replica: str
    num_requests: int
    num_tokens: int = 0


class Router(Protocol):
    """Chooses among replicas. Nothing that it knows has to be right: a wrong choice costs time alone.

    A router is used by one thread. Its choices depend on its seed and on the calls alone.

    Attributes:
        reads_events: whether `apply` is of use.
    """

    reads_events: bool

    def choose(self, request: RouteRequest, loads: Sequence[ReplicaLoad]) -> Sequence[str]:
        """The replicas in the order in which the request should try them, best first.

        The router takes the request for one that goes to the first.

        Args:
            request: what is to be served.
            loads: the replicas that may serve it, at least one.
        """
        ...

    def note_routed(self, request: RouteRequest, replica: str) -> None:
        """Note that a request went to another replica than the first that `choose` named."""
        ...

    def apply(self, events: StateEvents) -> bool:
        """Note what a replica tells of its states; False where the router needs a snapshot of the replica."""
        ...

    def forget(self, replica: str) -> None:
        """Note that a replica is gone, with all its states."""
        ...


def check_loads(loads: Sequence[ReplicaLoad]) -> None:
    """Raise a ValueError where there is no replica, or one twice."""
    if not loads or len({load.replica for load in loads}) < len(loads):
        names = [load.replica for load in loads]
        raise ValueError(f"loads names {names}; accepted: one replica or more, each once")
