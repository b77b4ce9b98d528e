"""A prompt ended one token behind a hit: its short tail took another path through a kernel, and was NaN."""

import copy
from typing import Any

import mambaslots as ms
import numpy as np
import pytest
import torch
from mambaslots.hf.served_model import ServedModel
from mambaslots.inference.kernels import attention
from mambaslots.inference.kernels.kernel_set import KernelSet
from oracle.attention_batch import AttentionBatch
from oracle.cached_states import assert_cached_states
from oracle.drafters import MODES
from oracle.float32_rule import Comparison
from oracle.hf_models import reference_model
from oracle.serving import TOLERANCE, random_tokens, serve_checked, small_engine, tiny_model
from oracle.transformers_lm import TransformersOracle, whole_model

BLOCK = 8
TAILS = (1, 2, 3)
MOE = ("granitemoehybrid MoE", "nemotron_h MoE", "qwen3_next", "qwen3_5_moe")
"""Models of transformers whose layers have experts."""


def tails_of(stem: list[int], seed: int) -> list[list[int]]:
    return [stem + random_tokens(tail, seed=seed + tail) for tail in TAILS]


@pytest.mark.disaster(number=8)
@pytest.mark.sampled
@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("mode", ["", "right", "in place", "encoded", "replay"])
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_tails_of_one_to_three_tokens_behind_a_hit(blocks: int, mode: str) -> None:
    """Each alone, all at once, and beside a prompt that is not cached."""
    engine = small_engine(**MODES.get(mode, {}))
    stem = random_tokens(BLOCK * blocks, seed=110)
    serve_checked(engine, [stem], length=2)
    for prompt in tails_of(stem, seed=111):
        assert serve_checked(engine, [prompt], length=3)[0].num_resumed_tokens == len(stem)
    prompts = [*tails_of(stem, seed=121), random_tokens(21, seed=130)]
    results = serve_checked(engine, prompts, length=3)
    assert [result.num_resumed_tokens for result in results] == [len(stem)] * 3 + [0]
    assert assert_cached_states(engine.context) > 0


@pytest.mark.disaster(number=8)
@pytest.mark.sampled
@pytest.mark.parametrize("case", MOE)
def test_so_it_is_with_models_that_have_experts(case: str) -> None:
    """Few tokens go to few experts; transformers computes the whole text without a cache."""
    engine, oracle = small_engine(model=whole_model(case)), TransformersOracle(case)
    stem = random_tokens(2 * BLOCK, seed=140)
    params = ms.SamplingParams(max_tokens=2, return_log_probs=True)
    engine.generate([stem], params)
    for prompt in tails_of(stem, seed=141):
        (result,) = engine.generate([prompt], params)
        tokens, log_probs = oracle.generate_greedy(prompt, 2)
        assert result.tokens == tokens
        np.testing.assert_allclose(result.log_probs, log_probs, rtol=0, atol=TOLERANCE)  # type: ignore[arg-type]
        assert result.num_resumed_tokens == len(stem)


def by_torch(query: Any, cache: Any, rows: Any) -> Any:
    return attention.torch_attention(query, cache, rows, None)


@pytest.mark.disaster(number=8)
@pytest.mark.parametrize("attend", [KernelSet.paged_attention, by_torch], ids=["reference", "torch"])
@pytest.mark.parametrize("before", [4, 16, 48, 300])
def test_attention_of_one_to_three_tokens_behind_a_prefix(attend: Any, before: int) -> None:
    for rows in (*[[(before, tail)] for tail in TAILS], [*((before, tail) for tail in TAILS), (0, 9)]):
        for decodes in ([], [(before, 1)]):
            batch = AttentionBatch(decodes, rows)
            out = batch.real_tokens(attend(batch.query, batch.cache, batch.rows))
            torch.testing.assert_close(out, batch.exact(), rtol=0, atol=1e-12)


