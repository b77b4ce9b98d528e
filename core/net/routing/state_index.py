"""The resumable states of all replicas, as their messages describe them."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ...validation import INT64_MAX, integer
from .state_events import StateEvents


@dataclass(slots=True)
class _Replica:
    epoch: int = -1
    sequence: int = -1
    hashes: set[int] = field(default_factory=set)


class StateIndex:
    """Which replica can resume after which blocks, as of its last message without a gap before it.

    A lookup costs O(blocks of the prompt), whatever the number of replicas: each hash has the names of its
    holders. Beyond `max_hashes`, further hashes are ignored, which costs misses; `num_ignored` counts them.
    """

    def __init__(self, max_hashes: int = 4_000_000) -> None:
        """`max_hashes`: each takes 150 to 270 bytes, and 90 for each further replica."""
        self.max_hashes = integer("max_hashes", max_hashes, 1, INT64_MAX)
        self.num_ignored = 0
        self._replicas: dict[str, _Replica] = {}
        self._holders: dict[int, tuple[str, ...]] = {}  # hash -> the replicas that hold it

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def replicas(self) -> list[str]:
        """The replicas that sent messages."""
        return list(self._replicas)

    def apply(self, events: StateEvents) -> bool:
        """Apply a message, unless it is old; False, and nothing changed, where earlier ones are missing."""
        replica = self._replicas.get(events.replica) or _Replica()
        same_epoch = events.epoch == replica.epoch
        least = replica.sequence if events.is_snapshot else replica.sequence + 1
        if events.epoch < replica.epoch or (same_epoch and events.sequence < least):
            return True
        begins = events.is_snapshot or (events.sequence == 0 and not same_epoch)
        if not begins and not (same_epoch and events.sequence == least):
            return False
        self._replicas[events.replica] = replica
        self._remove(events.replica, replica.hashes.difference(events.inserted) if begins else events.removed)
        for prefix_hash in events.inserted:
            if prefix_hash not in replica.hashes:
                self._insert(events.replica, prefix_hash)
        replica.epoch, replica.sequence = events.epoch, events.sequence
        return True

    def remove(self, replica: str) -> None:
        """Remove all entries of a replica; nothing happens for an unknown one."""
        if replica in self._replicas:
            self._remove(replica, list(self._replicas[replica].hashes))
            del self._replicas[replica]

    def deepest(self, hashes: Sequence[int]) -> dict[str, int]:
        """Replica -> blocks after which it can resume, the deepest first, as {"b": 3, "a": 2}; O(blocks)."""
        depths: dict[str, int] = {}
        for depth in range(len(hashes), 0, -1):
            for replica in self._holders.get(hashes[depth - 1], ()):
                depths.setdefault(replica, depth)
            if len(depths) == len(self._replicas):
                break
        return depths

    def _insert(self, replica: str, prefix_hash: int) -> None:
        holders = self._holders.get(prefix_hash, ())
        if not holders and len(self._holders) >= self.max_hashes:
            self.num_ignored += 1
            return
        # First: after an interrupt, the next snapshot removes it.
        self._replicas[replica].hashes.add(prefix_hash)
        self._holders[prefix_hash] = (*holders, replica)

    def _remove(self, replica: str, hashes: Collection[int]) -> None:
        replica_hashes = self._replicas[replica].hashes
        for prefix_hash in replica_hashes.intersection(hashes):
            if holders := tuple(name for name in self._holders.get(prefix_hash, ()) if name != replica):
                self._holders[prefix_hash] = holders
            else:
                self._holders.pop(prefix_hash, None)
            replica_hashes.discard(prefix_hash)
