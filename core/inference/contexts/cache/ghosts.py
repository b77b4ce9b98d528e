"""What is gone under which hash."""

from collections.abc import Collection, Iterable, Sequence
from typing import Literal

GhostKind = Literal["block", "continuation", "state", "refused state"]
"""What is gone under a prefix hash: its KV block, a block that continued it, its state, or a state for which
no slot was available."""
_BITS: dict[GhostKind, int] = {"block": 1, "continuation": 2, "state": 4, "refused state": 8}
_STATES = _BITS["state"] | _BITS["refused state"]


class GhostList:
    """A bounded map from the hashes of prefixes to the kinds of ghosts under them; O(1) a hash.

    A block that is registered again stays listed as gone. A state is listed until `discard_states` names it.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._young: dict[int, int] = {}  # hash -> bits
        self._old: dict[int, int] = {}  # cleared when the young one has `capacity` hashes
        self.num_lapses = 0  # how often that was

    def add_all(self, keys: Collection[int], kind: GhostKind) -> None:
        young, old, bit = self._young, self._old, _BITS[kind]
        others = ~_STATES if bit & _STATES else -1
        if young.keys().isdisjoint(keys) and old.keys().isdisjoint(keys):
            young.update(dict.fromkeys(keys, bit))
        else:
            for key in keys:
                young[key] = (young.get(key) or old.get(key, 0)) & others | bit
        if len(young) >= self.capacity:
            self.num_lapses += bool(self._old) or not self.capacity
            self._old, self._young = (young if self.capacity else {}), {}

    def has(self, key: int, kind: GhostKind) -> bool:
        return bool((self._young.get(key) or self._old.get(key, 0)) & _BITS[kind])

    def discard_states(self, keys: Iterable[int]) -> None:
        """Note that the states under these hashes are there."""
        for generation in (self._young, self._old):
            if generation and not generation.keys().isdisjoint(keys):
                for key in generation.keys() & keys:
                    generation[key] &= ~_STATES
                    if not generation[key]:
                        del generation[key]

    def deepest_state(self, keys: Sequence[int], start: int, stop: int) -> int:
        """The largest d in (start, stop] where the state under `keys[d - 1]` is gone, else `start`."""
        young, old = self._young, self._old
        inside = keys[start:stop][::-1]
        if not inside or (young.keys().isdisjoint(inside) and old.keys().isdisjoint(inside)):
            return start
        gone = ((young.get(key) or old.get(key, 0)) & _STATES for key in inside)
        return next((stop - i for i, bits in enumerate(gone) if bits), start)

    def clear(self) -> None:
        self.num_lapses += 1
        self._young, self._old = {}, {}

    def __len__(self) -> int:
        return len(self._young.keys() | self._old.keys())
