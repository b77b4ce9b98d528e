"""Sampling: what temperature, top-k and top-p leave of a distribution, and reproducible draws from it."""

from bisect import bisect_right
from collections import Counter
from itertools import accumulate
from typing import Any

import mambaslots as ms
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.inference.engines import sampling
from mambaslots.inference.engines.sampling import log_softmax, token_distribution


def sample(*arguments: Any) -> list[int]:
    tokens: list[int] = sampling.sample(*arguments).tolist()
    return tokens


LOGITS = torch.tensor([1.0, 3.0, 2.0, 0.0, -1.0])


def test_without_temperature_top_k_and_top_p_decoding_is_greedy() -> None:
    assert sample(LOGITS[None], [ms.SamplingParams()], [0]) == [1]
    assert sample(LOGITS[None], [ms.SamplingParams(temperature=0.0, top_p=0.5)], [0]) == [1]
    assert sample(LOGITS[None], [ms.SamplingParams(temperature=5.0, top_k=1)], [0]) == [1]


def test_temperature_divides_the_logits() -> None:
    expected = torch.softmax(LOGITS / 2.0, dim=-1)
    torch.testing.assert_close(token_distribution(LOGITS, ms.SamplingParams(temperature=2.0)), expected)


def test_top_k_keeps_the_k_most_likely() -> None:
    kept = token_distribution(LOGITS, ms.SamplingParams(top_k=2))
    torch.testing.assert_close(kept[[1, 2]], torch.softmax(LOGITS[[1, 2]], dim=-1))
    assert kept[[0, 3, 4]].sum() == 0


@given(p=st.floats(0.01, 1.0), logits=st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=8))
def test_top_p_keeps_the_smallest_head_that_reaches_p(p: float, logits: list[float]) -> None:
    values = torch.tensor(logits, dtype=torch.float64)
    full = torch.softmax(values, dim=-1)
    kept = token_distribution(values, ms.SamplingParams(top_p=p, temperature=1.0))
    chosen = kept > 0
    assert full[chosen].sum() >= p - 1e-12
    assert full[chosen].sum() - full[chosen].min() < p + 1e-12
    assert full[chosen].min() >= full[~chosen].max() if (~chosen).any() else True
    torch.testing.assert_close(kept.sum(), torch.ones((), dtype=torch.float64))


def test_draws_follow_the_distribution() -> None:
    params = ms.SamplingParams(temperature=1.0, seed=7)
    n = 20_000
    counts = Counter(sample(LOGITS.expand(n, -1), [params] * n, range(n)))
    for token, probability in enumerate(torch.softmax(LOGITS.double(), dim=-1).tolist()):
        deviation = (probability * (1 - probability) / n) ** 0.5
        assert abs(counts[token] / n - probability) < 5 * deviation


def test_a_draw_is_the_first_token_at_which_exact_sums_pass_the_number() -> None:
    probabilities = torch.softmax(torch.randn(5000, generator=torch.Generator().manual_seed(1)), dim=-1)
    probabilities[4990:] = 0
    parts = [int(float(p) * 2**53) for p in probabilities]
    sums = list(accumulate(parts))
    for uniform in (0.0, 2**-53, 0.25, 0.999, 1 - 2**-53, *(sampling._uniform(3, i) for i in range(200))):
        token = int(sampling._draw(probabilities, torch.tensor(uniform, dtype=torch.float64)))
        assert token == bisect_right(sums, int(sums[-1] * uniform))
        assert token < 4990


@pytest.mark.gpu
@pytest.mark.parametrize("top_p", [None, 0.3, 0.9])
def test_a_gpu_draws_what_the_cpu_does_of_the_same_probabilities(top_p: float | None) -> None:
    """In whatever order its threads add up: floats would differ in their last bits from call to call."""
    logits = torch.randn(50_000, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    params = ms.SamplingParams(temperature=1.0, top_p=top_p)
    probabilities = torch.softmax(logits, dim=-1)
    uniforms = torch.arange(64, dtype=torch.float64) / 64
    expected = [int(sampling._draw(probabilities, uniform)) for uniform in uniforms]
    for _ in range(20):
        there = probabilities.cuda()
        assert [int(sampling._draw(there, uniform)) for uniform in uniforms.cuda()] == expected
    kept = [token_distribution(logits.cuda(), params) > 0 for _ in range(20)]
    assert all(torch.equal(kept[0], again) for again in kept)
    assert (kept[0].cpu() ^ (token_distribution(logits, params) > 0)).sum() <= 1  # softmax rounds otherwise


def test_a_draw_depends_on_seed_and_position_only() -> None:
    params = [ms.SamplingParams(temperature=1.0, seed=seed) for seed in (1, 2, 1)]
    alone = [sample(LOGITS[None], [param], [5])[0] for param in params]
    together = sample(LOGITS.expand(3, -1), params, [5, 5, 5])
    assert alone == together
    many = [sample(LOGITS[None], [params[0]], [position])[0] for position in range(50)]
    assert len(set(many)) > 1


def test_log_probs_of_half_precision_logits_are_computed_in_float32() -> None:
    assert log_softmax(LOGITS.bfloat16()).dtype is torch.float32
    assert log_softmax(LOGITS.double()).dtype is torch.float64


def test_unequal_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="logits has 1 rows"):
        sample(LOGITS[None], [], [0])


@pytest.mark.parametrize("temperature", [1e-30, 1e-38, 1e-40, 1e-300, 5e-324])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_temperature_that_rounds_to_zero_is_greedy(temperature: float, dtype: torch.dtype) -> None:
    for seed in range(4):
        param = ms.SamplingParams(temperature=temperature, seed=seed)
        assert sample(LOGITS.to(dtype)[None], [param], [0]) == [1]


def test_seeds_that_agree_in_32_bits_draw_differently() -> None:
    flat = torch.zeros(1, 1000)
    first, second = (
        [sample(flat, [ms.SamplingParams(temperature=1.0, seed=seed)], [i])[0] for i in range(8)]
        for seed in (1, 1 + 2**32)
    )
    assert first != second