@pytest.mark.disaster(number=8)
@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "block"), [(64, 16), (64, 256), (80, 16), (128, 256)])
@pytest.mark.parametrize("before", [16, 256, 1000])
def test_every_attention_provider_of_a_gpu_computes_short_tails(
    before: int, head_dim: int, block: int
) -> None:
    for rows in (*[[(before, tail)] for tail in TAILS], [*((before, tail) for tail in TAILS), (0, 90)]):
        batch = AttentionBatch(
            [], rows, dtype=torch.bfloat16, device="cuda", block=block, sizes=(4, 2, head_dim), unwritten=0.0
        )
        providers = [attention.paged_attention, by_torch]
        for attend in providers:
            out = batch.real_tokens(attend(batch.query, batch.cache, batch.rows))
            torch.testing.assert_close(out.double().cpu(), batch.exact().cpu(), rtol=2e-2, atol=2e-2)


@pytest.mark.disaster(number=8)
@pytest.mark.gpu
@pytest.mark.usefixtures("kind", "one_fla_configuration")
@pytest.mark.parametrize("graphs", [None, 64], ids=["eager", "graphs"])
def test_on_a_gpu_short_tails_are_the_cpus(graphs: int | None) -> None:
    settings: dict[str, Any] = {
        "block_size_tokens": 32, "max_requests": 6, "max_tokens_per_step": 192, "max_sequence_length": 400,
        "num_kv_blocks": 100, "num_mamba_slots": 50,
    }  # fmt: skip
    params = ms.SamplingParams(max_tokens=6, return_log_probs=True)
    stem, model, cpu = (
        random_tokens(96, seed=150),
        tiny_model(torch.float32, "cuda"),
        tiny_model(torch.float32),
    )
    plain = ms.InferenceConfig(**settings | {"enable_prefix_caching": False, "num_mamba_slots": None})
    engine = ms.DynamicInferenceEngine(model, ms.InferenceConfig(**settings, num_cuda_graphs=graphs))
    engine.generate([stem], params)
    prompts, comparison = tails_of(stem, seed=151), Comparison()
    expected = ms.DynamicInferenceEngine(cpu, plain).generate(prompts, params)
    for prompt, other in zip(prompts, expected, strict=True):
        (result,) = engine.generate([prompt], params)
        comparison.add(cpu, prompt, other.tokens, result.tokens)
        assert result.num_resumed_tokens == len(stem)
        assert np.isfinite(result.log_probs).all()


@pytest.mark.disaster(number=8)
@pytest.mark.gpu
@pytest.mark.usefixtures("one_fla_configuration")
@pytest.mark.parametrize("case", MOE)
def test_on_a_gpu_experts_of_few_tokens_give_numbers(case: str) -> None:
    """Bfloat16 experts, which multiply by groups: a cached answer is near the uncached one."""
    settings: dict[str, Any] = {
        "block_size_tokens": 64, "max_requests": 4, "max_tokens_per_step": 256, "max_sequence_length": 512,
        "num_kv_blocks": 40, "num_mamba_slots": 20,
    }  # fmt: skip
    params = ms.SamplingParams(max_tokens=1, return_log_probs=True)
    model = ServedModel(copy.deepcopy(reference_model(case, torch.bfloat16)).to("cuda"))
    plain = ms.InferenceConfig(**settings | {"enable_prefix_caching": False, "num_mamba_slots": None})
    cached, uncached = (
        ms.DynamicInferenceEngine(model, config) for config in (ms.InferenceConfig(**settings), plain)
    )
    stem = [token % 64 for token in random_tokens(128, seed=160)]
    cached.generate([stem], params)
    for tail in TAILS:
        prompt = stem + list(range(3, 3 + tail))
        (result,), (other,) = (engine.generate([prompt], params) for engine in (cached, uncached))
        assert result.num_resumed_tokens == len(stem)
        assert np.isfinite(result.log_probs).all()
        np.testing.assert_allclose(result.log_probs, other.log_probs, atol=0.3)  # type: ignore[arg-type]
