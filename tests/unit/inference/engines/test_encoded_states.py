"""Durable states in bfloat16 or int8: answers are those of the rounded recurrence, indices in order."""

from typing import Any

import mambaslots as ms
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle.budget import costly
from oracle.drafters import MixedDrafter
from oracle.model_kinds import kind_of_model, kinds
from oracle.serving import random_tokens, small_engine, small_model
from oracle.stored_states import RoundedEngine
from oracle.workload import BLOCK, FORKS, HEADS, engine_settings

DTYPES = ["bfloat16", "int8"]
dtypes = st.sampled_from(DTYPES)
PROMPTS = [[*HEADS[3], 7], [*HEADS[5], 7], *FORKS]
prompts = st.sampled_from(PROMPTS)


def params(length: int) -> ms.SamplingParams:
    return ms.SamplingParams(max_tokens=length, return_log_probs=True)


def serve(engine: ms.DynamicInferenceEngine, rounded: RoundedEngine, prompts: list[list[int]]) -> None:
    lengths = {engine.add_request(prompt, params(6)): len(prompt) for prompt in prompts}
    while engine.has_unfinished_requests():
        for result in engine.step().finished:
            rounded.check(result, lengths[result.request_id])
        engine.check_integrity()


@pytest.mark.sampled(settings=2)
@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize(
    "settings", [{}, {"max_tokens_per_step": 8, "max_requests": 2}, {"num_mamba_slots": 2}]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_answers_are_those_of_the_rounded_recurrence(dtype: str, settings: dict[str, Any]) -> None:
    engine = small_engine(durable_state_dtype=dtype, **settings)
    rounded = RoundedEngine(engine, small_model(), dtype)
    for _ in range(2):
        for first in range(0, len(PROMPTS), 3):
            serve(engine, rounded, PROMPTS[first : first + 3])
    assert rounded.num_resumed


@costly()
@given(
    dtype=dtypes,
    kind=kinds,
    sizes=engine_settings,
    batches=st.lists(st.lists(prompts, min_size=1, max_size=3), min_size=1, max_size=3),
    drafts=st.sampled_from([0, 0, 1, 4]),
    in_place=st.booleans(),
    preempted=st.lists(st.integers(0, 40), max_size=3),
)
def test_any_settings_give_the_rounded_recurrence(
    dtype: str,
    kind: str,
    sizes: dict[str, Any],
    batches: list[list[list[int]]],
    drafts: int,
    in_place: bool,
    preempted: list[int],
) -> None:
    with kind_of_model(kind):
        drafter = {"num_speculative_tokens": drafts, "make_drafter": MixedDrafter} if drafts else {}
        engine = small_engine(durable_state_dtype=dtype, in_place=in_place, **sizes, **drafter)
        rounded = RoundedEngine(engine, small_model(), dtype)
        steps = 0
        for prompts in batches:
            lengths = {engine.add_request(prompt, params(6)): len(prompt) for prompt in prompts}
            while engine.has_unfinished_requests():
                running = engine.context.requests
                if steps in preempted and running:
                    engine.core.scheduler.preempt(running[steps % len(running)])
                for result in engine.step().finished:
                    rounded.check(result, lengths[result.request_id])
                engine.check_integrity()
                steps += 1
                assert steps < 600, "requests do not advance"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_request_goes_on_from_its_exact_state(dtype: str) -> None:
    """It stores states on its way, and is not rounded to them: one that resumes nothing is exact."""
    prompt = random_tokens(50, seed=5)
    plan = ms.CheckpointPlan(prefill_interval=BLOCK, decode=BLOCK)
    exact = small_engine(enable_prefix_caching=False)
    (expected,) = exact.generate([prompt], params(20))
    for max_tokens_per_step in (16, 64):
        engine = small_engine(
            durable_state_dtype=dtype, checkpoint_plan=plan, max_tokens_per_step=max_tokens_per_step
        )
        (result,) = engine.generate([prompt], params(20))
        assert engine.context.prefix_cache.stats().num_states_committed >= 7
        assert result.tokens == expected.tokens
        assert result.log_probs == pytest.approx(expected.log_probs, abs=1e-9)


def test_states_that_find_no_staging_slot_are_not_taken() -> None:
    """One request has one live slot and two staging slots, and wants six states inside a prefill."""
    plan = ms.CheckpointPlan(prefill_interval=BLOCK)
    engine = small_engine(durable_state_dtype="int8", max_requests=1, checkpoint_plan=plan)
    prompt = random_tokens(50, seed=5)
    engine.generate([prompt], params(1))
    engine.check_integrity()
    stats = engine.context.prefix_cache.stats()
    assert (stats.num_states_committed, stats.num_states_refused) == (2, 4)
    (again,) = engine.generate([prompt], params(1))
    assert again.num_resumed_tokens in (BLOCK, 2 * BLOCK, 48)
    idle = small_engine(durable_state_dtype="int8", max_requests=5, checkpoint_plan=plan)
    idle.generate([prompt], params(1))  # four live slots are idle
    assert idle.context.prefix_cache.stats().num_states_committed == 6


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_budget_buys_more_slots(dtype: str) -> None:
    spec = small_model(dtype=torch.float32).state_spec()
    half = 80 * spec.slot_bytes
    gb = ((4 + 2) * spec.slot_bytes + 2 * half) / 2**30  # live and staged states first
    engine = small_engine(
        model=small_model(dtype=torch.float32), durable_state_dtype=dtype,
        num_kv_blocks=None, num_mamba_slots=None, total_gb=gb,
    )  # fmt: skip
    found = engine.context.prefix_cache.slots.num_slots
    assert found == half // spec.durable_slot_bytes(dtype) > 80
    memory = engine.context.memory
    assert memory.durable_pool.memory.shape == (found, spec.durable_slot_bytes(dtype))
    assert memory.durable_pool.memory.dtype == torch.uint8
    assert f"cached states {found} x" in memory.summary()
    assert "staged states 2 x" in memory.summary()


def test_suspend_and_resume() -> None:
    engine = small_engine(durable_state_dtype="int8")
    prompt = random_tokens(20, seed=1)
    (before,) = engine.generate([prompt], params(5))
    engine.suspend()
    assert not engine.context.memory.durable_pool.memory.numel()
    engine.resume()
    (after,) = engine.generate([prompt], params(5))
    assert (after.tokens, after.num_resumed_tokens) == (before.tokens, 0)
    (again,) = engine.generate([[*prompt, 1]], params(5))
    assert again.num_resumed_tokens == 16
    engine.check_integrity()


def test_a_reset_while_requests_run_keeps_their_states() -> None:
    """A request that is scheduled, and whose state nothing has decoded yet, keeps it through a reset."""
    engine = small_engine(durable_state_dtype="int8")
    prompt = random_tokens(30, seed=2)
    engine.generate([prompt], params(2))
    request_id = engine.add_request([*prompt, 3], params(6))
    context = engine.context
    request = engine.core.requests[request_id]
    step = context.admission.schedule_request(request, 64)
    assert step is not None
    assert step.num_resumed == 24
    assert request.allocation is not None
    assert request.allocation.path.state_slot >= 0
    context.check_integrity()
    context.reset_prefix_cache()
    context.check_integrity()
    assert request.allocation.path.state_slot < 0
    assert request.allocation.state_index in request.allocation.live_slots
    context.release(request)


def test_poisoned_memory_holds_nan_where_it_may_not_be_read() -> None:
    plan = ms.CheckpointPlan(prefill_interval=BLOCK)
    for dtype in DTYPES:
        answers = []
        for is_poisoned in (False, True):
            engine = small_engine(durable_state_dtype=dtype, poisoned=is_poisoned, checkpoint_plan=plan)
            prompts = [random_tokens(30, seed=2), [*random_tokens(30, seed=2), 4], random_tokens(9, seed=3)]
            answers.append([engine.generate([prompt], params(4))[0] for prompt in prompts])
        assert [one.tokens for one in answers[0]] == [one.tokens for one in answers[1]]
        assert answers[1][1].num_resumed_tokens == 24


@pytest.mark.parametrize("setting", ["batch_invariant", "decode_by_replay"])
def test_what_must_be_exact_is_refused(setting: str) -> None:
    with pytest.raises(
        ValueError, match=f"durable_state_dtype is 'int8' and {setting} is True; accepted: one"
    ):
        small_engine(durable_state_dtype="int8", **{setting: True})


def test_encoded_states_and_kv_halve_what_running_requests_leave_of_one_budget() -> None:
    settings = {"total_gb": 0.01, "num_kv_blocks": None, "num_mamba_slots": None}
    engine = small_engine(durable_state_dtype="int8", **settings)
    memory, cache = engine.context.memory, engine.context.prefix_cache
    for_states = memory.durable_pool.memory.numel()
    for_kv = memory.kv_cache.numel() * memory.kv_cache.itemsize
    running = memory.state_pool.memory.numel()
    budget = 0.01 * 2**30
    assert budget - memory.durable_pool.slot_bytes - for_kv / cache.kv_blocks.total_count < (
        running + for_states + for_kv
    )
    assert running + for_states + for_kv <= budget
    assert abs(for_states - (budget - running) / 2) <= memory.durable_pool.slot_bytes


def test_other_values_are_refused() -> None:
    for wrong in ("float8", 8, torch.int8, True):
        with pytest.raises(ValueError, match=r"durable_state_dtype is .*; accepted: one of 'bfloat16'"):
            small_engine(durable_state_dtype=wrong)


@pytest.mark.parametrize("dtype", DTYPES)
def test_states_come_back_from_host_memory_as_they_were_stored(dtype: str) -> None:
    """An engine with two slots and host memory answers as one with room for all states."""
    texts = [random_tokens(30, seed) for seed in range(5)]
    answers = []
    for settings in ({}, {"num_mamba_slots": 2, "host_cache_gb": 0.001}):
        engine = small_engine(durable_state_dtype=dtype, **settings)
        for text in texts:
            engine.generate([text], params(2))
        results = [engine.generate([[*text, 3]], params(4))[0] for text in texts]
        assert [result.num_resumed_tokens for result in results] == [24] * 5
        answers.append([(result.tokens, result.log_probs) for result in results])
        engine.check_integrity()
    assert answers[0] == answers[1]
