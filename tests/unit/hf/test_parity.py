"""Served models of transformers beside transformers' own torch path, which computes every text at once.

Errors are relative to the largest logit. float64 runs both sides under `Float64Casts`: what is left is the
order of sums.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import mambaslots as ms
import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from mambaslots.hf.served_model import ServedModel
from oracle.float64_casts import Float64Casts
from oracle.hf_models import CONFIGS, VOCABULARY, reference_logits, reference_model, served_model
from oracle.hf_steps import step_errors, texts
from oracle.memory_poison import poison

Record = Callable[[str, str, str, float], None]
Mode = Callable[[], AbstractContextManager[Any]]

CASES = list(CONFIGS)
FLOAT16, FLOAT32, FLOAT64, FLOAT64_WITH_CASTS = 2e-2, 1e-4, 1e-9, 1e-5
"""The errors that are accepted; float64 models with transformers' casts to float32 have float32's noise."""

TIE = 1e-4
"""How close the two best logits of a token are where another token is no fault, in float32."""


@pytest.mark.parametrize("case", CASES)
def test_logits(case: str, record_error: Record) -> None:
    """Of whole prompts, prompts in parts, beside others, from a model, and token by token."""
    _check_steps(case, torch.float32, nullcontext, FLOAT32, "float32", record_error)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_logits_on_a_gpu(case: str, record_error: Record) -> None:
    """Our kernels for a GPU beside transformers' torch path on the CPU."""
    model = ServedModel(copy.deepcopy(reference_model(case)).to("cuda"))
    both = texts(VOCABULARY)
    expected = reference_logits(case, both[0]).cuda(), reference_logits(case, both[1]).cuda()
    errors, without_state = step_errors(model, both, expected)
    for column, error in errors.items():
        record_error("gpu ", case, column, error)
    assert max(errors.values()) < FLOAT32, errors
    assert without_state > 1e-3


@pytest.mark.sampled(case=("falcon_h1", "qwen3_5_moe"))
@pytest.mark.parametrize("case", CASES)
def test_logits_in_float64(case: str, record_error: Record) -> None:
    _check_steps(case, torch.float64, Float64Casts, FLOAT64, "float64", record_error)


def test_both_sides_have_one_reference_whichever_test_builds_it_first() -> None:
    """One of a mode, and one that an earlier test has built without it, differ by 5e-9 in their angles."""
    model = reference_model("falcon_h1", torch.float64)
    assert model is reference_model("falcon_h1", torch.float64, VOCABULARY)
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float64}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_logits_in_float64_with_the_casts_of_transformers(case: str, record_error: Record) -> None:
    _check_steps(
        case, torch.float64, nullcontext, FLOAT64_WITH_CASTS, "float64 with casts to float32", record_error
    )


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_logits_in_half_precision(case: str, record_error: Record) -> None:
    """Beside transformers' in float16: the dtypes within a model, and what is rounded where."""
    _check_steps(case, torch.float16, nullcontext, FLOAT16, "float16", record_error)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_the_rules_of_steps(case: str) -> None:
    """Logits, KV and states are the same however steps are cut, batched, padded and resumed; with drafts."""
    ms.testing.check_model(_InMode(served_model(case, torch.float64), Float64Casts))


@pytest.mark.sampled(case=("nemotron_h MoE", "lfm2", "olmo_hybrid"))
@pytest.mark.parametrize("case", CASES)
def test_greedy_answers(case: str, record_error: Record) -> None:
    """The engine's tokens and log-probs, 64 a request, and again in a second turn, which resumes."""
    error = _check_engine(case, torch.float32, nullcontext, FLOAT32)
    record_error("float32", case, "engine", error)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_greedy_answers_in_float64(case: str, record_error: Record) -> None:
    error = _check_engine(case, torch.float64, Float64Casts, FLOAT64)
    record_error("float64", case, "engine", error)


def _check_steps(
    case: str, dtype: torch.dtype, mode: Mode, tolerance: float, precision: str, record_error: Record
) -> None:
    with mode():
        both = texts(VOCABULARY)
        expected = tuple(reference_logits(case, text, dtype) for text in both)
        errors, without_state = step_errors(served_model(case, dtype), both, expected)
    for column, error in errors.items():
        record_error(precision, case, column, error)
    assert max(errors.values()) < tolerance, errors
    assert without_state > 1e-3, "the state does not matter: the test sees nothing"


class _InMode:
    """A served model whose steps run under a mode."""

    def __init__(self, model: ServedModel, mode: Mode) -> None:
        self._model, self._mode = model, mode

    def state_spec(self) -> ms.HybridStateSpec:
        return self._model.state_spec()

    def __call__(self, inputs: ms.StepInputs) -> Tensor:
        with self._mode():
            return self._model(inputs)


def _check_engine(case: str, dtype: torch.dtype, mode: Mode, tolerance: float) -> float:
    """Serve conversations of two turns; the largest error of a log-prob."""
    model = _InMode(served_model(case, dtype), mode)
    block = model.state_spec().grid
    config = ms.InferenceConfig(
        block_size_tokens=block if block > 1 else 8,
        max_requests=3,
        max_tokens_per_step=64,
        max_sequence_length=320,
        num_kv_blocks=64,
        num_mamba_slots=24,
    )
    engine = poison(ms.DynamicInferenceEngine(model, config))
    long, short = texts(VOCABULARY)
    prompts = [list(long), [*long[:70], *short], list(short)]
    errors = []
    for turn, length in enumerate((64, 16)):
        params = ms.SamplingParams(max_tokens=length, return_log_probs=True)
        results = engine.generate(prompts, params)
        for prompt, result in zip(prompts, results, strict=True):
            errors.append(_answer_error(case, dtype, mode, prompt, result))
            assert turn == 0 or result.num_resumed_tokens >= 64
        prompts = [[*prompt, *result.tokens, *short] for prompt, result in zip(prompts, results, strict=True)]
    engine.check_integrity()
    assert max(errors) < tolerance, errors
    return max(errors)


def _answer_error(
    case: str, dtype: torch.dtype, mode: Mode, prompt: Sequence[int], result: ms.RequestResult
) -> float:
    """The largest error of a log-prob beside transformers' of the whole text, whose best tokens are equal."""
    text = [*prompt, *result.tokens]
    with mode():
        logits = reference_logits(case, text[:-1], dtype)[len(prompt) - 1 :].double()
    best = logits.topk(2).values
    tokens = torch.tensor(result.tokens)
    differs = logits.argmax(-1) != tokens
    assert not bool((differs & (best[:, 0] - best[:, 1] > TIE)).any()), "another token than transformers'"
    log_probs = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    return float(
        (torch.tensor(result.log_probs, dtype=torch.float64) - log_probs).abs().max() / logits.abs().max()
    )
