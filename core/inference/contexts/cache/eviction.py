"""Which cached state is evicted when a slot is needed: the interface of policies, and LRU."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from itertools import islice

from ....validation import one_of, refused

EVICTION_POLICIES = ("value", "lru")  # the names by which configurations choose a policy


class EvictionPolicy:
    """Orders the cached states of one cache; the cache reports to it, asks for victims and evicts them.

    A policy of one's own is a subclass, passed as `InferenceConfig(eviction_policy=MyPolicy)`; each cache
    calls the class without arguments. (An object serves one cache.) It overrides `insert`, `use`, `remove`,
    `clear` and `victims`, which know a state by its slot. The other methods do nothing here; a policy that
    looks at prefixes and requests overrides them, too. Ranks of a split model must decide alike: decide by
    the calls alone, not by a clock or random draws.

    Attributes:
        refuses: whether a new state may be refused in favour of cached ones; `least_valuable` then chooses.
    """

    refuses = False

    def insert(self, slots: Sequence[int]) -> None:
        """States were committed in these slots, which held none."""
        raise NotImplementedError

    def use(self, slot: int) -> None:
        """A request resumed from `slot`. A KV match alone does not count as a use."""
        raise NotImplementedError

    def remove(self, slots: Sequence[int], remember: bool = True) -> None:
        """These slots hold no state any more; `remember`: these states may still be asked for."""
        raise NotImplementedError

    def clear(self) -> None:
        """Remove all states."""
        raise NotImplementedError

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        """Up to `count` evictable slots, the first to evict first. Changes nothing."""
        raise NotImplementedError

    def set_hashes(
        self, slots: Sequence[int], hashes: Sequence[int], hashes_to: Callable[[int], Sequence[int]]
    ) -> None:
        """The states in `slots` are found under `hashes`.

        `hashes_to(i)` returns the hashes of the prefix of the state in `slots[i]`, `hashes[i]` last.
        """

    def add_request(self, hashes: Sequence[int], stop: int, was_preempted: bool = False) -> int:
        """A request with these prefix hashes arrives; it could resume after at most `hashes[:stop]`.

        `was_preempted`: whether it arrived before, and was preempted. Returns its ticket, for other calls.
        """
        return -1

    def end_request(self, ticket: int) -> None:
        """The request ended, or is preempted."""

    def insert_planned(self, hashes: Sequence[int], depth: int, kind: str, ticket: int) -> None:
        """A request's state after `hashes[:depth]` will be stored, at a boundary of this `kind`."""

    def remove_planned(self, prefix_hash: int | None) -> None:
        """The state planned under a hash (None: every planned state) found no slot, or was not written."""

    def discard_planned(self, prefix_hash: int) -> None:
        """The state planned under this hash was of an unknown token: no demand for it is remembered."""
        self.remove_planned(prefix_hash)

    def least_valuable(
        self, evictable: Callable[[int], bool], planned: Collection[int] = ()
    ) -> tuple[int, int]:
        """What costs least to lose: (evictable slot, 0), (-1, planned hash), or (-1, 0) for nothing."""
        return next(iter(self.victims(1, evictable)), -1), 0

    def check_integrity(self, slots: Collection[int]) -> None:
        """Raise AssertionError unless the policy orders the committed `slots`, and nothing else."""


class LRUEviction(EvictionPolicy):
    """Evicts the least recently used state. A change takes O(1), a choice O(count + pinned)."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def insert(self, slots: Sequence[int]) -> None:
        order = self._order
        for slot in slots:  # a quarter of the time of `update`
            order[slot] = None

    def use(self, slot: int) -> None:
        self._order.move_to_end(slot)

    def remove(self, slots: Sequence[int], remember: bool = True) -> None:
        order = self._order
        for slot in slots:
            del order[slot]

    def clear(self) -> None:
        self._order.clear()

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        return list(islice(filter(evictable, self._order), min(count, len(self._order))))

    def check_integrity(self, slots: Collection[int]) -> None:
        assert self._order.keys() == set(slots), "the eviction policy orders other slots than the committed"


PolicyChoice = str | EvictionPolicy | type[EvictionPolicy]
"""A name of `EVICTION_POLICIES`, a policy, or a subclass of `EvictionPolicy` to call without arguments."""


def checked_policy(name: str, policy: object) -> PolicyChoice:
    """`policy`, the argument `name`; ValueError unless it is a `PolicyChoice`."""
    if isinstance(policy, EvictionPolicy):
        return policy
    if isinstance(policy, type) and issubclass(policy, EvictionPolicy):
        return policy
    if not isinstance(policy, str):
        names = ", ".join(map(repr, EVICTION_POLICIES))
        raise refused(name, policy, f"one of {names}, or an EvictionPolicy")
    return one_of(name, policy, EVICTION_POLICIES)
