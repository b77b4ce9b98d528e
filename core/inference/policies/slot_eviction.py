"""Which cached state is evicted when a slot is needed."""

import time
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from typing import Protocol

from .departures import Clock

EVICTION_POLICIES = ("lru", "ref_zero")
"""The names by which configurations choose a policy."""


class SlotEvictionPolicy(Protocol):
    """Orders the committed slots of a pool by what their loss would cost.

    The pool reports every change to its policy. The policy names victims; the pool evicts them.
    """

    def insert(self, *slots: int) -> None:
        """States were committed in these slots, which held none."""

    def use(self, slot: int) -> None:
        """A request resumed from `slot`. A KV match alone does not count as a use."""

    def remove(self, *slots: int) -> list[int]:
        """These slots hold no committed state any more.

        Returns:
            When each was last used, or else committed, in nanoseconds.
        """

    def clear(self) -> None: ...

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        """Up to `count` evictable slots, the one whose loss costs least first."""


class LRUEviction:
    """The state used longest ago goes first. A change takes O(1), a choice O(count + pinned)."""

    def __init__(self, clock: Clock = time.monotonic_ns) -> None:
        self._clock = clock
        self._order: OrderedDict[int, int] = OrderedDict()  # slot -> when it was last used

    def insert(self, *slots: int) -> None:
        order, now = self._order, self._clock()
        for slot in slots:
            order[slot] = now

    def use(self, slot: int) -> None:
        self._order.move_to_end(slot)
        self._order[slot] = self._clock()

    def remove(self, *slots: int) -> list[int]:
        pop = self._order.pop
        return [pop(slot) for slot in slots]

    def clear(self) -> None:
        self._order.clear()

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        return list(islice(filter(evictable, self._order), min(count, len(self._order))))


class RefZeroEviction(LRUEviction):
    """The state committed first goes first, whether it was used or not.

    Under "ref_zero" a state leaves with the last reference to its KV block, because the host then deregisters
    the block. All states that compete for slots are therefore in use, and recency says nothing.
    """

    def use(self, slot: int) -> None:
        if slot not in self._order:
            raise KeyError(slot)
        self._order[slot] = self._clock()
