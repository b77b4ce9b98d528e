"""Decode steps that are launched before the tokens of the step before them are read."""

import gc
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import mambaslots as ms
import pytest
import torch
from mambaslots.inference.contexts.request import DynamicInferenceRequest, RequestStep
from oracle.serving import (
    assert_answers,
    expected_answer,
    random_tokens,
    run_checked,
    small_engine,
    small_model,
)

BLOCK = 8
LENGTH = 21
PROMPT = tuple(random_tokens(11, seed=5))


class Launches:
    """Observes a context: for each step, whether it followed, and how many tokens were known."""

    def __init__(self, engine: ms.DynamicInferenceEngine) -> None:
        self.steps: list[tuple[bool, int]] = []
        engine.context.observers.append(self)

    def step_begun(self, steps: Sequence[RequestStep], inputs: ms.StepInputs) -> None:
        kinds = {step.is_ahead for step in steps}
        assert len(kinds) == 1
        self.steps.append((kinds.pop(), sum(len(step.request.tokens) for step in steps)))

    def step_ended(self, steps: Sequence[RequestStep]) -> None:
        """Nothing is to be done."""


def ahead(**overrides: Any) -> ms.DynamicInferenceEngine:
    return small_engine(block_size_tokens=BLOCK, async_scheduling=True, **overrides)


def greedy(length: int = LENGTH, **settings: Any) -> ms.SamplingParams:
    return ms.SamplingParams(max_tokens=length, return_log_probs=True, **settings)


@pytest.fixture(autouse=True)
def _kind(kind: str) -> None:
    """Every test runs with a kind of model."""


def test_steps_follow_wherever_no_block_and_no_state_needs_the_token() -> None:
    engine = ahead()
    launches = Launches(engine)
    engine.add_request(PROMPT, greedy())
    (result,) = run_checked(engine).values()
    assert_answers(PROMPT, result)
    # The step that decodes the token at p fills a block where p + 1 is a boundary: that step, and the step
    # behind it, wait. The first decode waits for the prefill, whose blocks wait for finite logits.
    decoded = range(len(PROMPT), len(PROMPT) + LENGTH - 1)
    expected = [(p + 1) % BLOCK != 0 and p % BLOCK != 0 and p != len(PROMPT) for p in decoded]
    assert [is_ahead for is_ahead, _ in launches.steps] == [False, *expected]
    for (is_ahead, known), position in zip(launches.steps[1:], decoded, strict=True):
        assert known == (position if is_ahead else position + 1)


def test_a_report_has_the_tokens_of_its_own_step() -> None:
    engine = ahead()
    request_id = engine.add_request(PROMPT, greedy())
    tokens, _ = expected_answer(PROMPT, LENGTH)
    reported: list[int] = []
    while engine.has_unfinished_requests():
        report = engine.step()
        reported += [new.token for new in report.tokens.get(request_id, ())]
        assert reported == tokens[: len(reported)]
    assert reported == tokens
    assert not engine.has_unfinished_requests()


@pytest.mark.sampled(ends_after=(1, 4, 10))
@pytest.mark.parametrize("ends_after", range(1, 12))
def test_an_answer_that_stops_leaves_nothing_of_the_step_behind_it(ends_after: int) -> None:
    tokens, _ = expected_answer(PROMPT, LENGTH)
    stop = tokens[ends_after - 1]
    ends_after = tokens.index(stop) + 1
    engines = [small_engine(block_size_tokens=BLOCK, async_scheduling=on) for on in (True, False)]
    for engine in engines:
        other = engine.add_request(random_tokens(14, seed=9), greedy())
        stopped = engine.add_request(PROMPT, greedy(stop_token_ids=(stop,)))
        results = run_checked(engine)
        assert results[stopped].tokens == tokens[:ends_after]
        assert results[stopped].finish_reason == "stop"
        assert_answers(random_tokens(14, seed=9), results[other])
    assert engines[0].stats().cache == engines[1].stats().cache


def test_a_request_is_cancelled_while_its_next_step_runs() -> None:
    engine = ahead()
    kept, cancelled = (engine.add_request(random_tokens(9, seed=seed), greedy()) for seed in (1, 2))
    for _ in range(4):
        engine.step()
    assert engine.core.step_runner.unread is not None
    result = engine.cancel(cancelled)
    engine.check_integrity()
    assert_answers(random_tokens(9, seed=2), result)
    assert_answers(random_tokens(9, seed=1), run_checked(engine)[kept])


@pytest.mark.parametrize("ended_by", ["stop", "cancel"])
def test_an_idle_engine_keeps_no_request_whose_next_step_ran(ended_by: str) -> None:
    engine = ahead()
    tokens = engine.generate([PROMPT], greedy())[0].tokens
    stop = {"stop_token_ids": (tokens[3],)} if ended_by == "stop" else {}
    request_id = engine.add_request(PROMPT, greedy(**stop))
    for _ in range(tokens.index(tokens[3]) + 1):
        assert engine.has_unfinished_requests()
        engine.step()
    if ended_by == "cancel":
        assert engine.core.step_runner.unread is not None
        engine.cancel(request_id)
    assert not engine.has_unfinished_requests()
    gc.collect()
    kept = [one for one in gc.get_objects() if type(one) is DynamicInferenceRequest]
    assert request_id not in [one.request_id for one in kept]


