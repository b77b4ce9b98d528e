"""Which state goes when a slot is needed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.inference.contexts.cache.checkpoint_plan import Boundary, CheckpointPlan, checked_boundaries
from mambaslots.inference.contexts.cache.eviction import EvictionPolicy, LRUEviction, checked_policy
from mambaslots.inference.contexts.cache.state_slots import StateSlots
from oracle.kv_index import host_tree


def anything(slot):
    return True


def filled(policy, *slots):
    for slot in slots:
        policy.insert([slot])
    return policy


def test_the_state_committed_longest_ago_goes_first():
    assert filled(LRUEviction(), 3, 1, 2).victims(2, anything) == [3, 1]


def test_use_makes_a_state_the_last_to_go():
    policy = filled(LRUEviction(), 3, 1, 2)
    policy.use(3)
    assert policy.victims(3, anything) == [1, 2, 3]


def test_only_evictable_states_are_named():
    assert filled(LRUEviction(), 3, 1, 2).victims(3, lambda slot: slot != 1) == [3, 2]


def test_naming_victims_evicts_none():
    policy = filled(LRUEviction(), 3, 1)
    assert policy.victims(1, anything) == policy.victims(1, anything) == [3]
    assert policy.victims(0, anything) == []


def test_removed_and_cleared_states_are_forgotten():
    policy = filled(LRUEviction(), 3, 1, 2)
    policy.remove([3])
    assert policy.victims(3, anything) == [1, 2]
    policy.clear()
    assert policy.victims(3, anything) == []


def test_a_slot_inserted_anew_is_the_youngest():
    policy = filled(LRUEviction(), 3, 1)
    policy.remove([3])
    policy.insert([3])
    assert policy.victims(2, anything) == [1, 3]


def test_a_choice_looks_no_further_than_it_must():
    policy = filled(LRUEviction(), *range(10_000))
    asked = []
    policy.victims(3, lambda slot: asked.append(slot) or slot > 0)
    assert asked == [0, 1, 2, 3]


@given(
    calls=st.lists(st.tuples(st.sampled_from(["insert", "use", "remove"]), st.integers(0, 7)), max_size=30),
    pinned=st.sets(st.integers(0, 7)),
    count=st.integers(0, 9),
)
def test_the_order_is_that_of_a_list_kept_by_hand(calls, pinned, count):
    policy = LRUEviction()
    order = []
    for call, slot in calls:
        if (slot in order) == (call == "insert"):
            continue
        getattr(policy, call)(slot if call == "use" else [slot])
        if call != "insert":
            order.remove(slot)
        if call != "remove":
            order.append(slot)
    expected = [slot for slot in order if slot not in pinned]
    assert policy.victims(count, lambda slot: slot not in pinned) == expected[:count]


@pytest.mark.parametrize("call", ["use", "remove"])
def test_an_unknown_slot_is_an_error(call):
    with pytest.raises(KeyError):
        getattr(LRUEviction(), call)(1 if call == "use" else [1])


# ---- policies and plans of one's own


class LastInFirstOut(EvictionPolicy):
    def __init__(self):
        self.slots = []

    def insert(self, slots):
        self.slots += slots

    def use(self, slot):
        assert slot in self.slots

    def remove(self, slots, remember=True):
        self.slots = [slot for slot in self.slots if slot not in slots]

    def clear(self):
        self.slots = []

    def victims(self, count, evictable):
        return [slot for slot in reversed(self.slots) if evictable(slot)][:count]


@pytest.mark.parametrize("policy", [LastInFirstOut, LastInFirstOut()], ids=["class", "object"])
def test_a_policy_of_ones_own_decides(policy):
    slots = StateSlots(2, checked_policy("eviction_policy", policy), host_tree())
    for block in (1, 2, 3):
        assert len(slots.commit_slots(slots.reserve_slots([block]))) == 1
        slots.check_integrity()
    assert list(slots.cached_states.slot_of_block) == [1, 3]


@pytest.mark.parametrize("policy", ["fifo", None, 3, dict, object()])
def test_what_is_no_policy_is_refused(policy):
    with pytest.raises(ValueError, match=r"eviction_policy is .*; accepted: one of 'value', 'lru'"):
        checked_policy("eviction_policy", policy)


class EveryThird(CheckpointPlan):
    def boundaries(self, *, start, stop, prompt_tokens, block_size_tokens, branch_tokens=0):
        return [(p, "interval") for p in range(3 * block_size_tokens, stop + 1, 3 * block_size_tokens)]


def test_a_plan_of_ones_own_is_checked():
    assert checked_boundaries(EveryThird(), 0, 24, 24, 4, 0) == (
        Boundary(12, "interval"),
        Boundary(24, "interval"),
    )
    with pytest.raises(ValueError, match=r"checkpoint_plan.boundaries is .*; accepted: .* \(12, 24\]"):
        checked_boundaries(EveryThird(), 12, 24, 24, 4, 0)
