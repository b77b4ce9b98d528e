"""What an engine says to calls that newcomers get wrong: the whole sentence, and what to pass instead."""

import re
import threading
from typing import Any

import mambaslots as ms
import numpy as np
import pytest
import torch
from oracle.serving import random_tokens, small_engine

ONE = ms.SamplingParams(max_tokens=1)
BLOCK = 8
PROMPTS = [random_tokens(20, seed=1), random_tokens(20, seed=2)]
EVERY_BLOCK = ms.CheckpointPlan.every_block(BLOCK)
CONFIG: dict[str, Any] = {"num_kv_blocks": 64, "num_mamba_slots": 8}
INTEGER = "an integer from 1 to 2147483647"
COUNT = "an integer from 1 on, or total_gb"
NO_CACHE = "; to serve without state slots, set enable_prefix_caching=False"


@pytest.fixture(scope="module")
def engine() -> ms.DynamicInferenceEngine:
    """One for all tests: no call that is refused changes it."""
    return small_engine(max_requests=2)


NO_PROMPTS = (
    "prompts is @; accepted: a list of prompts, each a list of token ids: tokenize text first, and pass "
    "[prompt] for one"
)


def says(sentence: str) -> str:
    return f"^{re.escape(sentence)}$"


# ---- prompts


@pytest.mark.parametrize(
    ("prompts", "sentence"),
    [
        (
            "text",
            NO_PROMPTS.replace("@", "'text'"),
        ),
        (
            [1, 2, 3],
            NO_PROMPTS.replace("@", "a list of 3 token ids"),
        ),
        (
            [np.int64(1), np.int32(2)],
            NO_PROMPTS.replace("@", "a list of 2 token ids"),
        ),
        (
            list(torch.tensor([1, 2])),
            NO_PROMPTS.replace("@", "a list of 2 token ids"),
        ),
        (
            torch.tensor([1, 2, 3]),
            NO_PROMPTS.replace("@", "a list of 3 token ids"),
        ),
        (
            np.array([1, 2, 3]),
            NO_PROMPTS.replace("@", "a list of 3 token ids"),
        ),
        (
            5,
            NO_PROMPTS.replace("@", "5"),
        ),
        (["text"], "prompt is 'text'; accepted: a list of token ids: tokenize text first"),
        ([[]], "prompt is empty; accepted: at least one token"),
        (
            {(1, 2)},
            NO_PROMPTS.replace("@", "{(1, 2)}"),
        ),
        (
            {(1, 2): 3},
            NO_PROMPTS.replace("@", "{(1, 2): 3}"),
        ),
        ([[1], [2], [3], [4, -1]], "prompts[3][1] is -1; accepted: an integer from 0 to 255"),
        ([[1], "text"], "prompts[1] is 'text'; accepted: a list of token ids: tokenize text first"),
        ([[1], []], "prompts[1] is empty; accepted: at least one token"),
        ([[1], {2}], "prompts[1] is {2}; accepted: a list of integers or a 1-D integer tensor"),
        ([{3, 1, 2}], "prompt is {1, 2, 3}; accepted: a list of integers or a 1-D integer tensor"),
    ],
    ids=[
        "text",
        "a flat list",
        "a flat list of numpy's integers",
        "a flat list of tensors without dimensions",
        "a 1-D tensor",
        "a 1-D array",
        "a number",
        "a list of texts",
        "an empty prompt",
        "a set of prompts",
        "a dict of prompts",
        "one of several beyond the vocabulary",
        "one of several texts",
        "one of several empty",
        "one of several a set",
        "a set",
    ],
)
def test_generate_is_given_no_list_of_prompts(
    engine: ms.DynamicInferenceEngine, prompts: Any, sentence: str
) -> None:
    with pytest.raises(ValueError, match=says(sentence)):
        engine.generate(prompts, ONE)
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize("call", ["add_request", "stream"])
def test_one_request_is_given_a_text(engine: ms.DynamicInferenceEngine, call: str) -> None:
    sentence = "prompt is 'text'; accepted: a list of token ids: tokenize text first"
    with pytest.raises(ValueError, match=says(sentence)):
        getattr(engine, call)("text")
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize(
    "values", [{3, 1, 2}, frozenset({3}), {3: 1}, {3: 1}.keys(), {1: 3}.values()], ids=repr
)
@pytest.mark.parametrize("call", ["add_request", "stream", "warm", "pin"])
def test_a_prompt_has_no_order(engine: ms.DynamicInferenceEngine, call: str, values: Any) -> None:
    name = "prompt" if call in ("add_request", "stream") else "tokens"
    sentence = f"{name} is {values}; accepted: a list of integers or a 1-D integer tensor"
    with pytest.raises(ValueError, match=says(sentence)):
        getattr(engine, call)(values)
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize("call", ["add_request", "stream", "generate"])
def test_answers_end_at_tokens_that_there_are_not(engine: ms.DynamicInferenceEngine, call: str) -> None:
    prompt: Any = [[1, 2]] if call == "generate" else [1, 2]
    sentence = "stop_token_ids[1] is 256; accepted: an integer from 0 to 255"
    with pytest.raises(ValueError, match=says(sentence)):
        getattr(engine, call)(prompt, ms.SamplingParams(stop_token_ids=(3, 256)))
    assert not engine.has_unfinished_requests()


def test_answers_may_end_at_the_last_token_of_the_vocabulary(engine: ms.DynamicInferenceEngine) -> None:
    engine.generate([[1, 2]], ms.SamplingParams(max_tokens=1, stop_token_ids=(255,)))


@pytest.mark.parametrize("call", ["warm", "pin"])
def test_a_prefix_is_a_text(engine: ms.DynamicInferenceEngine, call: str) -> None:
    sentence = "tokens is 'text'; accepted: a list of token ids: tokenize text first"
    with pytest.raises(ValueError, match=says(sentence)):
        getattr(engine, call)("text")


