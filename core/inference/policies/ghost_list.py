"""A bounded memory of prefixes that are gone, so that *evicted* can be told from *never seen*."""

from collections import OrderedDict


class GhostList:
    """Hash -> why it is gone, for the `capacity` most recent; O(1) a call."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._reasons: OrderedDict[int, str] = OrderedDict()

    def add(self, key: int, reason: str) -> None:
        self._reasons[key] = reason
        self._reasons.move_to_end(key)
        if len(self._reasons) > self._capacity:
            self._reasons.popitem(last=False)

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
