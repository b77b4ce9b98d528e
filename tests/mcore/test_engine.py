"""The real DynamicInferenceEngine, with the drop-in: its answers are those of an engine without a cache.

The same cases with megatron-core's own class (`make test-long`) say where that one goes wrong; a version that
mends it fails there, so that the table in docs/megatron.md follows.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import mambaslots.mcore
import mcore_rig
import pytest
from mambaslots.mcore.recurrence import SERIES
from mcore.engine_cases import CASES, serve_together, tokens
from mcore_rig import Served

CACHE_OPTIONS = ("num_mamba_slots", "enable_chunked_prefill", "max_tokens", "async_sched_mode")

# Prompt tokens that each request resumed; None where several ran at once.
RESUMED: dict[str, list[int | None]] = {
    "a_repeat": [0, 0, 64, 32, 64, 64],
    "a_length_of_1_mod_block": [0, 64, 64],
    "a_continuation_chunk_with_kv_but_no_state": [0] * 6,
    "a_suffix_of_2_tokens": [0, 64, 0, 64],
    "a_pool_of_2_slots": [*[0] * 6, *[None] * 4, 0, 64],  # of the four, the first two took the slots
    "an_evictor_in_between": [0, 96, 0, 0, 96, 256, 64],
    "turn_on_turn": [0, 64, 96, 128],
    "suspend_and_resume": [0, 64, None, 0, 0, 0, 64, None, 64, 32, 0, 0, 0],
    "several_at_once": [None] * 24,
    "pause_and_evict": [None] * 6,
    "requests_without_hashes": [0, None, None, 64, 0, 0],
    "memory_only": [0, 0, 0],
}
if SERIES == "0.20":  # the prompt that was under way is registered again after the suspend
    RESUMED["suspend_and_resume"][4] = 32

# What stock does: the requests that it answers wrongly, or the error that ends the step.
STOCK: dict[str, list[int] | tuple[type[BaseException], str]] = {
    "a_repeat": [],
    "a_length_of_1_mod_block": [1, 2],
    "a_continuation_chunk_with_kv_but_no_state": [5],
    "a_suffix_of_2_tokens": [1, 2],
    "a_pool_of_2_slots": (RuntimeError, "No evictable Mamba cache slots"),
    "an_evictor_in_between": (AssertionError, "active_request_count == 0"),
    "turn_on_turn": [],
    "suspend_and_resume": [12],
    "several_at_once": [2, 4, 6, 8, 10, 14, 16, 18, 20, 22],
    "pause_and_evict": [],
    "requests_without_hashes": [],
    "memory_only": [1, 2],
}
if SERIES == "0.20":
    STOCK |= {"a_suffix_of_2_tokens": [], "a_pool_of_2_slots": [], "an_evictor_in_between": []}


@pytest.fixture(scope="module")
def reference(model: Any) -> Callable[[str], list[Served]]:
    """A case's answers without a cache, whole prompts at a time."""

    def make(**options: Any) -> Any:
        sizes = {name: value for name, value in options.items() if name not in CACHE_OPTIONS}
        return mcore_rig.make_engine(model, prefix_caching=False, **sizes)

    return cache(lambda name: CASES[name](make))


def cached_run(model: Any, name: str) -> tuple[list[Served], list[Any]]:
    """A case with prefix caching, by the class that is in place, and the contexts that served it."""
    contexts = []

    def make(**options: Any) -> Any:
        engine = mcore_rig.make_engine(model, **{"num_mamba_slots": 16} | options)
        contexts.append(engine.context)
        return engine

    return CASES[name](make), contexts


def wrong_answers(served: list[Served], expected: list[Served]) -> list[int]:
    """Positions with other tokens, or log-probs further apart than float32's rounding."""

    def right(one: Served, other: Served) -> bool:
        pairs = zip(one.log_probs, other.log_probs, strict=True)
        return one.tokens == other.tokens and all(math.isclose(p, q, abs_tol=1e-4) for p, q in pairs)

    return [i for i, pair in enumerate(zip(served, expected, strict=True)) if not right(*pair)]


def resumed(served: list[Served]) -> int:
    return sum(one.num_resumed_tokens or 0 for one in served)


