"""The most likely tokens at each position of an answer, against a sorted log_softmax in float64."""

from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import patch

import mambaslots as ms
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.inference.engines import step_runner
from mambaslots.inference.kernels import sampling
from mambaslots.inference.kernels.sampling import top_log_probs
from oracle.drafters import MODES, speculating
from oracle.faults import InjectedError, failing
from oracle.recurrent_lm import RecurrentLM
from oracle.serving import TOLERANCE, random_tokens, small_engine, small_model

PROMPTS = [random_tokens(20, seed=1), random_tokens(33, seed=2), random_tokens(9, seed=3), [5]]
WANTED = [
    ms.SamplingParams(max_tokens=12, num_top_log_probs=3),
    ms.SamplingParams(max_tokens=9),
    ms.SamplingParams(max_tokens=15, num_top_log_probs=20, return_log_probs=True, temperature=1.0, seed=4),
    ms.SamplingParams(max_tokens=1, num_top_log_probs=1, return_log_probs=True),
]


def sorted_rows(logits: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference: all tokens of each row in order, equal ones by id."""
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :number]
    return ids, torch.log_softmax(logits.double(), dim=-1).gather(1, ids)


@given(
    rows=st.integers(1, 5),
    vocab_size=st.integers(1, 70),
    number=st.integers(1, 20),
    values=st.sampled_from([1, 2, 3, 9, 10**6]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    forbidden=st.sampled_from([0.0, 0.3, 0.9]),
    seed=st.integers(0, 10**6),
    block=st.sampled_from([1, 2, 64]),
)
def test_the_top_of_each_row_is_that_of_a_stable_sort(
    rows: int,
    vocab_size: int,
    number: int,
    values: int,
    dtype: torch.dtype,
    forbidden: float,
    seed: int,
    block: int,
) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randint(values, (rows, vocab_size), generator=draw).double().mul(8 / values).to(dtype)
    no_token = torch.rand(logits.shape, generator=draw) < forbidden
    no_token[:, vocab_size // 2] = False
    logits[no_token] = -torch.inf
    number = min(number, vocab_size)
    with patch.object(sampling, "TOP_ROWS", block):
        ids, values_there = top_log_probs(logits, number)
    expected_ids, expected = sorted_rows(logits, number)
    assert torch.equal(ids, expected_ids)
    assert torch.equal(ids[:, 0], logits.argmax(dim=-1))
    tolerance = TOLERANCE if dtype is torch.float64 else 1e-5
    torch.testing.assert_close(values_there.double(), expected, rtol=tolerance, atol=tolerance)


def test_a_row_of_no_numbers_raises_nothing() -> None:
    logits = torch.full((2, 7), torch.nan)
    logits[1, 3] = 1.0
    ids, _ = top_log_probs(logits, 4)
    assert bool(((ids >= 0) & (ids < 7)).all())


def assert_tops(prompt: list[int], result: ms.RequestResult, number: int) -> None:
    if not number:
        assert result.top_log_probs is None
        return
    assert result.top_log_probs is not None
    assert len(result.top_log_probs) == len(result.tokens)
    logits = RecurrentLM(small_model()).logits([*prompt, *result.tokens[:-1]])[len(prompt) - 1 :]
    ids, expected = sorted_rows(logits, number)
    assert [[token for token, _ in top] for top in result.top_log_probs] == ids.tolist()
    found = [[value for _, value in top] for top in result.top_log_probs]
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
    for token, value, top in zip(result.tokens, result.log_probs or [], result.top_log_probs, strict=False):
        assert dict(top).get(token, value) == value


@pytest.mark.parametrize("mode", [None, *MODES])
@pytest.mark.sampled(mode=(None, "mixed", "right", "replay, mixed"))
def test_answers_have_the_most_likely_tokens_with_and_without_drafts(mode: str | None) -> None:
    without_tops = [replace(wanted, num_top_log_probs=0) for wanted in WANTED]
    with speculating(mode) if mode is not None else nullcontext():
        plain = small_engine(max_requests=3).generate(PROMPTS, without_tops)
        results = small_engine(max_requests=3).generate(PROMPTS, WANTED)
    for prompt, wanted, result, without in zip(PROMPTS, WANTED, results, plain, strict=True):
        assert result.tokens == without.tokens
        assert_tops(prompt, result, wanted.num_top_log_probs)


def test_streams_and_steps_bring_them_with_their_tokens_also_after_failed_steps() -> None:
    engine = small_engine()
    stream = engine.stream(PROMPTS[0], WANTED[0])
    arrived = [next(stream)]
    other = engine.add_request(PROMPTS[2], WANTED[2])
    with failing(engine, "waited", after=True), pytest.raises(InjectedError):
        engine.step()
    report = engine.step()
    assert [one.top_log_probs is not None and len(one.top_log_probs) for one in report.tokens[other]] == [20]
    arrived += list(stream)
    assert stream.result is not None
    assert [one.top_log_probs for one in arrived] == stream.result.top_log_probs
    assert [one.log_prob for one in arrived] == [None] * 12
    assert_tops(PROMPTS[0], stream.result, 3)


def test_a_step_without_such_a_request_computes_none() -> None:
    engine = small_engine()
    with patch.object(step_runner, "top_log_probs", side_effect=AssertionError):
        (result,) = engine.generate(PROMPTS[:1], WANTED[1])
    assert result.top_log_probs is None


@pytest.mark.parametrize("number", [-1, 21, 2.5, True, None])
def test_other_numbers_are_refused(number: object) -> None:
    with pytest.raises(ValueError, match=r"num_top_log_probs is .*accepted: an integer from 0 to 20"):
        ms.SamplingParams(num_top_log_probs=number)  # type: ignore[arg-type]


def test_more_than_the_vocabulary_is_refused() -> None:
    model = ms.models.HybridLM(ms.models.HybridConfig.tiny(vocab_size=7), seed=0)
    engine = small_engine(model=model, block_size_tokens=32)
    engine.generate([[1, 2]], ms.SamplingParams(num_top_log_probs=7))
    with pytest.raises(ValueError, match="num_top_log_probs is 8; accepted: an integer from 0 to 7"):
        engine.generate([[1, 2]], ms.SamplingParams(num_top_log_probs=8))
