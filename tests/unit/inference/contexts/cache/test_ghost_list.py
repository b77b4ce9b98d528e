"""A bounded memory of what is gone."""

from hypothesis import given
from hypothesis import strategies as st
from mambaslots.inference.contexts.cache.reasons import GhostList


def test_a_ghost_remembers_why_it_is_gone():
    ghosts = GhostList(2)
    ghosts.add(5, "evicted")
    assert 5 in ghosts
    assert ghosts.reason(5) == "evicted"
    assert 6 not in ghosts
    assert ghosts.reason(6) is None


def test_the_latest_reason_counts():
    ghosts = GhostList(2)
    ghosts.add(5, "evicted")
    ghosts.add(5, "capacity")
    assert (ghosts.reason(5), len(ghosts)) == ("capacity", 1)


def test_the_oldest_ghosts_are_forgotten_first_and_together():
    ghosts = GhostList(2)
    for key in (1, 2, 1, 3):
        ghosts.add(key, "evicted")
    assert [key in ghosts for key in (1, 2, 3)] == [True, False, True]


def test_ghosts_can_be_discarded_and_cleared():
    ghosts = GhostList(3)
    ghosts.add(1, "evicted")
    ghosts.add(2, "evicted")
    ghosts.discard_all([1, 9])
    assert len(ghosts) == 1
    ghosts.clear()
    assert len(ghosts) == 0


def test_what_is_there_is_no_ghost():
    there = {1: 0}
    ghosts = GhostList(4, there)
    ghosts.add_all([1, 2], "evicted")
    assert (1 in ghosts, ghosts.reason(1), len(ghosts), bool(ghosts)) == (False, None, 1, True)
    there[2] = there.pop(1)
    assert (1 in ghosts, ghosts.reason(1), len(ghosts)) == (True, "evicted", 1)
    assert 2 not in ghosts


def test_a_list_without_room_remembers_nothing():
    ghosts = GhostList(0)
    ghosts.add(1, "evicted")
    assert 1 not in ghosts


@given(
    capacity=st.integers(0, 4),
    calls=st.lists(
        st.tuples(st.booleans(), st.lists(st.integers(0, 9), max_size=4, unique=True)), max_size=30
    ),
)
def test_the_most_recent_are_remembered(capacity, calls):
    """At least `capacity` of them, however many are added at once, and not many more."""
    ghosts, recent, known_once, most = GhostList(capacity), [], set(), 0
    for add, keys in calls:
        recent = [other for other in recent if other not in keys]
        known_once -= set(keys)
        if add:
            ghosts.add_all(keys, "evicted")
            recent = [*recent, *keys][-capacity:] if capacity else []
            known_once |= set(keys)
        else:
            ghosts.discard_all(keys)
        known = {key for key in range(10) if key in ghosts}
        most = max(most, len(keys))
        assert len(ghosts) == len(known) <= 2 * (capacity + most)
        assert bool(ghosts) == bool(known)
        assert set(recent) <= known <= known_once
