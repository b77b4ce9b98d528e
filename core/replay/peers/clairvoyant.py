"""Slots of a cache that knows the trace."""

from collections.abc import Callable

from .blocks import ROOT
from .future import KnownFuture
from .states import StateSlots

Worth = Callable[[int, int, int], float]
"""Of (blocks that a state saves, requests until its next use, block depth): the least worth goes first."""


def soonest(saved: int, wait: int, depth: int) -> float:
    """Belady: the state goes whose next use comes last."""
    return 1.0 / wait


def densest(saved: int, wait: int, depth: int) -> float:
    """The state goes that saves fewest tokens for the time that it waits."""
    return saved / wait


def largest(saved: int, wait: int, depth: int) -> float:
    """The state goes that saves fewest tokens at its next use."""
    return saved + 1.0 / wait


class ClairvoyantSlots(StateSlots):
    """Keeps only states that a request to come would resume from.

    The state of least worth goes, the new one included.

    Args:
        future: of the trace.
        capacity: slots.
        worth: of a state.
        kept: requests for which a state may be kept; None for all.
    """

    def __init__(
        self, future: KnownFuture, capacity: int, worth: Worth, kept: set[int] | None = None
    ) -> None:
        super().__init__(future.index, capacity)
        self._future = future
        self._worth = worth
        self._kept = kept
        self._next: dict[int, tuple[int, int]] = {}
        self._now = -1

    def came(self, number: int) -> None:
        self._now = max(self._now, number)

    def next_kv_use(self, node: int) -> int:
        """The negative of the next use of its KV: KV that is never used again goes first."""
        following = self._future.next_kv_use(node, self._now)
        return -following if following >= 0 else -(1 << 60)

    def store(self, node: int) -> bool:
        if node in self.slots:
            return True
        if not self._note(node):
            return False
        if super().store(node):
            return True
        del self._next[node]
        return False

    def unpin(self, node: int) -> None:
        super().unpin(node)
        if not self.pinned(node) and not self._note(node):
            self.drop(node)

    def drop(self, node: int) -> None:
        self._next.pop(node, None)
        super().drop(node)

    def forget(self, node: int) -> None:
        self._next.pop(node, None)
        super().forget(node)

    def victim(self, newcomer: int) -> int | None:
        now, worth, depths = self._now, self._worth, self.index.depth
        least, found = None, None
        for node, (following, saved) in self._next.items():
            if self.pinned(node):
                continue
            value = worth(saved, max(1, following - now), depths[node])
            if least is None or value < least:
                least, found = value, node
        return None if found == newcomer else found

    def _note(self, node: int) -> bool:
        """Look up the next use of a state, and what it saves; False where there is none."""
        following = self._future.next_use(node, self._now)
        if following < 0 or (self._kept is not None and following not in self._kept):
            return False
        parent, depth = self.index.parent, self.index.depth
        above = parent[node]
        while above != ROOT and above not in self.slots:
            above = parent[above]
        self._next[node] = (following, depth[node] - depth[above])
        return True
