"""The Triton draws of tokens against rows drawn one at a time in plain torch."""

import mambaslots as ms
import pytest
import torch
from mambaslots.inference.kernels import sampling
from oracle.sampled_rows import sample_rows, sampled
from oracle.synchronisation import no_synchronisation


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch) -> str:
    """Where the kernels run: on the CPU in triton's interpreter, which is off where there is a GPU."""
    if (request.param == "cuda") != torch.cuda.is_available():
        pytest.skip("the kernels run on the GPU, or in the interpreter")
    monkeypatch.setattr(sampling, "runs_triton", lambda device: True)
    return request.param


KINDS = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.25, "top_k": 3},
    {"top_k": 40},
    {"temperature": 2.0, "top_p": 0.9},
    {"top_p": 0.3},
    {"temperature": 1e-40, "top_k": 7, "top_p": 0.99},
    {"top_k": 20, "top_p": 0.8},
    {"top_p": 1e-9},
    {"top_k": 10**6, "top_p": 1.0, "temperature": 0.5},
    {"min_p": 0.3},
    {"min_p": 0.02, "top_k": 5, "top_p": 0.9, "temperature": 1.5},
    {"min_p": 1.0},
)


def rows_of(num_rows: int, vocabulary: int, spread: float, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocabulary, generator=generator, dtype=torch.float64) * spread


def settings(num_rows: int) -> list[ms.SamplingParams]:
    return [ms.SamplingParams(**KINDS[i % len(KINDS)], seed=i) for i in range(num_rows)]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's own
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("vocabulary", [1, 7, 100, 8193])
@pytest.mark.parametrize("kind", ["flat", "wide", "peaked", "tied", "forbidden"])
@pytest.mark.sampled(vocabulary=(1, 7))
def test_tokens_are_those_of_each_row_by_itself(kind, vocabulary, dtype, device):
    logits = rows_of(len(KINDS), vocabulary, {"flat": 0.0, "peaked": 20.0}.get(kind, 2.0))
    if kind == "tied":
        logits = logits.round()
    if kind == "forbidden":
        logits[:, 1::2] = -torch.inf
    logits = logits.to(dtype).to(device)
    params = settings(len(KINDS))
    assert sampled(logits, params, range(len(KINDS))).tolist() == sample_rows(
        logits, params, range(len(KINDS))
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_view_of_logits_and_rows_without_finite_logits(device):
    wide = rows_of(20, 129, 2.0).float().to(device)
    logits, params = wide[::2, 3:104], settings(10)
    expected = sampled(logits, params, range(10)).tolist()
    assert expected == sample_rows(logits, params, range(10))
    logits[1] = torch.nan
    logits[2, 7] = torch.inf
    logits[4] = -torch.inf
    tokens = sampled(logits, params, range(10)).tolist()
    assert [tokens[i] for i in (0, 3, 5, 6, 7, 8, 9)] == [expected[i] for i in (0, 3, 5, 6, 7, 8, 9)]
    assert all(0 <= token < 101 for token in tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [131_072, 50_257])
@pytest.mark.parametrize("spread", [0.5, 8.0], ids=["flat", "peaked"])
def test_mixed_rows_take_few_launches_and_wait_for_nothing(spread, vocabulary):
    logits, params = rows_of(60, vocabulary, spread).float().cuda(), settings(60)
    expected = sampled(logits, params, range(60))
    assert expected.tolist() == sample_rows(logits, params, range(60))
    torch.cuda.synchronize()
    with no_synchronisation():
        sampled(logits, params, range(60))
    for num_rows in (10, 60):
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            tokens = sampled(logits[:num_rows], params[:num_rows], range(num_rows))
            torch.cuda.synchronize()
        launches = [event.name for event in profile.events() if event.device_type.name == "CUDA"]
        assert sum("Memcpy" in name for name in launches) == 1
        assert sum("Memcpy" not in name and "Memset" not in name for name in launches) <= 6
        assert tokens.tolist() == expected[:num_rows].tolist()
