"""Which cached state goes when a slot is needed."""

from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from typing import Protocol

EVICTION_POLICIES = ("lru", "ref_zero")
"""The names by which configurations choose a policy."""


class SlotEvictionPolicy(Protocol):
    """Orders the committed slots of a pool; told of every change, it names victims and evicts nothing."""

    def insert(self, *slots: int) -> None:
        """States were committed in these slots, which held none."""

    def use(self, slot: int) -> None:
        """A request resumed from `slot`. A KV match alone is no use of the state."""

    def remove(self, *slots: int) -> None:
        """These slots hold no committed state any more."""

    def clear(self) -> None: ...

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        """The up to `count` evictable slots whose loss costs least, cheapest first."""


class LRUEviction:
    """The state that was used longest ago goes first; O(1) a change, O(count + pinned) a choice."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def insert(self, *slots: int) -> None:
        order = self._order
        for slot in slots:
            order[slot] = None

    def use(self, slot: int) -> None:
        self._order.move_to_end(slot)

    def remove(self, *slots: int) -> None:
        order = self._order
        for slot in slots:
            del order[slot]

    def clear(self) -> None:
        self._order.clear()

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        return list(islice(filter(evictable, self._order), min(count, len(self._order))))


class RefZeroEviction(LRUEviction):
    """The state committed first goes first, used or not.

    Under this policy a state leaves with the last reference to its KV block (the host deregisters the
    block), so what competes for slots is all in use, and recency says nothing.
    """

    def use(self, slot: int) -> None:
        pass