def test_prompts_may_be_the_rows_of_a_tensor(engine: ms.DynamicInferenceEngine) -> None:
    rows = engine.generate(torch.tensor(PROMPTS), ONE)  # type: ignore[arg-type]
    assert [result.tokens for result in rows] == [
        result.tokens for result in small_engine().generate(PROMPTS, ONE)
    ]


# ---- sequences to score


@pytest.mark.parametrize(
    ("sequences", "start", "sentence"),
    [
        ("text", 1, "sequences is 'text'; accepted: a list of sequences, each a list of token ids"),
        (
            [1, 2],
            1,
            "sequences is a list of 2 token ids; accepted: a list of sequences, each",
        ),
        (
            torch.tensor([1, 2]),
            1,
            "sequences is a list of 2 token ids; accepted: a list of sequences, each",
        ),
        ([[]], 1, "sequences[0] has 0 tokens; accepted: at least 2, a context and one to score"),
        ([[1, 2], [3]], 1, "sequences[1] has 1 tokens; accepted: at least 2, a context and one to score"),
        ([[1, 256]], 1, "sequences[0][1] is 256; accepted: an integer from 0 to 255"),
        ([[1, 2, 3]], 0, "start of sequences[0] is 0; accepted: an integer from 1 to 2"),
        ([[1, 2, 3], [4, 5]], 2, "start of sequences[1] is 2; accepted: an integer from 1 to 1"),
        ([[1, 2], [3, 4]], [1], "start has 1 entries; accepted: one for all, or 2, one a sequence"),
    ],
)
def test_sequences_that_cannot_be_scored(
    engine: ms.DynamicInferenceEngine, sequences: Any, start: Any, sentence: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        engine.score(sequences, start)
    assert not engine.has_unfinished_requests()


# ---- one for all, or one a prompt


def test_a_checkpoint_plan_is_one_for_all_or_one_a_prompt() -> None:
    def committed(plan: Any) -> int:
        engine = small_engine()
        engine.generate(PROMPTS, ONE, checkpoint_plan=plan)
        return engine.stats().cache.num_states_committed

    usual, every = committed(None), committed(EVERY_BLOCK)
    assert usual < every
    assert committed([None, None]) == usual
    assert committed([EVERY_BLOCK, EVERY_BLOCK]) == committed((EVERY_BLOCK, EVERY_BLOCK)) == every
    assert usual < committed([EVERY_BLOCK, None]) < every


@pytest.mark.parametrize(
    ("name", "value"), [("sampling_params", ONE), ("cache_salt", "tenant"), ("checkpoint_plan", EVERY_BLOCK)]
)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_list_of_the_wrong_length_is_refused(
    engine: ms.DynamicInferenceEngine, name: str, value: Any, count: int
) -> None:
    sentence = f"{name} has {count} entries; accepted: one for all, or 2, one a prompt"
    with pytest.raises(ValueError, match=says(sentence)):
        engine.generate(PROMPTS, **{name: [value] * count})
    assert not engine.has_unfinished_requests()


# ---- sizes


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"num_kv_blocks": 0}, f"num_kv_blocks is 0; accepted: {COUNT}"),
        ({"num_kv_blocks": "512"}, f"num_kv_blocks is '512'; accepted: {INTEGER}"),
        ({"num_mamba_slots": "64"}, f"num_mamba_slots is '64'; accepted: {INTEGER}"),
        ({"num_mamba_slots": 0}, f"num_mamba_slots is 0; accepted: {COUNT}{NO_CACHE}"),
        ({"num_mamba_slots": None}, f"num_mamba_slots is None; accepted: {COUNT}{NO_CACHE}"),
        ({"num_kv_blocks": None}, f"num_kv_blocks is None; accepted: {COUNT}"),
        (
            {"total_gb": 1.0},
            "total_gb is 1.0 and num_kv_blocks is 64; accepted: total_gb alone, or a size for each pool",
        ),
    ],
)
def test_a_pool_of_no_size_is_refused(sizes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=says(sentence)):
        ms.InferenceConfig(**CONFIG | sizes)


def test_without_prefix_caching_no_state_slots_are_needed() -> None:
    for slots in (None, 0):
        assert not ms.InferenceConfig(
            num_kv_blocks=64, num_mamba_slots=slots, enable_prefix_caching=False
        ).enable_prefix_caching


# ---- threads


def test_a_call_from_another_thread_during_a_step_says_so() -> None:
    engine = small_engine()
    model, errors = engine.model, []

    def call_from_another_thread() -> None:
        try:
            engine.cancel(0)
        except RuntimeError as error:
            errors.append(str(error))

    def model_that_is_interrupted(inputs: ms.StepInputs) -> torch.Tensor:
        thread = threading.Thread(target=call_from_another_thread)
        thread.start()
        thread.join()
        return model(inputs)

    engine.model = model_that_is_interrupted  # type: ignore[assignment]
    (result,) = engine.generate(PROMPTS[:1], ONE)
    assert errors == [
        "cancel is called during a step of the same engine; call it between steps, from one thread at a time"
    ]
    assert result.finish_reason == "length"


def test_a_call_from_inside_a_step_says_so() -> None:
    engine = small_engine()
    model = engine.model

    def model_that_calls(inputs: ms.StepInputs) -> torch.Tensor:
        with pytest.raises(
            RuntimeError,
            match=r"^cancel is called during a step of the same engine; call it between steps",
        ):
            engine.cancel(0)
        return model(inputs)

    engine.model = model_that_calls  # type: ignore[assignment]
    engine.generate(PROMPTS[:1], ONE)
