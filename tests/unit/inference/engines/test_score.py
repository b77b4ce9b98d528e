"""Scores are the recurrence's log-probs of given tokens, however they are cached, cut and disturbed."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import mambaslots as ms
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.params_and_results import ScoreResult
from oracle.budget import dear
from oracle.faults import POINTS, InjectedError, failing
from oracle.plans import SwitchedPlan
from oracle.recurrent_lm import RecurrentLM
from oracle.serving import SEED, TOLERANCE, random_tokens, small_config, small_engine
from oracle.workload import BLOCK, HEADS, Asked, Client, assert_idle, engine_settings, pressed_engine
from oracle.workload import prompt_log_probs as expected_log_probs
from oracle.workload import requests as asked_requests

pytestmark = pytest.mark.usefixtures("kind")

CONTEXT = random_tokens(42, seed=11)
ANSWERS = [random_tokens(length, seed=length) for length in (1, 5, 7, 8, 14, 30)]
SEQUENCES = [CONTEXT + answer for answer in ANSWERS]
NOTHING = SwitchedPlan(tail=False, branch=False, step_ends=False, decode="off")


def assert_scored(result: ScoreResult, tokens: Sequence[int], start: int = 1) -> None:
    """The result is complete: the recurrence's log-probs in float64, and every token is accounted for."""
    assert (result.start, result.num_tokens, result.finish_reason) == (start, len(tokens), "length")
    expected = expected_log_probs(tuple(tokens))[start - 1 :]
    np.testing.assert_allclose(result.log_probs, expected, rtol=0, atol=TOLERANCE)
    computed = sum(result.computed_by_reason.values())
    assert result.num_resumed_tokens + computed == len(tokens) - 1
    assert result.num_resumed_tokens < start


def score_checked(
    engine: ms.DynamicInferenceEngine, sequences: Sequence[Sequence[int]], start: int = 1, **options: Any
) -> list[ScoreResult]:
    results = engine.score(sequences, start, **options)
    for result, tokens in zip(results, sequences, strict=True):
        assert_scored(result, tokens, start)
    engine.check_integrity()
    return results


# ---- what a score is


@pytest.mark.sampled(start=(1, 8, 42))
@pytest.mark.parametrize("max_tokens_per_step", [8, 13, 64])
@pytest.mark.parametrize("start", [1, 2, 8, 9, 42])
def test_scores_are_the_recurrence_s(start: int, max_tokens_per_step: int) -> None:
    engine = small_engine(max_tokens_per_step=max_tokens_per_step)
    for _ in range(2):
        score_checked(engine, SEQUENCES, start)
    assert_idle(engine)