@pytest.mark.parametrize("call", ["suspend", "reset_prefix_cache", "set_weights_version", "reset"])
def test_calls_between_a_step_and_the_step_behind_it(call: str) -> None:
    engine = ahead()
    request_id = engine.add_request(PROMPT, greedy())
    for _ in range(4):
        engine.step()
    assert engine.core.step_runner.unread is not None
    getattr(engine, call)(*(("new",) if call == "set_weights_version" else ()))
    engine.check_integrity()
    assert (engine.core.step_runner.unread is None) == (call in ("suspend", "reset"))
    if call == "suspend":
        engine.resume()
    if call == "reset":
        assert not engine.has_unfinished_requests()
        request_id = engine.add_request(PROMPT, greedy())
    assert_answers(PROMPT, run_checked(engine)[request_id])


def test_a_step_behind_that_fails_loses_no_token() -> None:
    model = small_model()
    calls: list[ms.StepInputs] = []

    class FailsOnce:
        def state_spec(self) -> ms.HybridStateSpec:
            return model.state_spec()

        def __call__(self, inputs: ms.StepInputs) -> torch.Tensor:
            calls.append(inputs)
            if len(calls) == 5:
                raise ArithmeticError("once")
            return model(inputs)

    engine = ahead(model=FailsOnce())
    launches = Launches(engine)
    request_id = engine.add_request(PROMPT, greedy())
    for _ in range(3):
        engine.step()
    with pytest.raises(ArithmeticError, match="once"):
        engine.step()
    assert launches.steps[4][0]
    assert engine.core.step_runner.unread is None
    engine.check_integrity()
    assert_answers(PROMPT, run_checked(engine)[request_id])


@pytest.mark.sampled
@pytest.mark.parametrize("prompts", [False, True], ids=["", "prompt log-probs"])
@pytest.mark.parametrize(("first", "last"), [(5, 5), (5, 6)])
def test_logits_that_are_no_numbers_end_a_request_whose_next_step_runs(
    first: int, last: int, prompts: bool
) -> None:
    model = small_model()
    number = 0

    class Spoils:
        def state_spec(self) -> ms.HybridStateSpec:
            return model.state_spec()

        def __call__(self, inputs: ms.StepInputs) -> torch.Tensor:
            nonlocal number
            number += 1
            logits = model(inputs)
            if first <= number <= last:
                logits[0] = float("nan")
            return logits

    engine = ahead(model=Spoils())
    spoilt, other = (
        engine.add_request(random_tokens(9, seed=seed), greedy(skip_prompt_log_probs=not prompts))
        for seed in (1, 2)
    )
    results = run_checked(engine)
    assert results[spoilt].finish_reason == "invalid_logits"
    assert_answers(random_tokens(9, seed=2), results[other])


@pytest.mark.parametrize("seed", range(3))
def test_sampled_tokens_are_those_of_an_engine_that_waits(seed: int) -> None:
    params = [
        ms.SamplingParams(max_tokens=17, temperature=1.0, top_k=20, seed=seed),
        ms.SamplingParams(max_tokens=9, top_p=0.9, temperature=0.7),
        greedy(13),
    ]
    prompts = [random_tokens(length, seed=length) for length in (7, 12, 20)]
    first, second = (
        [result.tokens for result in small_engine(async_scheduling=on).generate(prompts, params)]
        for on in (True, False)
    )
    assert first == second


def test_waiting_requests_are_admitted_without_delay() -> None:
    engine = ahead(max_requests=2)
    launches = Launches(engine)
    for seed in range(2):
        engine.add_request(random_tokens(9, seed=seed), greedy())
    for _ in range(4):
        engine.step()
    assert launches.steps[-1][0]
    engine.cancel(0)
    late = engine.add_request(random_tokens(9, seed=3), greedy())
    engine.step()  # reads the step that was launched before the request came
    report = engine.step()
    assert report.admitted == (late,)


def test_drafts_need_the_tokens_first() -> None:
    with pytest.raises(ValueError, match="num_speculative_tokens is 2; accepted: one of the two"):
        ahead(num_speculative_tokens=2)
    gpu = torch.device("cuda")
    config = small_engine(num_speculative_tokens=2).config
    assert config.why_steps_wait(gpu)
    assert small_engine().config.why_steps_wait(gpu) is None
    assert small_engine().config.why_steps_wait(torch.device("cpu"))


def test_a_rebuild_drops_the_step_ahead() -> None:
    engine = ahead()
    request_id = engine.add_request(PROMPT, greedy())
    for _ in range(4):
        engine.step()
    assert engine.core.step_runner.unread is not None
    engine.core._rebuild()
    assert engine.core.step_runner.unread is None
    assert_answers(PROMPT, run_checked(engine)[request_id])


@pytest.mark.parametrize("captures", [True, False])
def test_nothing_follows_a_step_whose_shape_is_captured_next(captures: bool) -> None:
    """Otherwise the shapes of prefills, which steps follow, would have no graph."""
    engine = ahead()
    graphs: Any = SimpleNamespace(
        captures_next=captures,
        padded=lambda shape: None,
        run=lambda model, inputs: model(inputs),
        after_step=lambda model: None,
    )
    engine.core.step_runner.graphs = graphs
    engine.add_request(PROMPT, greedy())
    for _ in range(3):
        engine.step()
    assert (engine.core.step_runner.unread is None) == captures
