"""What a router knows of replicas: what each held at one moment, whatever becomes of messages."""

import random
import tracemalloc

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from mambaslots.net.routing.state_events import StateEvents
from mambaslots.net.routing.state_index import StateIndex
from msgspec.structs import replace
from oracle.state_channel import keys_of

NAMES = ("a", "b", "c")
KEYS = st.lists(st.integers(1, 12), unique=True, max_size=6)


class Publisher:
    """A replica that says what it holds; `history` has what it held after each message of its epoch."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.epoch = 0
        self.begin()

    def begin(self) -> None:
        self.epoch += 1
        self.sequence = -1
        self.held: set[int] = set()
        self.history: dict[int, frozenset[int]] = {}

    def publish(self, keys: set[int], is_snapshot: bool) -> StateEvents:
        inserted = keys if is_snapshot else keys - self.held
        removed = set() if is_snapshot else self.held - keys
        self.sequence += 1
        self.held = keys
        self.history[self.sequence] = frozenset(keys)
        return StateEvents(self.name, self.epoch, self.sequence, tuple(inserted), tuple(removed), is_snapshot)

    def snapshot(self) -> StateEvents:
        return StateEvents(self.name, self.epoch, max(self.sequence, 0), tuple(self.held), (), True)


class IndexMachine(RuleBasedStateMachine):
    """Replicas publish, messages arrive in any order, some more than once and some never."""

    def __init__(self) -> None:
        super().__init__()
        self.index = StateIndex()
        self.publishers = {name: Publisher(name) for name in NAMES}
        self.messages: list[StateEvents] = []
        # What each replica held when it sent what the index knows of it: the model.
        self.known: dict[str, tuple[int, int, frozenset[int]]] = {}

    @rule(name=st.sampled_from(NAMES), keys=KEYS, is_snapshot=st.booleans())
    def publish(self, name: str, keys: list[int], is_snapshot: bool) -> None:
        publisher = self.publishers[name]
        self.messages.append(publisher.publish(set(keys), is_snapshot or publisher.sequence < 0))

    @rule(name=st.sampled_from(NAMES), keys=KEYS)
    def publish_at_once(self, name: str, keys: list[int]) -> None:
        self.publish(name, keys, is_snapshot=False)
        self._arrive(self.messages.pop())

    @rule(name=st.sampled_from(NAMES))
    def begin_anew(self, name: str) -> None:
        self.publishers[name].begin()

    @rule(data=st.data(), keep=st.booleans())
    def arrive(self, data: st.DataObject, keep: bool) -> None:
        if self.messages:
            number = data.draw(st.integers(0, len(self.messages) - 1))
            self._arrive(self.messages[number])
            if not keep:
                del self.messages[number]

    @rule(name=st.sampled_from(NAMES))
    def ask_for_snapshot(self, name: str) -> None:
        publisher = self.publishers[name]
        if publisher.sequence >= 0:
            self._arrive(publisher.snapshot())
            assert keys_of(self.index, name) == publisher.held

    @rule(name=st.sampled_from(NAMES))
    def remove(self, name: str) -> None:
        self.index.remove(name)
        self.known.pop(name, None)
        self.messages = [one for one in self.messages if one.replica != name]  # it is dead

    def _arrive(self, events: StateEvents) -> None:
        name = events.replica
        epoch, sequence, _ = self.known.get(name, (-1, -1, frozenset()))
        is_old = events.epoch < epoch or (events.epoch == epoch and events.sequence <= sequence)
        follows = events.is_snapshot or (events.epoch == epoch and events.sequence == sequence + 1)
        assert self.index.apply(events) == (is_old or follows)
        if follows and not is_old:
            held = set(events.inserted)
            if not events.is_snapshot:
                held |= self.known[name][2] - set(events.removed)
            self.known[name] = (events.epoch, events.sequence, frozenset(held))

    @invariant()
    def the_index_has_what_each_replica_held_at_one_moment(self) -> None:
        assert set(self.index.replicas) == self.known.keys()
        for name, (epoch, sequence, held) in self.known.items():
            assert keys_of(self.index, name) == held
            publisher = self.publishers[name]
            if epoch == publisher.epoch and sequence in publisher.history:
                assert held == publisher.history[sequence]
        assert len(self.index) == len(set().union(*(held for _, _, held in self.known.values())))

    @invariant()
    def lookups_find_the_deepest(self) -> None:
        for prompt in ([1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11, 12], [3], []):
            depths = {
                name: max((depth for depth, key in enumerate(prompt, 1) if key in held), default=0)
                for name, (_, _, held) in self.known.items()
            }
            found = self.index.deepest(prompt)
            assert found == {name: depth for name, depth in depths.items() if depth}
            assert list(found.values()) == sorted(found.values(), reverse=True)


TestIndex = IndexMachine.TestCase


def test_a_message_behind_a_gap_changes_nothing() -> None:
    index = StateIndex()
    assert index.apply(StateEvents("a", 5, 0, (1, 2), (), True))
    assert not index.apply(StateEvents("a", 5, 2, (3,), (1,)))
    assert keys_of(index, "a") == {1, 2}
    assert index.apply(StateEvents("a", 5, 1, (4,)))
    assert keys_of(index, "a") == {1, 2, 4}


def test_an_unknown_replica_begins_with_a_snapshot_or_its_first_message() -> None:
    index = StateIndex()
    assert not index.apply(StateEvents("a", 5, 1, (3,)))
    assert index.replicas == []
    assert index.apply(StateEvents("b", 5, 0, (3,)))
    assert index.apply(StateEvents("c", 5, 9, (3,), (), True))
    assert index.deepest([3]) == {"b": 1, "c": 1}


def test_a_replica_that_was_forgotten_leaves_its_place_to_another() -> None:
    index = StateIndex()
    for number in range(300):
        assert index.apply(StateEvents(f"replica {number}", 1, 0, (number + 1,), (), True))
        index.remove(f"replica {number - 3}")
    assert index.replicas == ["replica 297", "replica 298", "replica 299"]
    assert len(index) == 3
    assert index.deepest([299, 300]) == {"replica 299": 2, "replica 298": 1}


def test_beyond_its_bound_an_index_ignores_hashes() -> None:
    index = StateIndex(max_hashes=3)
    assert index.apply(StateEvents("a", 1, 0, (1, 2, 3, 4, 5), (), True))
    assert keys_of(index, "a") == {1, 2, 3}
    assert index.num_ignored == 2
    assert index.apply(StateEvents("b", 1, 0, (3, 4), (), True)), "what is held is noted for others, too"
    assert keys_of(index, "b") == {3}
    assert index.apply(StateEvents("a", 1, 1, (6,), (1, 4)))
    assert keys_of(index, "a") == {2, 3, 6}
    for wrong in (0, -1, 1.5, None):
        with pytest.raises(ValueError, match="max_hashes is"):
            StateIndex(max_hashes=wrong)  # type: ignore[arg-type]


def test_a_hash_takes_at_most_250_bytes_and_gives_them_back() -> None:
    draws = random.Random(0)
    keys = tuple(draws.randrange(1, 2**63) for _ in range(20_000))
    tracemalloc.start()
    index = StateIndex()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(10):
        part = tuple(int(str(key)) for key in keys[number * 2000 : number * 2000 + 2000])
        assert index.apply(StateEvents(f"replica {number}", 1, 0, part, (), True))
    del part
    after, _ = tracemalloc.get_traced_memory()
    for number in range(10):
        index.remove(f"replica {number}")
    tracemalloc.stop()
    assert (after - before) / len(keys) < 250
    assert len(index) == 0


def test_a_lookup_looks_at_each_block_once_however_many_replicas_there_are() -> None:
    class Counting(dict[int, tuple[str, ...]]):
        num_looks = 0

        def get(self, key: int, default: tuple[str, ...] = ()) -> tuple[str, ...]:  # type: ignore[override]
            Counting.num_looks += 1
            return super().get(key, default)

    index = StateIndex()
    for number in range(64):
        assert index.apply(StateEvents(f"replica {number}", 1, 0, (7, 1000 + number), (), True))
    index._holders = Counting(index._holders)
    assert len(index.deepest([7, *range(2000, 2099)])) == 64
    assert Counting.num_looks == 100
    Counting.num_looks = 0
    assert index.deepest([7, *range(2000, 2097), 1003, 7])["replica 3"] == 100
    assert Counting.num_looks == 1, "all are found at the deepest block"


def test_an_epoch_that_is_over_does_not_come_back_even_if_nothing_of_it_arrived() -> None:
    index = StateIndex()
    assert index.apply(StateEvents("a", 2, 0, (1,), (), True))
    assert index.apply(StateEvents("a", 1, 0, (2,), (), True))
    assert index.apply(StateEvents("a", 1, 7, (3,), (1,)))
    assert keys_of(index, "a") == {1}
    assert not index.apply(StateEvents("a", 3, 1, (3,)))
    assert index.apply(StateEvents("a", 2, 1, (4,)))
    assert keys_of(index, "a") == {1, 4}


def test_a_snapshot_of_the_same_number_is_taken_up() -> None:
    index = StateIndex()
    events = StateEvents("a", 1, 4, (1, 2), (), True)
    assert index.apply(events)
    assert index.apply(replace(events, inserted=(2, 3)))
    assert keys_of(index, "a") == {2, 3}
