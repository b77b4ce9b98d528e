"""Which cached state is evicted when a slot is needed."""

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import Protocol

from .pool_stats import Clock

EVICTION_POLICIES = ("value", "lru")
"""The names by which configurations choose a policy."""


class SlotEvictionPolicy(Protocol):
    """Orders the committed slots of a pool by what their loss would cost.

    The pool reports every change to its policy. The policy names victims; the pool evicts them.
    """

    refuses: bool
    """Whether a new state may be refused in favour of cached ones; then `least` chooses."""

    def arrive(self, keys: Sequence[int], stop: int, again: bool = False) -> int:
        """A request comes; it could resume from a state behind at most `keys[:stop]`.

        `again`: whether the request came before, and was preempted.

        Returns:
            A number for the request.
        """

    def end(self, visit: int) -> None:
        """The request with this number ends, or is preempted."""

    def plan(self, keys: Sequence[int], depth: int, taken_as: str, visit: int) -> None:
        """A request's state behind `keys[:depth]` is to be taken, at a boundary of kind `taken_as`."""

    def unplan(self, key: int) -> None:
        """The state that was planned behind the prefix with this hash found no slot, or was not written."""

    def unplan_all(self) -> None:
        """No state is planned any more."""

    def least(self, evictable: Callable[[int], bool], planned: Collection[int] = ()) -> tuple[int, int]:
        """What costs least to lose: (evictable slot, -1), (-1, planned key), or (-1, -1) for nothing."""

    def insert(self, *slots: int) -> None:
        """States were committed in these slots, which held none."""

    def name(self, slot: int, key: int, path: Callable[[], Sequence[int]]) -> None:
        """The state in `slot` is found under `key`; `path` tells the hashes of its prefix, `key` the last."""

    def use(self, slot: int) -> None:
        """A request resumed from `slot`. A KV match alone does not count as a use."""

    def remove(self, *slots: int, remember: bool = True) -> list[int]:
        """These slots hold no committed state any more.

        `remember`: whether requests for these states are still to be expected.

        Returns:
            When each was last used, or else committed, in nanoseconds.
        """

    def clear(self) -> None: ...

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        """Up to `count` evictable slots, the one whose loss costs least first."""

    def check_integrity(self, slots: Collection[int]) -> None:
        """Raise AssertionError unless the policy orders the committed `slots`, and nothing else."""


class LRUEviction:
    """The state used longest ago goes first. A change takes O(1), a choice O(count + pinned).

    Requests, plans and names change nothing.
    """

    refuses = False

    def __init__(self, clock: Clock = time.monotonic_ns) -> None:
        self._clock = clock
        self._order: OrderedDict[int, int] = OrderedDict()  # slot -> when it was last used

    def arrive(self, keys: Sequence[int], stop: int, again: bool = False) -> int:
        return -1

    def end(self, visit: int) -> None: ...

    def plan(self, keys: Sequence[int], depth: int, taken_as: str, visit: int) -> None: ...

    def unplan(self, key: int) -> None: ...

    def unplan_all(self) -> None: ...

    def name(self, slot: int, key: int, path: Callable[[], Sequence[int]]) -> None: ...

    def least(self, evictable: Callable[[int], bool], planned: Collection[int] = ()) -> tuple[int, int]:
        return next(iter(self.victims(1, evictable)), -1), -1

    def insert(self, *slots: int) -> None:
        order, now = self._order, self._clock()
        for slot in slots:
            order[slot] = now

    def use(self, slot: int) -> None:
        self._order.move_to_end(slot)
        self._order[slot] = self._clock()

    def remove(self, *slots: int, remember: bool = True) -> list[int]:
        pop = self._order.pop
        return [pop(slot) for slot in slots]

    def clear(self) -> None:
        self._order.clear()

    def check_integrity(self, slots: Collection[int]) -> None:
        assert self._order.keys() == set(slots), "the eviction policy orders other slots than the committed"

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        return list(islice(filter(evictable, self._order), min(count, len(self._order))))
