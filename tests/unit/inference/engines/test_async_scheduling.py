"""Decode steps that are launched before the tokens of the step before them are read."""

import gc
from collections.abc import Sequence
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import mambaslots as ms
import pytest
import torch
from mambaslots.inference.contexts.cache.value_eviction import ValueEviction
from mambaslots.inference.contexts.dynamic_request import DynamicInferenceRequest, ScheduledRequest
from oracle.budget import thinned
from oracle.serving import (
    assert_answers,
    expected_answer,
    random_tokens,
    resumable,
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

    def step_begun(self, batch: Sequence[ScheduledRequest], inputs: ms.StepInputs) -> None:
        kinds = {scheduled.decodes_unread for scheduled in batch if scheduled.decoding}
        assert len(kinds) <= 1
        self.steps.append((True in kinds, sum(len(scheduled.request.tokens) for scheduled in batch)))

    def step_ended(self, batch: Sequence[ScheduledRequest]) -> None:
        """Nothing is to be done."""


def async_engine(**overrides: Any) -> ms.DynamicInferenceEngine:
    return small_engine(block_size_tokens=BLOCK, async_scheduling=True, **overrides)


def greedy(length: int = LENGTH, **settings: Any) -> ms.SamplingParams:
    return ms.SamplingParams(max_tokens=length, return_log_probs=True, **settings)


@pytest.fixture(autouse=True)
def _kind(kind: str) -> None:
    """Every test runs with a kind of model."""


def test_each_decode_follows_also_where_it_completes_a_block_and_stores_a_state() -> None:
    engine = async_engine()
    launches = Launches(engine)
    engine.add_request(PROMPT, greedy())
    (result,) = run_checked(engine).values()
    assert_answers(PROMPT, result)
    decoded = range(len(PROMPT), len(PROMPT) + LENGTH - 1)
    assert launches.steps == [(False, len(PROMPT)), *((True, position) for position in decoded)]
    assert (
        resumable(engine.context, [*PROMPT, *result.tokens, 0]) == (len(PROMPT) + LENGTH - 1) // BLOCK * BLOCK
    )


def test_a_report_has_the_tokens_of_its_own_step() -> None:
    engine = async_engine()
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
    engine = async_engine()
    kept, cancelled = (engine.add_request(random_tokens(9, seed=seed), greedy()) for seed in (1, 2))
    for _ in range(4):
        engine.step()
    assert engine.core.step_runner.unread_step is not None
    result = engine.cancel(cancelled)
    engine.check_integrity()
    assert_answers(random_tokens(9, seed=2), result)
    assert_answers(random_tokens(9, seed=1), run_checked(engine)[kept])


@pytest.mark.parametrize("ended_by", ["stop", "cancel"])
def test_an_idle_engine_keeps_no_request_whose_next_step_ran(ended_by: str) -> None:
    engine = async_engine()
    tokens = engine.generate([PROMPT], greedy())[0].tokens
    stop = {"stop_token_ids": (tokens[3],)} if ended_by == "stop" else {}
    request_id = engine.add_request(PROMPT, greedy(**stop))
    for _ in range(tokens.index(tokens[3]) + 1):
        assert engine.has_unfinished_requests()
        engine.step()
    if ended_by == "cancel":
        assert engine.core.step_runner.unread_step is not None
        engine.cancel(request_id)
    assert not engine.has_unfinished_requests()
    gc.collect()
    kept = [one for one in gc.get_objects() if type(one) is DynamicInferenceRequest]
    assert request_id not in [one.request_id for one in kept]


@pytest.mark.parametrize("call", ["suspend", "reset_prefix_cache", "set_weights_version", "reset"])
def test_calls_between_a_step_and_the_step_behind_it(call: str) -> None:
    engine = async_engine()
    request_id = engine.add_request(PROMPT, greedy())
    for _ in range(4):
        engine.step()
    assert engine.core.step_runner.unread_step is not None
    getattr(engine, call)(*(("new",) if call == "set_weights_version" else ()))
    engine.check_integrity()
    assert (engine.core.step_runner.unread_step is None) == (call in ("suspend", "reset"))
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

    engine = async_engine(model=FailsOnce())
    launches = Launches(engine)
    request_id = engine.add_request(PROMPT, greedy())
    for _ in range(3):
        engine.step()
    with pytest.raises(ArithmeticError, match="once"):
        engine.step()
    assert launches.steps[4][0]
    assert engine.core.step_runner.unread_step is None
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

    engine = async_engine(model=Spoils())
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
    engine = async_engine(max_requests=2)
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


def test_parts_of_prompts_and_admissions_follow_beside_decodes() -> None:
    engine = async_engine(max_tokens_per_step=8)
    made: list[tuple[bool, bool, bool]] = []
    begun = SimpleNamespace(
        step_begun=lambda steps, inputs: made.append(
            (steps[0].decodes_unread, any(step.admits for step in steps), not steps[-1].decoding)
        ),
        step_ended=lambda steps: None,
    )
    decode = engine.add_request(PROMPT[:7], greedy())
    for _ in range(3):
        engine.step()
    engine.context.observers.append(begun)
    late = engine.add_request(PROMPT, greedy(5))
    reports = [engine.step() for _ in range(3)]
    assert made[:2] == [(True, True, True), (True, False, True)], "two parts, the first at once"
    assert [report.admitted for report in reports] == [(), (late,), ()], "reported with its own step"
    results = run_checked(engine)
    assert_answers(PROMPT[:7], results[decode])
    assert_answers(PROMPT, results[late])


def test_a_request_that_may_resume_from_the_step_under_way_waits_for_it() -> None:
    """The second prompt goes on with what the first one's step stores, and decodes go on meanwhile."""
    first = random_tokens(17, seed=1)
    second = first + random_tokens(6, seed=2)
    resumed = []
    for on in (True, False):
        engine = small_engine(block_size_tokens=BLOCK, async_scheduling=on)
        decode = engine.add_request(random_tokens(9, seed=4), greedy())
        for _ in range(3):
            engine.step()
        ids = [engine.add_request(prompt, greedy(6)) for prompt in (first, second)]
        results = run_checked(engine)
        assert_answers(random_tokens(9, seed=4), results[decode])
        for one, prompt in zip(ids, (first, second), strict=True):
            assert_answers(prompt, results[one])
        resumed.append([results[one].num_resumed_tokens for one in ids])
    assert resumed == [[0, 16], [0, 16]]


@pytest.mark.parametrize("policy", ["value", "lru"])
def test_states_that_are_reserved_before_their_tokens_are_known_are_those_of_an_engine_that_waits(
    policy: str,
) -> None:
    """Two rows fight for one slot more than pins and live states need; refusals are noted alike."""
    seen = []
    for on in (True, False):
        engine = small_engine(
            block_size_tokens=BLOCK, async_scheduling=on, num_mamba_slots=2, eviction_policy=policy,
            checkpoint_plan=ms.CheckpointPlan(decode=BLOCK),
        )  # fmt: skip
        prompts = [random_tokens(length, seed=length) for length in (10, 13)]
        results = engine.generate(prompts, greedy(40))
        for prompt, result in zip(prompts, results, strict=True):
            assert_answers(prompt, result)
        engine.check_integrity()
        assert not engine.context.uncommitted
        cache = engine.stats().cache
        found = [resumable(engine.context, [*p, *r.tokens, 0]) for p, r in zip(prompts, results, strict=True)]
        counts = cache.num_states_committed, cache.num_states_refused, cache.states_removed_by_cause
        seen.append((found, *counts, policy_nodes(engine)))
    assert seen[0] == seen[1]


def policy_nodes(engine: ms.DynamicInferenceEngine) -> dict[int, tuple[object, ...]]:
    """What the value policy knows: cached states and ghosts, by hash."""
    policy = engine.context.prefix_cache.slots.policy
    nodes = policy._tree.nodes if isinstance(policy, ValueEviction) else {}
    return {key: (one.depth, one.role, one.is_present, one.is_running) for key, one in nodes.items()}


def test_a_state_of_a_token_behind_an_answer_leaves_nothing_in_the_policy() -> None:
    """The answer ends by a stop token, which completes a block in the step after."""
    prompt = PROMPT[:9]
    (answer,) = small_engine(block_size_tokens=BLOCK).generate([prompt], greedy(40))
    ends = [n for n in range(8, 40) if (9 + n + 1) % BLOCK == 0 and answer.tokens[n] not in answer.tokens[:n]]
    seen = []
    for on in (True, False):
        engine = small_engine(
            block_size_tokens=BLOCK, async_scheduling=on, num_mamba_slots=32, eviction_policy="value",
            checkpoint_plan=ms.CheckpointPlan(decode=BLOCK),
        )  # fmt: skip
        for n in thinned(ends, every=2):
            (result,) = engine.generate([prompt], greedy(40, stop_token_ids=(answer.tokens[n],)))
            assert len(result.tokens) == n + 1
            seen.append(policy_nodes(engine))
    half = len(seen) // 2
    assert seen[:half] == seen[half:] != []


@pytest.mark.parametrize("call", ["cancel", "reset_prefix_cache", "suspend"])
def test_calls_while_a_step_has_a_state_that_is_not_findable_yet(call: str) -> None:
    engine = async_engine(checkpoint_plan=ms.CheckpointPlan(decode=BLOCK))
    ids = [engine.add_request(prompt, greedy()) for prompt in (PROMPT, PROMPT[:9])]
    while not any(step.destinations and step.decodes_unread for step in engine.context.uncommitted):
        engine.step()
    assert engine.context.prefix_cache.slots.reserved
    engine.cancel(ids[0]) if call == "cancel" else getattr(engine, call)()
    engine.check_integrity()
    if call == "suspend":
        engine.resume()
    results = run_checked(engine)
    assert not engine.context.prefix_cache.slots.reserved
    assert_answers(PROMPT[:9], results[ids[1]])
    if call != "cancel":
        assert_answers(PROMPT, results[ids[0]])


def test_a_step_that_cannot_be_launched_ahead_evicts_nothing() -> None:
    """Both answers end by a stop token in the step before the one for which they lack a block."""
    first = random_tokens(9, seed=1)
    for prompts in combinations([random_tokens(6, seed) for seed in range(2, 12)], 2):
        answers = [expected_answer(tuple(prompt), 3)[0] for prompt in prompts]
        stops = tuple(tokens[2] for tokens in answers)
        if set(stops).isdisjoint(answers[0][:2] + answers[1][:2]):
            break
    else:
        raise AssertionError("some kind of model has no two such answers")
    for on in (False, True):
        engine = small_engine(
            block_size_tokens=BLOCK, async_scheduling=on, num_kv_blocks=3, max_sequence_length=24,
        )  # fmt: skip
        engine.generate([first], greedy(1))
        assert resumable(engine.context, first) == BLOCK
        results = engine.generate(prompts, greedy(9, stop_token_ids=stops))
        assert [len(result.tokens) for result in results] == [3, 3]
        assert resumable(engine.context, first) == BLOCK


def test_drafts_need_the_tokens_first() -> None:
    with pytest.raises(ValueError, match="num_speculative_tokens is 2; accepted: one of the two"):
        async_engine(num_speculative_tokens=2)
    gpu = torch.device("cuda")
    config = small_engine(num_speculative_tokens=2).config
    assert config.why_not_async(gpu)
    assert small_engine().config.why_not_async(gpu) is None
    assert small_engine().config.why_not_async(torch.device("cpu"))


def test_a_rebuild_drops_the_step_ahead() -> None:
    engine = async_engine()
    request_id = engine.add_request(PROMPT, greedy())
    for _ in range(4):
        engine.step()
    assert engine.core.step_runner.unread_step is not None
    engine.core._rebuild()
    assert engine.core.step_runner.unread_step is None
    assert_answers(PROMPT, run_checked(engine)[request_id])


@pytest.mark.parametrize("captures", [True, False])
def test_nothing_follows_a_step_whose_shape_is_captured_next(captures: bool) -> None:
    """Otherwise the shapes of prefills, which steps follow, would have no graph."""
    engine = async_engine()
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
    assert (engine.core.step_runner.unread_step is None) == captures
