"""How much work each replica was sent of late."""

from collections.abc import Iterable

REMEMBERED_REQUESTS = 64
"""Of each replica. Fewer would not see that a replica is behind before its queue does; more would have a
replica make up for what was long ago."""


class RecentWork:
    """Tokens that were sent to replicas, each request counting for less the more came after it.

    In the mean a replica has the tokens of its last `REMEMBERED_REQUESTS` requests.
    """

    def __init__(self) -> None:
        self._tokens: dict[str, float] = {}
        self._total = 0.0
        self._num_requests = 0.0

    @property
    def mean_request(self) -> float:
        """Tokens of a request in the mean; 0 before the first."""
        return self._total / self._num_requests if self._num_requests else 0.0

    @property
    def filled(self) -> float:
        """How much is known: 0 before the first request, and 1 once each replica had 16 in the mean."""
        return min(1.0, self._num_requests / (16 * len(self._tokens))) if self._tokens else 0.0

    def of(self, replicas: Iterable[str]) -> dict[str, float]:
        """The tokens of these replicas. One that is new begins with the mean of the others."""
        names = list(replicas)
        known = [self._tokens[name] for name in names if name in self._tokens]
        mean = sum(known) / len(known) if known else 0.0
        for name in names:
            self._tokens.setdefault(name, mean)
        return {name: self._tokens[name] for name in names}

    def add(self, replica: str, num_tokens: int) -> None:
        """Note a request of `num_tokens` that was sent to a replica; O(replicas)."""
        self.of([replica])
        left = 1 - 1 / (REMEMBERED_REQUESTS * len(self._tokens))
        for name in self._tokens:
            self._tokens[name] *= left
        self._total, self._num_requests = self._total * left + num_tokens, self._num_requests * left + 1
        self._tokens[replica] += num_tokens

    def forget(self, replica: str) -> None:
        """Forget a replica; nothing happens for an unknown one."""
        self._tokens.pop(replica, None)
