"""The resumable states of all replicas, as their messages describe them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...validation import INT64_MAX, integer
from .state_events import StateEvents

MAX_REPLICAS = 1024
"""A hash may have a bit for each replica, so names are limited to limit memory."""


@dataclass(slots=True)
class _Replica:
    bit: int
    epoch: int = -1
    sequence: int = -1
    keys: set[int] = field(default_factory=set)


_UNKNOWN = _Replica(0)


class StateIndex:
    """Which replica can resume after which blocks.

    The entries of a replica are those that it had after its last message without a gap before it. A lookup
    costs O(blocks of the prompt), whatever the number of replicas: each hash has one integer, with a bit for
    each replica that holds it. Messages of more than `MAX_REPLICAS` replicas are ignored.

    Attributes:
        max_keys: the maximum number of hashes. Further ones are ignored, which costs misses.
        num_ignored: how many hashes were ignored.
    """

    def __init__(self, max_keys: int = 4_000_000) -> None:
        """`max_keys`: each takes 130 to 250 bytes, and 80 for each further replica."""
        self.max_keys = integer("max_keys", max_keys, 1, INT64_MAX)
        self.num_ignored = 0
        self._replicas: dict[str, _Replica] = {}
        self._holders: dict[int, int] = {}  # hash -> the bits of the replicas that hold it
        self._name_of_bit: dict[int, str] = {}
        self._all_bits = 0

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def replicas(self) -> list[str]:
        """The replicas that sent messages."""
        return list(self._replicas)

    def keys_of(self, replica: str) -> frozenset[int]:
        """The hashes that a replica holds; none for an unknown one."""
        return frozenset(self._replicas.get(replica, _UNKNOWN).keys)

    def snapshot_of(self, replica: str) -> StateEvents:
        """What a known replica holds, as a message of its own."""
        known = self._replicas[replica]
        return StateEvents(replica, known.epoch, known.sequence, tuple(known.keys), is_snapshot=True)

    def apply(self, events: StateEvents) -> bool:
        """Apply a message. Old and repeated ones change nothing.

        Returns:
            False where earlier messages are missing. Then nothing is changed, and the caller should ask the
                replica for a snapshot. Example: sequence 5 after sequence 3 returns False.
        """
        known = self._replicas.get(events.replica, _UNKNOWN)
        same_epoch = events.epoch == known.epoch
        least = known.sequence if events.is_snapshot else known.sequence + 1
        if events.epoch < known.epoch or (same_epoch and events.sequence < least):
            return True
        begins = events.is_snapshot or (events.sequence == 0 and not same_epoch)
        if not begins and not (same_epoch and events.sequence == least):
            return False
        if known is _UNKNOWN:
            if len(self._replicas) >= MAX_REPLICAS:
                self.num_ignored += len(events.inserted)
                return True
            known = self._new_replica(events.replica)
        removed = known.keys.difference(events.inserted) if begins else events.removed
        self._remove(known, removed)
        self._insert(known, events.inserted)
        known.epoch, known.sequence = events.epoch, events.sequence
        return True

    def forget(self, replica: str) -> None:
        """Remove all entries of a replica; nothing happens for an unknown one."""
        known = self._replicas.pop(replica, None)
        if known is not None:
            self._remove(known, list(known.keys))
            del self._name_of_bit[known.bit]
            self._all_bits &= ~known.bit

    def deepest(self, keys: Sequence[int]) -> dict[str, int]:
        """Replica -> the number of blocks after which it can resume, the deepest first; O(blocks).

        Args:
            keys: the hashes of the prompt's blocks. Example: with states of "a" after block 2 and of "b"
                after blocks 1 and 3, four blocks give {"b": 3, "a": 2}.
        """
        found: dict[str, int] = {}
        missing, holders = self._all_bits, self._holders
        for depth in range(len(keys), 0, -1):
            here = holders.get(keys[depth - 1], 0) & missing
            while here:
                bit = here & -here
                found[self._name_of_bit[bit]] = depth
                here ^= bit
                missing ^= bit
            if not missing:
                break
        return found

    def _new_replica(self, name: str) -> _Replica:
        bit = ~self._all_bits & (self._all_bits + 1)  # the lowest free bit
        self._name_of_bit[bit] = name
        self._all_bits |= bit
        self._replicas[name] = known = _Replica(bit)
        return known

    def _insert(self, replica: _Replica, keys: Sequence[int]) -> None:
        holders, bit = self._holders, replica.bit
        for key in keys:
            if key not in holders and len(holders) >= self.max_keys:
                self.num_ignored += 1
                continue
            replica.keys.add(key)  # first: after an interrupt, the next snapshot removes it
            holders[key] = holders.get(key, 0) | bit

    def _remove(self, replica: _Replica, keys: Sequence[int] | set[int]) -> None:
        holders, bit = self._holders, replica.bit
        for key in keys:
            if key in replica.keys:
                rest = holders.get(key, 0) & ~bit
                if rest:
                    holders[key] = rest
                else:
                    holders.pop(key, None)
                replica.keys.discard(key)
