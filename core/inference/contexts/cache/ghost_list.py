"""A bounded memory of prefixes that are gone, which tells *evicted* from *never seen*."""

from collections.abc import Container, Iterable, Sequence


class GhostList:
    """A bounded map from a hash to the reason why its prefix is gone; O(1) a key.

    The list remembers the last `capacity` keys, and up to `capacity` keys before them. There are two
    generations. Once the younger generation has `capacity` keys, it becomes the older one, and the former
    older generation is forgotten at once. Forgetting key by key would cost three times as much as
    remembering.

    Attributes:
        present: keys that are not gone. A key in `present` is no ghost, so that the owner need not discard
            keys that come back.
        num_lapses: how often keys were forgotten, a generation at once. What was a ghost is one still, until
            this number grows or the owner discards the key.
    """

    def __init__(self, capacity: int, present: Container[int] = ()) -> None:
        """
        Args:
            capacity: keys of one generation.
            present: see the class.
        """
        self._capacity = capacity
        self.present = present
        self._young: dict[int, str] = {}
        self._old: dict[int, str] = {}
        self.num_lapses = 0

    def add(self, key: int, reason: str) -> None:
        self.add_all((key,), reason)

    def add_all(self, keys: Iterable[int], reason: str) -> None:
        young = self._young
        for key in keys:
            young[key] = reason
        if len(young) >= self._capacity:
            self.num_lapses += bool(self._old)
            self._old, self._young = (young if self._capacity else {}), {}

    def discard_all(self, keys: Sequence[int]) -> bool:
        """Forget these keys; returns whether one of them was a ghost."""
        found = False
        for generation in (self._young, self._old):
            if generation and not generation.keys().isdisjoint(keys):
                found = True
                for key in keys:
                    generation.pop(key, None)
        return found

    def deepest(self, keys: Sequence[int], start: int, stop: int) -> int:
        """The largest d in (start, stop] whose `keys[d - 1]` is a ghost, or `start` where there is none."""
        if start >= stop or not (self._young or self._old):
            return start
        inside = keys[start:stop][::-1]
        if self._young.keys().isdisjoint(inside) and self._old.keys().isdisjoint(inside):
            return start
        return next((d for d in range(stop, start, -1) if keys[d - 1] in self), start)

    def reason(self, key: int) -> str | None:
        """Why the key is gone; None for a key that is no ghost."""
        return None if key in self.present else self._young.get(key) or self._old.get(key)

    def clear(self) -> tuple[dict[int, str], dict[int, str]]:
        """Forget all ghosts; returns the generations, which the caller may free when there is time."""
        generations = self._young, self._old
        self.num_lapses += any(generations)
        self._young, self._old = {}, {}
        return generations

    def __contains__(self, key: int) -> bool:
        return (key in self._young or key in self._old) and key not in self.present

    def __len__(self) -> int:
        return sum(1 for key in self._young.keys() | self._old.keys() if key not in self.present)
