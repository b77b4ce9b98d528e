"""How busy replicas are, as one router of requests knows."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..net.routing.state_router import ReplicaLoad

_LONGEST_SENDING_S = 30.0


@dataclass(slots=True)
class _Sent:
    """A request of this router."""

    replica: str
    num_tokens: int
    since_s: float
    order: tuple[str, ...]
    is_routed: bool = False


class ReplicaLoads:
    """Counts the requests that a router has chosen a replica for and that have not ended.

    Ray knows how many requests a replica has, but not those that are chosen and not sent yet: a burst would
    go to one replica. A request that is chosen for a replica and never sent is forgotten after 30 s.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sent: dict[str, _Sent] = {}

    def note_chosen(self, request: str, order: Sequence[str], num_tokens: int) -> None:
        """Note that a request is to try replicas in this order; a second choice replaces the first."""
        self._sent[request] = _Sent(order[0], num_tokens, self._clock(), tuple(order))

    def order_of(self, request: str, replicas: Collection[str]) -> tuple[str, ...]:
        """In which order a request that none of these replicas has taken yet is to try them.

        Returns:
            () where no order was chosen, or was chosen among others or more than 30 s ago.
        """
        sent = self._sent.get(request)
        if sent is None or sent.is_routed or sent.since_s < self._clock() - _LONGEST_SENDING_S:
            return ()
        return sent.order if set(sent.order) == set(replicas) else ()

    def note_routed(self, request: str, replica: str) -> bool:
        """Note that a replica has a request. Returns whether another replica was chosen for it."""
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
        """The loads now.

        Args:
            replicas: names.
            queue_lengths: requests of each replica, as Ray last knew; None or absent where Ray does not know.
        """
        horizon = self._clock() - _LONGEST_SENDING_S
        counts: dict[str, tuple[int, int]] = {}
        for request, sent in list(self._sent.items()):
            if not sent.is_routed and sent.since_s < horizon:
                del self._sent[request]
                continue
            number, tokens = counts.get(sent.replica, (0, 0))
            counts[sent.replica] = number + 1, tokens + sent.num_tokens
        loads = []
        for name in replicas:
            number, tokens = counts.get(name, (0, 0))
            loads.append(ReplicaLoad(name, max(number, queue_lengths.get(name) or 0), tokens))
        return loads
