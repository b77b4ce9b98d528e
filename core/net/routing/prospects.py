"""States that are not there yet, but that a replica was sent a prompt for."""

from collections import Counter, OrderedDict
from collections.abc import Sequence

WAITING_REQUESTS = 64
"""A state is expected until its replica was sent so many requests more. The requests of a burst come before:
a prompt waits and is computed while the replica gets few others, or the replica is overloaded."""
MAX_KEYS = 1 << 16
"""The prompts of 160 requests of 100,000 tokens, in blocks of 256."""


class Prospects:
    """Which replica was sent a prefix last, as long as its state may still come.

    A prefix whose state is there is no prospect any more, nor is one that the replica has given up.
    """

    def __init__(self) -> None:
        # hash -> replica and the request's number there; sent longest ago first
        self._sent: OrderedDict[int, tuple[str, int]] = OrderedDict()
        self._num_sent: Counter[str] = Counter()

    def __len__(self) -> int:
        """How many hashes are held."""
        return len(self._sent)

    def add(self, keys: Sequence[int], replica: str) -> None:
        """Note that a prompt with these blocks was sent to a replica."""
        self._num_sent[replica] += 1
        entry, sent = (replica, self._num_sent[replica]), self._sent
        for key in keys:
            sent[key] = entry
            sent.move_to_end(key)
        while sent and (len(sent) > MAX_KEYS or self._is_over(next(iter(sent)))):
            sent.popitem(last=False)

    def settle(self, keys: Sequence[int], replica: str) -> None:
        """Drop the prospects of a replica behind these blocks: it has told what became of the states."""
        for key in keys:
            if key in self._sent and self._sent[key][0] == replica:
                del self._sent[key]

    def forget(self, replica: str) -> None:
        """Drop the prospects of a replica that is gone; O(prospects)."""
        self._num_sent.pop(replica, None)
        for key in [key for key, (name, _) in self._sent.items() if name == replica]:
            del self._sent[key]

    def deepest(self, keys: Sequence[int]) -> tuple[str, int]:
        """The replica that was sent the longest part of a prompt, its blocks; ("", 0) for none."""
        for depth in range(len(keys), 0, -1):
            if keys[depth - 1] in self._sent and not self._is_over(keys[depth - 1]):
                return self._sent[keys[depth - 1]][0], depth
        return "", 0

    def _is_over(self, key: int) -> bool:
        replica, number = self._sent[key]
        return self._num_sent[replica] - number >= WAITING_REQUESTS
