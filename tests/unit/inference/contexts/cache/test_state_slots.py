"""One pool for live and cached states against a plain list, and the choice among planned states."""

from collections.abc import Iterable

import mambaslots as ms
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from mambaslots.inference.contexts.cache.eviction import LRUEviction
from mambaslots.inference.contexts.cache.paths import PlannedState, Reservations
from mambaslots.inference.contexts.cache.state_slots import StateSlots
from oracle.kv_index import eviction_order, host_tree

ROWS = 3


def make_slots(num_slots: int) -> StateSlots:
    return StateSlots(num_slots, "lru", host_tree())


class SharedSlotsMachine(RuleBasedStateMachine):
    """Rows take and give back live slots, beside states that come, are used, pinned and dropped.

    The oracle is a list of cached blocks in the order of their last use, and a number of live slots.
    """

    @initialize(cached=st.integers(0, 4), per_row=st.integers(1, 3))
    def start(self, cached: int, per_row: int) -> None:
        self.per_row = per_row
        self.num_slots = cached + ROWS * per_row
        self.max_pins = cached
        self.slots = make_slots(self.num_slots)
        self.rows: list[tuple[int, ...]] = []
        self.order: list[int] = []  # cached blocks, the one used longest ago first
        self.pinned: list[int] = []
        self.next_block = 0

    def evict(self, number: int, keep: Iterable[int] = ()) -> None:
        """What the oracle loses where `number` slots are needed."""
        num_free = self.num_slots - len(self.order) - self.per_row * len(self.rows)
        victims = [block for block in self.order if block not in self.pinned and block not in keep]
        for block in victims[: max(0, number - num_free)]:
            self.order.remove(block)

    @property
    def num_available(self) -> int:
        return self.num_slots - self.per_row * len(self.rows) - len(self.pinned)

    @rule(number=st.integers(1, 3))
    def store(self, number: int) -> None:
        """A step stores states; it takes as many as there is room for."""
        number = min(number, self.num_available)
        blocks = list(range(self.next_block, self.next_block + number))
        self.next_block += number
        reserved = self.slots.reserve_slots(blocks)
        self.evict(number)
        assert self.slots.commit_slots(reserved) == reserved
        self.order += blocks

    @precondition(lambda self: len(self.rows) < ROWS)
    @rule(which=st.integers(0, 100), resumes=st.booleans(), next_ones=st.lists(st.integers(0, 8), max_size=4))
    def seat(self, which: int, resumes: bool, next_ones: list[int]) -> None:
        """Wherever a row is free there is room for a request, also for one that resumes from any state.

        As many states of the next requests are kept as there are other slots for the row.
        """
        block = self.order[which % len(self.order)] if resumes and self.order else -1
        slot = self.slots.cached_states.slot_of(block)
        assert self.slots.num_available >= self.per_row
        unpinned = [block for block in self.order if block not in self.pinned]
        spared = [unpinned[i % len(unpinned)] for i in next_ones if unpinned]
        kept = list(dict.fromkeys(spared))[: self.num_available - self.per_row]
        has_no_other = self.num_available - len(kept) == self.per_row
        takes_over = block >= 0 and block not in (*self.pinned, *kept) and has_no_other
        used = self.slots.cached_states.turnover.by_cause["live_state"]
        spared_slots = [-1, *map(self.slots.cached_states.slot_of, spared), *(pin for pin in self.slots.pins)]
        live = tuple(self.slots.allocate_live(self.per_row, slot, spared_slots))
        assert len(set(live)) == self.per_row
        assert (slot in live) == takes_over
        before = len(self.order)
        if takes_over:
            assert live[0] == slot
            self.evict(self.per_row, [block, *kept])
            self.order.remove(block)
        else:
            self.evict(self.per_row, [block, *kept])
        self.rows.append(live)
        assert self.slots.cached_states.turnover.by_cause["live_state"] - used == before - len(self.order)

    @precondition(lambda self: self.rows)
    @rule(which=st.integers(0, 100))
    def leave(self, which: int) -> None:
        for slot in self.rows.pop(which % len(self.rows)):
            self.slots.free_live([slot])

    @precondition(lambda self: self.order)
    @rule(which=st.integers(0, 100), what=st.sampled_from(["pin", "use", "drop"]))
    def handle(self, which: int, what: str) -> None:
        block = self.order[which % len(self.order)]
        slot = self.slots.cached_states.slot_of(block)
        if what == "use":
            self.slots.cached_states.record_use(slot)
            self.order.remove(block)
            self.order.append(block)
        elif what == "drop":
            assert self.slots.remove_unpinned(block) == (block not in self.pinned)
            if block not in self.pinned:
                self.order.remove(block)
        elif block in self.pinned or len(self.pinned) < self.max_pins:
            self.slots.pin(slot)
            self.pinned += [block] * (block not in self.pinned)

    @precondition(lambda self: self.pinned)
    @rule(which=st.integers(0, 100))
    def unpin(self, which: int) -> None:
        block = self.pinned.pop(which % len(self.pinned))
        slot = self.slots.cached_states.slot_of(block)
        for _ in range(self.slots.pins[slot]):
            self.slots.unpin(slot)

    @rule(live=st.booleans())
    def reset(self, live: bool) -> None:
        self.slots.clear(live=live)
        self.order, self.pinned = [], []
        if live:
            self.rows = []

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "slots"):
            return
        self.slots.check_integrity()
        assert [self.slots.cached_states.block_of(slot) for slot in eviction_order(self.slots)] == self.order
        assert self.slots.live_slots == {slot for row in self.rows for slot in row}
        assert self.slots.num_available == self.num_available