@pytest.mark.parametrize("length", [2, 7, 8, 9, 16, 17, 41])
def test_each_start_of_each_length(length: int) -> None:
    engine, tokens = small_engine(max_tokens_per_step=16), random_tokens(length, seed=length)
    for start in (1, length // 2, length - 1):
        if start:
            score_checked(engine, [tokens], start)
    assert_idle(engine)


def test_each_sequence_has_its_start() -> None:
    starts = [42, 1, 20, 49, 3, 71]
    results = small_engine().score([torch.tensor(tokens) for tokens in SEQUENCES], starts)
    for result, tokens, start in zip(results, SEQUENCES, starts, strict=True):
        assert_scored(result, tokens, start)
    assert small_engine().score([]) == []


@pytest.mark.parametrize(
    "mode", [{}, {"enable_prefix_caching": False}, {"num_speculative_tokens": 3}], ids=str
)
def test_the_log_probs_of_an_answer_are_those_that_came_with_it(mode: dict[str, Any]) -> None:
    engine = small_engine(**mode)
    params = ms.SamplingParams(max_tokens=21, temperature=1.0, seed=4, return_log_probs=True)
    generated = engine.generate([CONTEXT, CONTEXT[:17]], params)
    sequences = [CONTEXT + generated[0].tokens, CONTEXT[:17] + generated[1].tokens]
    scored = engine.score(sequences, [42, 17])
    for one, other, start in zip(scored, generated, (42, 17), strict=True):
        np.testing.assert_allclose(one.log_probs, other.log_probs or [], rtol=0, atol=TOLERANCE)
        assert one.num_resumed_tokens == (
            (start - 1) // BLOCK * BLOCK if engine.config.enable_prefix_caching else 0
        )
    assert_idle(engine)


def test_prompt_log_probs_from_a_start_resume_what_goes_before() -> None:
    engine = small_engine(max_tokens_per_step=13)
    score_checked(engine, [CONTEXT], 1, checkpoint_plan=ms.CheckpointPlan.every_block(BLOCK))
    for start in (1, 9, 30, 41, 60):
        params = ms.SamplingParams(max_tokens=3, skip_prompt_log_probs=False, prompt_log_probs_start=start)
        (result,) = engine.generate([CONTEXT], params)
        expected = expected_log_probs(tuple(CONTEXT))[start - 1 :]
        np.testing.assert_allclose(result.prompt_log_probs or [], expected, rtol=0, atol=TOLERANCE)
        assert result.num_resumed_tokens == min(40, (start - 1) // BLOCK * BLOCK)
    assert_idle(engine)


@pytest.mark.parametrize("rows", [1, 3, 7])
def test_log_probs_have_the_same_bits_in_blocks_of_rows(rows: int) -> None:
    whole = small_engine().score(SEQUENCES)
    with patch("mambaslots.inference.kernels.sampling.LOG_PROB_ROWS", rows):
        assert [one.log_probs for one in small_engine().score(SEQUENCES)] == [one.log_probs for one in whole]


# ---- what it costs


def test_one_prefill_without_a_decode_and_logits_of_the_scored_tokens_alone() -> None:
    engine = small_engine(async_scheduling=True)
    model, steps = engine.model, []

    def watched(inputs: ms.StepInputs) -> torch.Tensor:
        steps.append((inputs.shape.decodes, inputs.shape.prefill_tokens, inputs.num_logits))
        return model(inputs)

    engine.model = watched
    score_checked(engine, [SEQUENCES[4]], 42)
    assert steps == [(0, 55, 14)]
    score_checked(engine, [SEQUENCES[5]], 42)  # resumes at 40
    assert steps[1:] == [(0, 31, 30)]
    stats = engine.stats()
    assert (stats.cache.num_prompt_tokens, stats.cache.num_resumed_tokens) == (55 + 71, 40)


def test_a_context_that_many_share_is_computed_once() -> None:
    engine = small_engine(max_requests=8, max_tokens_per_step=256)
    results = score_checked(engine, SEQUENCES, 42)
    assert [result.num_resumed_tokens for result in results] == [0] + [40] * 5
    assert engine.stats().cache.num_resumed_tokens == 5 * 40
    assert results[5].computed_by_reason["disabled"] == 31  # these tokens' log-probs are wanted


def test_a_plan_of_the_caller_s_is_the_whole_plan() -> None:
    engine = small_engine()
    score_checked(engine, SEQUENCES, 42, checkpoint_plan=NOTHING)
    assert engine.stats().cache.num_committed_slots == 0


def test_a_scored_sequence_is_cached_as_a_prompt_is() -> None:
    engine = small_engine()
    score_checked(engine, [SEQUENCES[5]])
    again = score_checked(engine, [SEQUENCES[5]])
    assert again[0].num_resumed_tokens == 0  # every token but the last has its log-prob to come
    (result,) = engine.generate([SEQUENCES[5]], ms.SamplingParams(max_tokens=1))
    assert result.num_resumed_tokens == 64
    assert engine.stats().cache.num_computed_tokens == 71 + 71 + 8


def test_scored_tokens_share_their_kv() -> None:
    """The second of two equal sequences computes all tokens, and holds the first one's KV blocks."""
    engine = small_engine()
    score_checked(engine, [SEQUENCES[4]])
    before = engine.stats().cache
    score_checked(engine, [SEQUENCES[4]])
    after = engine.stats().cache
    assert after.num_cached_kv_blocks == before.num_cached_kv_blocks == 6


# ---- who shares


def test_salts_share_nothing() -> None:
    engine = small_engine()
    resumed = []
    for salt in (None, b"a", "b", "a", None):
        (result,) = score_checked(engine, [SEQUENCES[4]], 42, cache_salt=salt)
        resumed.append(result.num_resumed_tokens)
    assert resumed == [0, 0, 0, 40, 40]
    both = score_checked(engine, [SEQUENCES[3]] * 2, 42, cache_salt=[b"a", b"c"])
    assert [result.num_resumed_tokens for result in both] == [40, 0]


def test_new_weights_score_anew() -> None:
    model = ms.models.HybridLM(small_config(), seed=SEED)
    engine = small_engine(model=model)
    (old,) = score_checked(engine, [SEQUENCES[4]], 42)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.01)
    engine.set_weights_version(1)
    (new,) = engine.score([SEQUENCES[4]], 42)
    assert new.num_resumed_tokens == 0
    log_probs = torch.log_softmax(RecurrentLM(model).logits(SEQUENCES[4]), dim=-1)
    expected = log_probs[range(41, 55), SEQUENCES[4][42:]]
    np.testing.assert_allclose(new.log_probs, expected, rtol=0, atol=TOLERANCE)
    assert max(abs(a - b) for a, b in zip(new.log_probs, old.log_probs, strict=True)) > 1e-4


def test_no_seed_depends_on_what_was_scored() -> None:
    params = ms.SamplingParams(max_tokens=12, temperature=1.3)
    expected = small_engine().generate([CONTEXT, CONTEXT], params)
    engine = small_engine()
    first = engine.generate([CONTEXT], params)
    score_checked(engine, SEQUENCES, 42)
    second = engine.generate([CONTEXT], params)
    assert [one.tokens for one in first + second] == [one.tokens for one in expected]


# ---- beside others


@pytest.mark.parametrize(
    "mode", [{}, {"async_scheduling": True}, {"num_speculative_tokens": 3}, {"in_place": True}], ids=str
)
def test_beside_requests_that_run_and_wait(mode: dict[str, Any]) -> None:
    client = Client(small_engine(max_tokens_per_step=24, max_requests=3, **mode))
    ids = [client.ask(Asked(tuple(HEADS[n]), 20, prompt_log_probs=n == 12)) for n in (4, 12, 6)]
    for _ in range(2):
        client.step()
    score_checked(client.engine, SEQUENCES, 20)
    for request_id in ids:  # those that have ended meanwhile are in no report
        if (result := client.engine.take_result(request_id)) is not None:
            client.arrived[request_id] = list(result.tokens)
            client.take(result)
        else:
            known = client.engine.core.requests[request_id].new_tokens
            client.arrived[request_id] = list(known)
    client.finish()
    assert_idle(client.engine)


def test_a_long_prefill_is_not_held_up_by_decodes_that_run_ahead() -> None:
    """A sequence in parts goes on in every step, although nothing is generated for it."""
    engine = small_engine(async_scheduling=True, max_tokens_per_step=8)
    for prompt in (HEADS[0], HEADS[1], HEADS[8]):  # so that few tokens of a step are left for the sequence
        engine.add_request(prompt, ms.SamplingParams(max_tokens=60))
    for _ in range(4):
        engine.step()
    steps: list[int] = []
    model = engine.model

    def watched(inputs: ms.StepInputs) -> torch.Tensor:
        steps.append(inputs.shape.prefill_tokens)
        return model(inputs)

    engine.model = watched
    score_checked(engine, [SEQUENCES[3]])
    assert [tokens for tokens in steps if tokens] == steps[: len([tokens for tokens in steps if tokens])]


@pytest.mark.sampled(start=(10,))
@pytest.mark.parametrize("start", [1, 10, 29])
def test_preempted_sequences_are_scored_rightly(start: int) -> None:
    """After every other step the request that was admitted last is preempted, with the log-probs it has."""
    engine = pressed_engine()
    engine.add_request(HEADS[4], ms.SamplingParams(max_tokens=40))
    advance, num_steps = engine._advance, 0

    def advance_and_preempt() -> None:
        nonlocal num_steps
        advance()
        num_steps += 1
        running = engine.core.scheduler.running
        if num_steps % 2 and len(running) > 1:
            engine.core.scheduler.preempt(running[-1])
        engine.check_integrity()

    with patch.object(engine, "_advance", advance_and_preempt):
        results = score_checked(engine, [CONTEXT[:n] for n in (41, 30, 33)], start)
    assert sum(result.num_recomputed_tokens for result in results)
    while engine.has_unfinished_requests():
        engine.step()
    assert_idle(engine)


@pytest.mark.sampled(point=("matching", "KV allocation", "forward", "sampled", "commit", "leaving"))
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("after", [False, True])
def test_a_failing_step_fails_the_call_and_nothing_else(point: str, after: bool) -> None:
    engine = small_engine(max_tokens_per_step=13, num_kv_blocks=40)
    client = Client(engine)
    client.ask(Asked(tuple(HEADS[4]), 20))
    client.step()
    with failing(engine, point, after=after, calls={2}) as seen:
        with suppress(InjectedError):
            score_checked(engine, SEQUENCES[2:4], 30)
        engine.check_integrity()
    assert seen["calls"] or point == "trim"
    assert list(engine.core.requests) in ([0], [])
    score_checked(engine, SEQUENCES[2:4], 30)
    for request in engine.core.requests.values():
        client.arrived[request.request_id] = list(request.new_tokens)
    if not engine.core.requests and (result := engine.take_result(0)) is not None:
        client.arrived[0] = list(result.tokens)
        client.take(result)
    client.finish()
    assert_idle(engine)


def test_invalid_logits_end_the_score_of_one_sequence() -> None:
    engine = small_engine(max_tokens_per_step=256, max_requests=8)
    model = engine.model

    def spoilt(inputs: ms.StepInputs) -> torch.Tensor:
        logits, first = model(inputs).clone(), 0
        for step in engine.context.batch:
            if step.request.prompt_tokens == SEQUENCES[2][:-1]:
                logits[first + len(step.logit_positions) - 1, 3] = float("nan")
            first += len(step.logit_positions)
        return logits

    engine.model = spoilt
    results = engine.score(SEQUENCES, 30)
    engine.model = model
    for result, tokens in zip(results, SEQUENCES, strict=True):
        if tokens is SEQUENCES[2]:
            assert (result.finish_reason, result.log_probs) == ("invalid_logits", [])
        else:
            assert_scored(result, tokens, 30)
    assert_idle(engine)
    score_checked(engine, SEQUENCES, 30)


def test_a_forbidden_token_scores_minus_infinity() -> None:
    engine = small_engine()
    model = engine.model

    def forbidding(inputs: ms.StepInputs) -> torch.Tensor:
        logits = model(inputs).clone()
        logits[:, SEQUENCES[1][-1]] = float("-inf")
        return logits

    engine.model = forbidding
    (result,) = engine.score([SEQUENCES[1]], 46)
    assert (result.log_probs, result.finish_reason) == ([float("-inf")], "length")


@dear()
@given(
    settings=engine_settings,
    before=st.lists(asked_requests, max_size=3),
    cuts=st.lists(
        st.tuples(st.sampled_from(HEADS + SEQUENCES), st.integers(2, 72), st.integers(1, 71)),
        min_size=1,
        max_size=5,
    ),
    salt=st.sampled_from([None, b"tenant"]),
)
def test_any_sequences_in_any_engine(
    settings: dict[str, Any], before: list[Asked], cuts: list[tuple[list[int], int, int]], salt: bytes | None
) -> None:
    client = Client(small_engine(**settings))
    for asked in before:
        client.ask(asked)
    client.finish()
    sequences = [tokens[:length] for tokens, length, _ in cuts if len(tokens) > 1]
    starts = [
        min(start, len(s) - 1)
        for s, start in zip(sequences, (c[2] for c in cuts if len(c[0]) > 1), strict=True)
    ]
    for _ in range(2):
        results = client.engine.score(sequences, starts, cache_salt=salt)
        for result, tokens, start in zip(results, sequences, starts, strict=True):
            assert_scored(result, tokens, start)
        assert_idle(client.engine)
