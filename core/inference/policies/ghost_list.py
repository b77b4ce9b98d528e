"""A bounded memory of prefixes that are gone, so that *evicted* can be told from *never seen*."""

from collections import OrderedDict
from collections.abc import Iterable


class GhostList:
    """Hash -> why it is gone, for the `capacity` most recent; O(1) a call."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._reasons: OrderedDict[int, str] = OrderedDict()

    def add(self, key: int, reason: str) -> None:
        self.add_all((key,), reason)

    def add_all(self, keys: Iterable[int], reason: str) -> None:
        reasons = self._reasons
        for key in keys:
            if key in reasons:
                reasons.move_to_end(key)
            reasons[key] = reason
        while len(reasons) > self._capacity:
            reasons.popitem(last=False)

    def discard(self, key: int) -> None:
        self._reasons.pop(key, None)

    def reason(self, key: int) -> str | None:
        return self._reasons.get(key)

    def clear(self) -> None:
        self._reasons.clear()

    def __contains__(self, key: int) -> bool:
        return key in self._reasons

    def __len__(self) -> int:
        return len(self._reasons)