@pytest.mark.sampled(name=("a_length_of_1_mod_block",))
@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_without_a_cache(name: str, model: Any, reference: Callable[..., Any]) -> None:
    with mambaslots.mcore.installed():
        served, contexts = cached_run(model, name)
        for context in contexts:
            assert int(context.kv_block_allocator.block_ref_counts.sum()) == 0
            if context.mamba_slot_allocator is not None:
                context.mamba_slot_allocator.check_integrity()
    assert wrong_answers(served, reference(name)) == []
    assert [one.num_resumed_tokens for one in served] == RESUMED[name]


def test_prompts_that_wait_together_resume_where_they_part(model: Any) -> None:
    """Two of three skip the 32 tokens that all share, in the step after they were computed first."""
    shared = tokens(36, 140)
    prompts = [shared + tokens(12, 141 + i) for i in range(3)]

    def computed(**cache: Any) -> tuple[list[list[int]], int]:
        engine = mcore_rig.make_engine(model, max_tokens=64, enable_chunked_prefill=True, **cache)
        answers = [one.tokens for one in serve_together(engine, prompts, 2)]
        return answers, engine.context.lifetime_prefill_token_count

    expected, everything = computed(prefix_caching=False)
    with mambaslots.mcore.installed():
        answers, num_computed = computed(num_mamba_slots=16)
    assert answers == expected
    assert (everything, num_computed) == (144, 144 - 2 * 32)


def served_in_steps(model: Any, max_requests: int, **cache: Any) -> tuple[list[list[int]], list[int]]:
    """Answers of one token to four prompts, and the step that ended each."""
    shared = tokens(32, 150)
    prompts = [shared + tokens(32, 151), shared + tokens(30, 152), tokens(40, 153), tokens(160, 154)]
    options = {"max_requests": max_requests, "max_tokens": 128, "enable_chunked_prefill": True} | cache
    engine = mcore_rig.make_engine(model, **options)
    numbers = [mcore_rig.add(engine, prompt, 1) for prompt in prompts]
    done: dict[int, tuple[list[int], int]] = {}
    for count in range(1, 5):
        done |= {number: (one.tokens, count) for number, one in mcore_rig.step(engine).items()}
    return [done[number][0] for number in numbers], [done[number][1] for number in numbers]


def test_prompts_behind_one_that_waits_are_computed_in_the_same_step(model: Any) -> None:
    """The second waits for the first's prefix; the third does not if there is a row for both, the fourth is
    too long for the rest of the step."""
    expected, _ = served_in_steps(model, 4, prefix_caching=False)
    with mambaslots.mcore.installed():
        for max_requests, steps in ((4, [1, 2, 1, 3]), (2, [1, 2, 2, 4])):
            assert served_in_steps(model, max_requests, num_mamba_slots=16) == (expected, steps)


@pytest.mark.long
@pytest.mark.parametrize(("max_requests", "steps"), [(4, [1, 2, 2, 3]), (2, [1, 2, 2, 4])])
def test_stock_computes_none_of_them_before_it(model: Any, max_requests: int, steps: list[int]) -> None:
    assert served_in_steps(model, max_requests, num_mamba_slots=16)[1] == steps


def test_a_prompt_scheduled_early_stores_the_state_where_one_before_it_parts(model: Any) -> None:
    """The third prompt waits for room; the fourth, computed before it, stores the state where they part."""
    first, second = tokens(32, 160), tokens(32, 161)
    prompts = [first + tokens(32, 162), first + tokens(30, 163), second + tokens(150, 164)]
    prompts.append(second + tokens(20, 165))
    with mambaslots.mcore.installed():
        engine = mcore_rig.make_engine(model, num_mamba_slots=16, max_tokens=128, enable_chunked_prefill=True)
        serve_together(engine, prompts, new_tokens=1)
        assert engine.context.lifetime_prefill_token_count == 64 + 30 + 150 + 52


@pytest.mark.long
def test_answers_sent_again_resume_further_than_with_stock(model: Any) -> None:
    stock, _ = cached_run(model, "turn_on_turn")
    with mambaslots.mcore.installed():
        ours, _ = cached_run(model, "turn_on_turn")
    assert resumed(ours) >= 1.5 * resumed(stock) > 0


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_stock_differs_where_it_is_said_to(name: str, model: Any, reference: Callable[..., Any]) -> None:
    expected = STOCK[name]
    if isinstance(expected, tuple):
        error, words = expected
        with pytest.raises(error, match=words):
            cached_run(model, name)
    else:
        served, _ = cached_run(model, name)
        assert wrong_answers(served, reference(name)) == expected
