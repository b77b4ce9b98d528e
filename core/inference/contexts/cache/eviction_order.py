"""The order in which the states of a pool leave, and the requests that it depends on."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple

from .pool_stats import Clock
from .slot_eviction import LRUEviction, SlotEvictionPolicy
from .slot_map import SlotMap
from .value_eviction import ValueEviction


class PlannedState(NamedTuple):
    """A state that a step is to take.

    Attributes:
        key: the hash of its prefix.
        keys: the hashes of its request, at least up to `key`.
        depth: how many of these there are up to `key`.
        taken_as: the kind of its boundary.
        visit: the number that `EvictionOrder.arrive` gave its request.
    """

    key: int
    keys: Sequence[int]
    depth: int
    taken_as: str
    visit: int


class EvictionOrder:
    """The eviction policy of a pool of slots, and the recency of its states under any policy.

    `DurableSlots` reports what becomes of its slots. The cache reports requests and planned states.

    Attributes:
        policy: names victims.
        used: slots from which a request resumed since they were committed.
        planned: reserved slot -> the hash that the policy expects there.
    """

    def __init__(
        self, eviction_policy: str, num_ghosts: int, keys_to: Callable[[int], Sequence[int]], clock: Clock
    ) -> None:
        """
        Args:
            eviction_policy: one of `EVICTION_POLICIES`.
            num_ghosts: how many states that are gone the policy may remember.
            keys_to: block -> the prefix hashes up to it.
            clock: tells the ages of states.
        """
        self._keys_to = keys_to
        self.policy: SlotEvictionPolicy = (
            ValueEviction(num_ghosts, clock) if eviction_policy == "value" else LRUEviction(clock)
        )
        self.used: set[int] = set()
        self.planned: dict[int, int] = {}
        self._recency: OrderedDict[int, None] = OrderedDict()  # committed slots, the one last used at the end

    # ---- requests and the states that they will leave

    @property
    def refuses(self) -> bool:
        """Whether `DurableSlots.choose` may refuse a new state in favour of cached ones."""
        return self.policy.refuses

    def arrive(self, keys: Sequence[int], num_reachable: int, again: bool = False) -> int:
        """Note that a request comes, with these prefix hashes; see `SlotEvictionPolicy.arrive`.

        Returns:
            A number for the request, for `PlannedState.visit` and `depart`.
        """
        return self.policy.arrive(keys, num_reachable, again)

    def depart(self, visit: int) -> None:
        """Note that the request with this number has ended, or is preempted."""
        self.policy.end(visit)

    def plan(self, state: PlannedState) -> None:
        """Note that a state is to be taken. `DurableSlots.choose` tells all states but those of drafts."""
        self.policy.plan(state.keys, state.depth, state.taken_as, state.visit)

    # ---- states that come, are used, and leave

    def insert(self, slots: Sequence[int]) -> None:
        """States were committed in these slots."""
        self.policy.insert(*slots)
        self._recency.update(dict.fromkeys(slots))

    def name(self, slot: int, key: int, block: int) -> None:
        """The state in `slot`, of this block, is found under `key`."""
        self.policy.name(slot, key, partial(self._keys_to, block))

    def use(self, slot: int) -> None:
        """A request resumed from `slot`, or an import brought its state again."""
        self.policy.use(slot)
        self._recency.move_to_end(slot)
        self.used.add(slot)

    def remove(self, slots: Sequence[int], remember: bool) -> list[int]:
        """These slots hold no committed state any more; see `SlotEvictionPolicy.remove`."""
        last_used_ns = self.policy.remove(*slots, remember=remember)
        for slot in slots:
            self._recency.pop(slot, None)
        if self.used:
            self.used.difference_update(slots)
        return last_used_ns

    def clear(self) -> None:
        """Forget all states."""
        self.policy.clear()
        for part in (self._recency, self.used, self.planned):
            part.clear()

    # ---- the order

    def victims(self, count: int, evictable: Callable[[int], bool] = lambda slot: True) -> list[int]:
        """Up to `count` evictable slots, the one that is evicted next first."""
        return self.policy.victims(count, evictable)

    def by_eviction(self) -> list[int]:
        """All committed slots in the order of eviction."""
        return self.victims(len(self._recency))

    def by_recency(self) -> list[int]:
        """The committed slots, the one first whose state was used, or else committed, longest ago.

        The same on all ranks, and under all policies.
        """
        return list(self._recency)

    # ---- the whole

    def mend(self, states: SlotMap) -> None:
        """Put the order right behind an interrupted change: as `states` says, if it is not.

        Then the states that are there are in the order of their commits, and the policy knows no ghost.
        """
        try:
            self.check_integrity(states.slots)
        except Exception:
            used = self.used.intersection(states.slots)
            self.clear()
            self.used = used
            self.insert(list(states.slots))
            for key, block in states.hash_to_block_id.items():
                slot = states.slot_of(block)
                if slot >= 0:
                    self.name(slot, key, block)

    def check_integrity(self, committed: Collection[int]) -> None:
        """Raise AssertionError unless exactly the `committed` slots are in order."""
        self.policy.check_integrity(committed)
        assert self._recency.keys() == set(committed), "the recency of other states than the committed"
        assert self.used <= set(committed), "a slot without a state counts as used"
