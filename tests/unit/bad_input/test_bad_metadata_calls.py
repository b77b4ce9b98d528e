"""Bad calls of what describes a step: chunk metadata, sampling."""

import mambaslots as ms
import pytest
import torch
from mambaslots.vllm import build_chunk_metadata
from oracle import bad_values as bad
from oracle.bad_values import INT32_MAX, refuse_all
from oracle.sampled_rows import sampled

LONGEST = 2**48
INT64_MAX = 2**63 - 1
_chunk_size = bad.integer(1, LONGEST)

_starts = bad.index_tensor().also(
    torch.tensor([1, 2]), torch.tensor([0, 3, 2]), torch.tensor([-1, 2]), torch.zeros(0, dtype=torch.int64),
    torch.tensor([0, INT64_MAX]), torch.tensor([0, INT32_MAX + 1]),
    torch.tensor([0, INT64_MAX, -(2**63), -1, 5]),  # whose differences wrap around to what looks possible
)  # fmt: skip


# ---- build_chunk_metadata


def test_chunks_of_what_are_no_sequences() -> None:
    target = "build_chunk_metadata"
    computed, starts = torch.tensor([5, 0]), torch.tensor([0, 1, 7])
    counts = bad.index_tensor().also(torch.tensor([1]), torch.tensor([-1, 0]), torch.tensor([INT64_MAX, 0]))
    refuse_all(
        target,
        counts,
        lambda value: build_chunk_metadata(value, starts, 8),
        "(num_computed_tokens|query_start_loc|computed)",
    )
    refuse_all(
        target,
        _starts.also(torch.tensor([0, 1])),
        lambda value: build_chunk_metadata(computed, value, 8),
        "query_start_loc",
    )
    refuse_all(target, _chunk_size, lambda v: build_chunk_metadata(computed, starts, v), "chunk_size")


# ---- sampling


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-45, 1e-38, 1e38, 1e300, 1.7e308])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_any_temperature_there_is_gives_a_token_that_has_a_probability(
    temperature: float, dtype: torch.dtype
) -> None:
    logits = torch.tensor([[1.0, 3.0, -float("inf"), 3.0]], dtype=dtype)
    for seed in range(8):
        (token,) = sampled(logits, [ms.SamplingParams(temperature=temperature, seed=seed)], [0])
        assert token in ((1, 3) if temperature < 1 else (0, 1, 3))
