"""Who gets a slot where slots are short."""

from hypothesis import given
from hypothesis import strategies as st
from mambaslots.inference.contexts.cache.state_slots import choose_for_slots


def test_the_worthiest_certain_states_come_first():
    assert choose_for_slots("abc", num_available=2, num_free=2) == (["a", "b"], ["c"])


def test_guesses_get_only_slots_that_are_free():
    assert choose_for_slots("a", "xy", num_available=5, num_free=2) == (["a", "x"], [])


def test_guesses_evict_nothing():
    assert choose_for_slots("", "x", num_available=5, num_free=0) == ([], [])


def test_nothing_is_chosen_without_slots():
    assert choose_for_slots("ab", "x", num_available=0) == ([], ["a", "b"])


@given(st.integers(0, 8), st.integers(0, 8), st.integers(0, 8), st.integers(0, 8))
def test_slots_are_handed_out_one_by_one(num_certain, num_guessed, num_free, num_evictable):
    certain = [("certain", i) for i in range(num_certain)]
    guessed = [("guessed", i) for i in range(num_guessed)]
    free, evictable, chosen, refused = num_free, num_evictable, [], []
    for candidate in certain:
        if free:
            free -= 1
        elif evictable:
            evictable -= 1
        else:
            refused.append(candidate)
            continue
        chosen.append(candidate)
    chosen += guessed[:free]
    choice = choose_for_slots(certain, guessed, num_available=num_free + num_evictable, num_free=num_free)
    assert choice == (chosen, refused)
