"""Bad calls of what describes a step: chunk metadata, the host's builder, sampling."""

from types import SimpleNamespace
from typing import Any

import mambaslots as ms
import pytest
import torch
from mambaslots.vllm.chunk_metadata import (
    Mamba2AttentionMetadataBuilder,
    build_chunk_metadata,
    compute_varlen_chunk_metadata,
)
from oracle import bad_values as bad
from oracle.bad_values import INT32_MAX, meta, refuse_all
from oracle.picture import picture
from oracle.sampled_rows import sampled

LONGEST = 2**48
INT64_MAX = 2**63 - 1
_chunk_size = bad.integer(1, LONGEST)

# ---- compute_varlen_chunk_metadata

_starts = bad.index_tensor().also(
    torch.tensor([1, 2]), torch.tensor([0, 3, 2]), torch.tensor([-1, 2]), torch.zeros(0, dtype=torch.int64),
    torch.tensor([0, INT64_MAX]), torch.tensor([0, INT32_MAX + 1]),
    torch.tensor([0, INT64_MAX, -(2**63), -1, 5]),  # whose differences wrap around to what looks possible
)  # fmt: skip


def test_packed_metadata_of_what_is_no_step() -> None:
    target = "compute_varlen_chunk_metadata"
    refuse_all(target, _starts, lambda value: compute_varlen_chunk_metadata(value, 8), "query_start_loc")
    starts = torch.tensor([0, 3, 9])
    refuse_all(target, _chunk_size, lambda v: compute_varlen_chunk_metadata(starts, v), "chunk_size")


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


# ---- the builder


def vllm(chunk_size: Any = 8) -> Any:
    return SimpleNamespace(model_config=SimpleNamespace(get_mamba_chunk_size=lambda: chunk_size))


def common(**overrides: Any) -> Any:
    computed = overrides.pop("computed", torch.tensor([5, 0]))
    fields = {"query_start_loc_cpu": torch.tensor([0, 1, 7], dtype=torch.int32)} | overrides
    return SimpleNamespace(compute_num_computed_tokens=lambda: computed, **fields)


_target = "Mamba2AttentionMetadataBuilder"


def test_a_builder_of_what_is_no_host() -> None:
    def build(config: Any, device: Any = "cpu") -> None:
        Mamba2AttentionMetadataBuilder(None, [], config, device)

    hosts = bad.anything().also(SimpleNamespace(model_config=None), SimpleNamespace(model_config=3))
    refuse_all(_target, hosts, build, "vllm_config")
    refuse_all(_target, _chunk_size, lambda v: build(vllm(v)), r"model_config\.get_mamba_chunk_size\(\)")
    refuse_all(_target, bad.device(), lambda value: build(vllm(), value), "device")


def test_a_step_that_cannot_be_built() -> None:
    builder = Mamba2AttentionMetadataBuilder(None, [], vllm(), "cpu")
    before = picture(builder)

    def unchanged() -> None:
        assert picture(builder) == before

    steps = bad.anything().also(
        SimpleNamespace(query_start_loc_cpu=torch.tensor([0])), SimpleNamespace(compute_num_computed_tokens=3)
    )
    refuse_all(_target, steps, lambda v: builder.build(0, v), "common_attn_metadata", unchanged)
    refuse_all(
        _target,
        _starts.also(torch.tensor([0, 1]), torch.tensor([0, 1, 2, 3])),
        lambda value: builder.build(0, common(query_start_loc_cpu=value)),
        "query_start_loc(_cpu)?",
        unchanged,
    )
    refuse_all(
        _target,
        bad.index_tensor().also(
            torch.tensor([1]), torch.tensor([1, 2, 3]), torch.tensor([0, -1]), torch.tensor([INT64_MAX, 0])
        ),
        lambda value: builder.build(0, common(computed=value)),
        r"(compute_num_computed_tokens\(\)|query_start_loc|computed)",
        unchanged,
    )
    tables = bad.anything(type(None), torch.Tensor).also(
        torch.zeros(2), torch.zeros(2, 0), meta(2), torch.tensor(1)
    )
    refuse_all(
        _target,
        tables,
        lambda value: builder.build(0, common(block_table_tensor=value)),
        "block_table_tensor",
        unchanged,
    )


def test_chunk_metadata_of_what_are_no_prefills() -> None:
    compute = Mamba2AttentionMetadataBuilder(None, [], vllm(), "cpu")._compute_chunk_metadata
    computed, starts = torch.tensor([5, 0]), torch.tensor([0, 1, 7])
    refuse_all(_target, bad.integer(2, 2), lambda v: compute(v, computed, starts), "num_prefills")
    names = "(num_computed_tokens|query_start_loc|computed|num_prefills)"
    counts = bad.index_tensor().also(torch.tensor([1]), torch.tensor([-1, 0]), torch.tensor([INT64_MAX, 0]))
    refuse_all(_target, counts, lambda v: compute(2, v, starts), names)
    refuse_all(_target, _starts.also(torch.tensor([0, 1])), lambda v: compute(2, computed, v), names)


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
