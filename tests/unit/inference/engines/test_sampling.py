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
from mambaslots.inference.engines import step_runner
from mambaslots.inference.kernels.reference.torch_token_draws import drawn_token
from mambaslots.inference.kernels.sampling import log_softmax
from oracle.sampled_rows import sample_rows, sampled, token_distribution


def sample(*arguments: Any) -> list[int]:
    tokens: list[int] = sampled(*arguments).tolist()
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
    n = 6_000
    counts = Counter(sample(LOGITS.expand(n, -1), [params] * n, range(n)))
    for token, probability in enumerate(torch.softmax(LOGITS.double(), dim=-1).tolist()):
        deviation = (probability * (1 - probability) / n) ** 0.5
        assert abs(counts[token] / n - probability) < 5 * deviation


@pytest.mark.parametrize("vocabulary", [5000, 4608, 512, 100])
def test_a_draw_is_the_first_token_at_which_exact_sums_pass_the_number(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(1)
    probabilities = torch.softmax(torch.randn(vocabulary, generator=generator), dim=-1)
    probabilities[-10:] = 0
    sums = list(accumulate(int(float(p) * 2**53) for p in probabilities))
    uniforms = [0.0, 2**-53, 0.25, 0.999, 1 - 2**-53, *(step_runner.uniform(3, i) for i in range(200))]
    drawn = [drawn_token(probabilities, u) for u in uniforms]
    assert drawn == [bisect_right(sums, min(int(sums[-1] * u), sums[-1] - 1)) for u in uniforms]
    assert max(drawn) < vocabulary - 10


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
TEMPERATURES = st.one_of(
    st.none(), st.sampled_from([0.0, 1.0, 1e-40, 5e-324, 1e30]), st.floats(0.01, 10, allow_subnormal=False)
)


@st.composite
def settings_of_rows(draw: st.DrawFn, vocabulary: int) -> list[ms.SamplingParams]:
    ranks = st.integers(0, vocabulary + 2) | st.integers(0, 5)
    shares = st.sampled_from([1.0, 1e-9, 0.5, 0.9, 1 - 1e-12]) | st.floats(0.001, 0.999)
    one = st.builds(
        ms.SamplingParams,
        temperature=TEMPERATURES,
        top_k=st.none() | ranks,
        top_p=st.none() | shares,
        seed=st.integers(0, 2**63 - 1),
    )
    return draw(st.lists(one, min_size=1, max_size=6))


def logits_of(
    rows: int, vocabulary: int, seed: int, spread: float, tied: bool, num_forbidden: int
) -> torch.Tensor:
    """Normal numbers; `tied` rounds them, and `num_forbidden` tokens of a row get -inf."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64) * spread
    if tied:
        logits = logits.round()
    forbidden = torch.rand(rows, vocabulary, generator=generator).argsort(dim=-1)[:, :num_forbidden]
    return logits.scatter_(1, forbidden, -torch.inf)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
def test_the_tokens_of_a_batch_are_those_of_each_row_by_itself(
    dtype: torch.dtype, data: st.DataObject
) -> None:
    vocabulary = data.draw(st.integers(1, 40) | st.sampled_from([511, 512, 513, 1500, 4097, 9001]))
    params = data.draw(settings_of_rows(vocabulary))
    logits = logits_of(
        len(params),
        vocabulary,
        data.draw(st.integers(0, 1000)),
        data.draw(st.sampled_from([0.0, 0.1, 1.0, 3.0, 10.0, 100.0])),
        data.draw(st.booleans()),
        data.draw(st.sampled_from([0, vocabulary // 2, vocabulary - 1])),
    ).to(dtype)
    positions = data.draw(st.lists(st.integers(0, 99), min_size=len(params), max_size=len(params)))
    assert sample(logits, params, positions) == sample_rows(logits, params, positions)


@pytest.mark.sampled
@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0, 30.0], ids=["flat", "wide", "peaked", "certain"])
@pytest.mark.parametrize("vocabulary", [40_000, 50_257])
def test_long_rows_in_many_groups(spread: float, vocabulary: int) -> None:
    """Several groups of each kind, rows whose likely tokens are neighbours, and heads of all lengths."""
    shares = (0.1, 0.5, 0.9, 0.999)
    params = [ms.SamplingParams(top_p=p, temperature=0.9, seed=i) for i, p in enumerate(shares)]
    params += [ms.SamplingParams(top_k=k, seed=9) for k in (3, 700, vocabulary - 1)]
    params += [ms.SamplingParams(top_k=500, top_p=0.8, seed=9), ms.SamplingParams()]
    params += [ms.SamplingParams(temperature=0.8, seed=seed) for seed in range(8)]
    logits = logits_of(len(params), vocabulary, 4, spread, False, 0).float()
    logits[2] = logits[2].sort().values
    assert sample(logits, params, range(len(params))) == sample_rows(logits, params, range(len(params)))


def test_of_equally_likely_tokens_those_with_the_lowest_ids_are_kept() -> None:
    logits = torch.tensor([[1.0, 0.0, 1.0, 0.0, 2.0, 0.0, 1.0, 0.0]]).expand(500, -1)
    for params, kept in (
        (ms.SamplingParams(top_k=3, seed=1), {0, 2, 4}),
        (ms.SamplingParams(top_k=6, seed=1), {0, 1, 2, 3, 4, 6}),
        (ms.SamplingParams(top_p=0.5, seed=1), {0, 4}),
    ):
        assert set(sample(logits, [params] * 500, range(500))) == kept


def test_rows_are_not_sorted_that_need_only_a_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = logits_of(3, 9000, 1, 8.0, False, 0)
    params = [ms.SamplingParams(temperature=1.0, seed=1), ms.SamplingParams(), ms.SamplingParams(top_k=5)]
    expected = sample_rows(logits, params, [0, 1, 2])
    monkeypatch.setattr(torch, "sort", None)
    assert sample(logits, params, [0, 1, 2]) == expected


@pytest.mark.sampled
@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.9, 1 - 1e-7, 1 - 1e-12])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_heads_of_all_lengths(dtype: torch.dtype, tied: bool, top_p: float) -> None:
    """From a certain token to equally likely ones."""
    spreads = (0.0, 1e-6, 0.3, 1.0, 3.0, 60.0)
    logits = torch.cat([logits_of(1, 9_001, 5, spread, tied, 0) for spread in spreads]).to(dtype)
    params = [ms.SamplingParams(top_p=top_p, seed=seed) for seed in range(6)]
    for position in range(3):
        assert sample(logits, params, [position] * 6) == sample_rows(logits, params, [position] * 6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_changes_no_other_row(bad: float) -> None:
    kinds = [{}, {"temperature": 1.0}, {"top_k": 3}, {"top_p": 0.9}, {"top_k": 9, "top_p": 0.5}] * 2
    params = [ms.SamplingParams(**kind, seed=i) for i, kind in enumerate(kinds)]
    for vocabulary in (60, 9000):
        logits = logits_of(10, vocabulary, 1, 2.0, False, 0)
        expected = sample(logits, params, range(10))
        logits[:4, 7] = bad
        logits[4] = -torch.inf
        tokens = sample(logits, params, range(10))
        assert tokens[5:] == expected[5:]
        assert all(0 <= token < vocabulary for token in tokens)


def test_a_default_device_does_not_move_host_tensors() -> None:
    params = [ms.SamplingParams(temperature=1.0, top_p=0.5, top_k=3, seed=1), ms.SamplingParams()]
    expected = sample(LOGITS.expand(2, -1), params, [0, 1])
    with torch.device("meta"):
        assert sample(LOGITS.expand(2, -1), params, [0, 1]) == expected


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


@pytest.mark.sampled
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("vocabulary", [50_257, 50_258, 50_260])  # of rows at other addresses modulo 16
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_row_has_the_same_bits_of_log_probs_wherever_it_lies(
    dtype: torch.dtype, vocabulary: int, device: str
) -> None:
    logits = 4 * torch.randn(33, vocabulary, generator=torch.Generator().manual_seed(1), device="cpu")
    logits = logits.to(device, dtype)
    together = log_softmax(logits)
    assert together.shape == logits.shape
    for row in range(33):
        assert torch.equal(log_softmax(logits[row : row + 1].clone())[0], together[row])
    assert torch.equal(log_softmax(logits[3:]), together[3:])
    expected = torch.log_softmax(logits.double(), dim=-1)
    torch.testing.assert_close(together.double(), expected, rtol=1e-6, atol=1e-5)


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
