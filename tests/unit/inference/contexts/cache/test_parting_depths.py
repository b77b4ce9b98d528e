"""Where prompts part: counts against a list of all prompts, and places against every choice."""

from itertools import combinations

import mambaslots as ms
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.inference.contexts.cache import parting_depths
from mambaslots.inference.contexts.cache.checkpoint_plan import CheckpointPlan
from mambaslots.inference.contexts.cache.parting_depths import PartingDepths
from oracle.serving import random_tokens, small_engine

BLOCK = 8


def keys_of(path: list[int]) -> list[int]:
    """A hash of each prefix."""
    return [hash(tuple(path[: depth + 1])) for depth in range(len(path))]


class AllPrompts:
    """The counts, from a list of all prompts."""

    def __init__(self) -> None:
        self.first: dict[int, tuple[int, int]] = {}  # prefix -> the last depth and new blocks of its prompt
        self.states: set[int] = set()
        self.partings: list[int] = []
        self.chances: list[int] = []

    def learn(self, keys: list[int], last: int) -> None:
        known = [depth for depth in range(1, last + 1) if set(keys[:depth]) <= self.first.keys()]
        shared = max(known, default=0)
        if shared and keys[shared - 1] not in self.states:
            self.partings.append(self.first[keys[shared - 1]][0] - shared)
            self.states.add(keys[shared - 1])
        self.chances += range(1, last - shared)
        for depth in range(shared + 1, len(keys) + 1):
            self.first[keys[depth - 1]] = (last, shared)
            if depth >= last:
                self.states.add(keys[depth - 1])


paths = st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=7), st.booleans()), max_size=25)


@given(paths=paths)
def test_partings_are_those_of_a_list_of_all_prompts(paths: list[tuple[list[int], bool]]) -> None:
    learned, naive = PartingDepths(BLOCK, 10_000), AllPrompts()
    for path, ends_on_boundary in paths:
        last = max(0, len(path) - ends_on_boundary)
        learned.learn(keys_of(path), last)
        naive.learn(keys_of(path), last)
        learned.check_integrity()
    counts = [naive.partings.count(distance) for distance in range(1, 9)]
    assert learned._num_partings[:8] == counts
    assert learned._num_chances[:8] == [naive.chances.count(distance) for distance in range(1, 9)]


def saving(depths: tuple[int, ...], start: int, last: int, weights: dict[int, int], each: int) -> int:
    """What states at these depths save, by looking at each distance."""
    saved = -each * len(depths)
    for distance, weight in weights.items():
        parting = last - distance
        if parting > start:
            saved += weight * (max([depth for depth in depths if depth <= parting], default=start) - start)
    return saved


@given(
    partings=st.lists(st.integers(0, 6), min_size=8, max_size=8),
    chances=st.lists(st.integers(0, 20), min_size=8, max_size=8),
    start=st.integers(0, 6),
    length=st.integers(0, 8),
)
def test_the_places_are_the_best_of_all_choices(
    partings: list[int], chances: list[int], start: int, length: int
) -> None:
    learned = PartingDepths(BLOCK, 100)
    learned._num_partings[:8], learned._num_chances[:8] = partings, chances
    last = start + length
    depths = learned.depths(start, last)
    assert list(depths) == sorted(set(depths))
    assert all(start < depth < last for depth in depths)
    weights = {
        number + 1: partings[number] * parting_depths._WEIGHT // (chances[number] + 2) for number in range(8)
    }
    inside = range(start + 1, last)
    best = max(
        saving(choice, start, last, weights, learned._min_saving)
        for size in range(len(inside) + 1)
        for choice in combinations(inside, size)
    )
    assert saving(depths, start, last, weights, learned._min_saving) == best


@pytest.mark.parametrize("distance", [*range(1, 40), 100, 1000, 10_000])
def test_a_count_holds_distances_of_half_an_octave(distance: int) -> None:
    number = parting_depths._count_of(distance)
    longest = parting_depths._longest(number)
    assert distance <= longest <= max(8, 3 * distance // 2)
    assert parting_depths._count_of(longest) == number
    assert parting_depths._count_of(longest + 1) == number + 1
    if number:
        assert parting_depths._longest(number - 1) < distance


def test_memory_is_bounded_and_old_counts_fade() -> None:
    learned = PartingDepths(BLOCK, 50)
    for number in range(200):
        document = [number] * 9
        learned.learn(keys_of([*document, 1, number]), 11)
        learned.learn(keys_of([*document, 2, number]), 11)
        learned.check_integrity()
    assert len(learned._known) == 50
    assert learned.depths(0, 20) == (18,)
    for number in range(5000):
        learned.learn(keys_of([-number - 1] * 3), 3)
    assert learned.depths(0, 20) == ()


def test_prompts_that_never_part_take_no_state_on_the_way() -> None:
    learned = PartingDepths(BLOCK, 10_000)
    for number in range(300):
        learned.learn(keys_of([number] * 20), 20)
        assert learned.depths(0, 20) == ()


def test_a_plan_takes_what_was_learned_in_place_of_chunk_ends() -> None:
    plan = CheckpointPlan(learned=True, branch=False)
    step = {"start": 0, "stop": 64, "prompt_tokens": 100, "block_size_tokens": 8}
    taken = plan.boundaries(**step, parting_tokens=(24, 40, 80))
    assert sorted(taken) == [(24, "interval"), (40, "interval")]
    assert plan.boundaries(**step, parting_tokens=()) == ()
    assert plan.boundaries(**step) == ((64, "chunk_end"),)  # nobody counts
    plan.check_useful()
    assert CheckpointPlan().boundaries(**step, parting_tokens=(24,)) == ((64, "chunk_end"),)
    with pytest.raises(ValueError, match="learned is 1; accepted: True or False"):
        CheckpointPlan(learned=1)  # type: ignore[arg-type]


def test_the_second_question_about_a_new_document_resumes_in_its_end() -> None:
    resumed = {}
    for learned in (False, True):
        engine = small_engine(
            checkpoint_plan=CheckpointPlan(learned=learned), max_tokens=256, num_kv_blocks=400
        )
        for number in range(5):
            document = random_tokens(100, seed=number)
            for question in range(2):
                prompt = [*document, *random_tokens(20, seed=100 + 2 * number + question)]
                (result,) = engine.generate([prompt], ms.SamplingParams(num_tokens_to_generate=2))
                engine.check_integrity()
        resumed[learned] = result.num_resumed_tokens
    assert resumed == {False: 0, True: 96}