TestSharedSlots = SharedSlotsMachine.TestCase


def test_more_than_can_be_had_is_refused_and_changes_nothing() -> None:
    slots = make_slots(3)
    (pinned,) = slots.commit_slots(slots.reserve_slots([0]))
    slots.pin(pinned)
    assert slots.num_available < 3
    with pytest.raises(ms.MambaSlotCapacityError) as raised:
        slots.allocate_live(3)
    assert (raised.value.required, raised.value.available) == (3, 2)
    assert (len(slots.free_slots), slots.live_slots) == (2, set())


def test_a_slot_that_is_lost_or_in_two_hands_is_found() -> None:
    for spoil in (
        lambda slots, slot: slots.live_slots.clear(),
        lambda slots, slot: slots.free_slots.append(slot),
    ):
        slots = make_slots(2)
        (slot,) = slots.allocate_live(1)
        slots.check_integrity()
        spoil(slots, slot)
        with pytest.raises(AssertionError):
            slots.check_integrity()


def planned(*keys: int) -> list[PlannedState]:
    return [PlannedState([key], 1, "tail", -1) for key in keys]


def held(slots: StateSlots, num_free: int, num_evictable: int) -> StateSlots:
    """A pool with so many slots free, and so many of states."""
    slots.commit_slots(slots.reserve_slots(range(num_evictable)))
    assert len(slots.free_slots) == num_free
    return slots


@given(st.integers(0, 8), st.integers(0, 8), st.integers(0, 8))
def test_slots_are_given_to_the_worthiest_and_free_ones_are_left_for_guesses(
    num_certain: int, num_free: int, num_evictable: int
) -> None:
    slots = held(make_slots(num_free + num_evictable), num_free, num_evictable)
    certain = list(range(100, 100 + num_certain))
    free, evictable, chosen = num_free, num_evictable, list[int]()
    for candidate in certain:
        if free:
            free -= 1
        elif evictable:
            evictable -= 1
        else:
            continue
        chosen.append(candidate)
    assert Reservations(slots).plan(planned(*certain)) == chosen
    assert len(slots.free_slots) == len(chosen) + free
    assert len(slots.cached_states.slot_of_block) == evictable


def test_a_policy_removes_from_its_plans_what_was_not_stored_alone() -> None:
    removed: list[int | None] = []

    class Policy(LRUEviction):
        def remove_planned(self, key: int | None) -> None:
            removed.append(key)

    slots = StateSlots(2, Policy, host_tree())
    key, reservations = slots.tree.hash_of(0), Reservations(slots)
    for number in (0, 1):  # the second state has a twin by the time it is written
        assert reservations.plan(planned(key)) == [key]
        reservations.commit(*reservations.reserve_planned([0], [key]), 0)
        assert removed == [key] * number
    slots.check_integrity()
