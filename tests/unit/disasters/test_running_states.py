"""The state at the end of a prompt outlives the request's own need of it, however long the request decodes.

Elsewhere a running request retired the boundary states that its next step no longer read, among them those
that the cache still named: a hit then had no state, and the whole prompt was computed again.
"""

from typing import Any

import mambaslots as ms
import pytest
from oracle.cached_prefixes import assert_cache_is_right
from oracle.drafters import MODES
from oracle.serving import (
    assert_answers,
    expected_answer,
    random_tokens,
    resumable,
    serve_checked,
    small_engine,
)
from oracle.workload import assert_idle

pytestmark = [pytest.mark.usefixtures("kind"), pytest.mark.in_turn("mode")]

BLOCK = 8
PROMPT = random_tokens(21, seed=21)
LENGTH = 44
PLANS: dict[str, Any] = {
    "rolling": "rolling",
    "off": "off",
    "each block": BLOCK,
    "each second block": 2 * BLOCK,
}
PARAMS = ms.SamplingParams(max_tokens=LENGTH, return_log_probs=True)
SHORT = ms.SamplingParams(max_tokens=3, return_log_probs=True)


def deepest(plan: str, num_computed: int) -> int:
    """Where a request with so many computed tokens has its deepest state."""
    prompt = len(PROMPT) // BLOCK * BLOCK
    step = {"rolling": BLOCK, "off": 0, "each block": BLOCK, "each second block": 2 * BLOCK}[plan]
    return max(prompt, num_computed // step * step) if step else prompt


@pytest.mark.disaster(number=21)
@pytest.mark.sampled
@pytest.mark.parametrize("plan", list(PLANS))
@pytest.mark.parametrize("mode", list(MODES))
def test_a_prompt_is_resent_while_and_after_its_answer_grows_past_many_boundaries(
    mode: str, plan: str
) -> None:
    engine = small_engine(**({"checkpoint_plan": ms.CheckpointPlan(decode=PLANS[plan])} | MODES[mode]))
    answer = expected_answer(tuple(PROMPT), LENGTH)[0]
    running = engine.add_request(PROMPT, PARAMS)
    asked: dict[int, list[int]] = {}
    hits, steps, done = [], 0, 0
    while engine.has_unfinished_requests():
        report = engine.step()
        steps += 1
        engine.context.check_integrity()
        done += len(report.tokens.get(running, ()))
        for result in report.finished:
            if result.request_id == running:
                assert_answers(PROMPT, result)
            else:
                prompt = asked.pop(result.request_id)
                assert_answers(prompt, result)
                hits.append(result.num_resumed_tokens)
        if done:
            assert resumable(engine.context, [*PROMPT, 1]) == 16
            found = resumable(engine.context, PROMPT + answer)
            assert deepest(plan, len(PROMPT) + done - 1) <= found <= len(PROMPT) + done
        if steps in (2, 6, 13, 22) and done < LENGTH:
            for prompt in (PROMPT, [*PROMPT, *answer[:done], 5]):
                asked[engine.add_request(prompt, SHORT)] = prompt
    assert not asked
    assert len(hits) > 1
    assert min(hits) >= 16
    assert_cache_is_right(engine)
    for prompt, wanted in (
        (PROMPT, 16),
        ([*PROMPT, *answer], deepest(plan, len(PROMPT) + LENGTH - 1)),
        ([*PROMPT, *answer, 1, 2], deepest(plan, len(PROMPT) + LENGTH - 1)),
    ):
        (result,) = serve_checked(engine, [prompt], length=3)
        assert result.num_resumed_tokens >= wanted
    assert_cache_is_right(engine)
    assert_idle(engine)


@pytest.mark.sampled
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("mode", ["async", "mixed", "in place", "replay", "replay, mixed", "encoded, mixed"])
def test_where_slots_are_short_what_is_found_is_right(mode: str, slots: int) -> None:
    """Several requests decode past boundaries; their prompts and answers are asked again beside them."""
    engine = small_engine(num_mamba_slots=slots, poisoned="async" not in mode, **MODES[mode])
    prompts = [PROMPT, PROMPT[:16] + random_tokens(7, seed=3), random_tokens(17, seed=4)]
    answers = [expected_answer(tuple(prompt), LENGTH)[0] for prompt in prompts]
    asked = {engine.add_request(prompt, PARAMS): prompt for prompt in prompts}
    hits = steps = 0
    while engine.has_unfinished_requests():
        for result in engine.step().finished:
            assert_answers(asked.pop(result.request_id), result)
            hits += result.num_resumed_tokens
        engine.context.check_integrity()
        steps += 1
        if steps in (11, 23, 31):
            which = steps % 3
            again = [*prompts[which], *answers[which][: steps // 2], 5]
            asked[engine.add_request(again, SHORT)] = again
            assert_cache_is_right(engine)
    for prompt, answer in zip(prompts, answers, strict=True):
        for tail in ([1], [1, 2]):
            (result,) = serve_checked(engine, [[*prompt, *answer, *tail]], length=3)
            hits += result.num_resumed_tokens
        assert_cache_is_right(engine)
    assert hits > 0
    assert_idle(engine)


def test_a_prompt_that_ends_on_a_boundary_keeps_its_state_though_its_answer_starts_from_it() -> None:
    engine = small_engine()
    prompt = random_tokens(24, seed=9)
    serve_checked(engine, [prompt], length=LENGTH)
    (again,) = serve_checked(engine, [[*prompt, 3]], length=2)
    assert again.num_resumed_tokens == 24
    assert_cache_is_right(engine)
