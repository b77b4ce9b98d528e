"""A bounded memory of prefixes that are gone, so that *evicted* can be told from *never seen*."""

from collections.abc import Container, Iterable, Sequence


class GhostList:
    """Hash -> why it is gone, for the `capacity` added last and up to as many before them; O(1) a key.

    Two generations: once the younger has `capacity` keys, it becomes the older, and the former older one is
    forgotten at once. To forget key by key costs three times as much as to remember.
    """

    def __init__(self, capacity: int, present: Container[int] = ()) -> None:
        """A key is no ghost while it is in `present`, which spares its owner to discard what comes back."""
        self._capacity = capacity
        self._present = present
        self._young: dict[int, str] = {}
        self._old: dict[int, str] = {}

    def add(self, key: int, reason: str) -> None:
        self.add_all((key,), reason)

    def add_all(self, keys: Iterable[int], reason: str) -> None:
        young = self._young
        for key in keys:
            young[key] = reason
        if len(young) >= self._capacity:
            self._old, self._young = (young if self._capacity else {}), {}

    def discard_all(self, keys: Sequence[int]) -> None:
        for generation in (self._young, self._old):
            if generation and not generation.keys().isdisjoint(keys):
                for key in keys:
                    generation.pop(key, None)

    def reason(self, key: int) -> str | None:
        return None if key in self._present else self._young.get(key) or self._old.get(key)

    def clear(self) -> None:
        self._young.clear()
        self._old.clear()

    def __contains__(self, key: int) -> bool:
        return (key in self._young or key in self._old) and key not in self._present

    def __len__(self) -> int:
        return sum(1 for key in self._young.keys() | self._old.keys() if key not in self._present)
