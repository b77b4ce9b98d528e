"""A model split over GPUs: the fused kernels, nccl, and graphs that hold its collectives."""

import copy
from collections import deque

import mambaslots as ms
import pytest
import torch
from mambaslots.inference.contexts.step_inputs import Model
from oracle.distributed_world import SPLITS, World, splits
from oracle.float32_rule import Comparison
from oracle.led_ranks import begin, fail_in, present
from oracle.serving import random_tokens

pytestmark = pytest.mark.gpu
GREEDY = ms.SamplingParams(max_tokens=40, return_log_probs=True)
SHARED = random_tokens(70, 1)
PROMPTS = [
    *([*SHARED, *tail] for tail in ([1], [2, 3], random_tokens(90, 2))),
    *(random_tokens(length, length) for length in (5, 33, 64, 130, 200)),
]


def model_of(
    world: World, split: str | None, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> ms.models.HybridLM:
    groups = None if split is None else world.groups(*SPLITS[split])
    model = ms.models.HybridLM(ms.models.HybridConfig.tiny(dtype), seed=3, groups=groups)
    return model.to(device or world.device)


def engine_of(
    model: Model, graphs: int | None = None, block_size_tokens: int = 32
) -> ms.DynamicInferenceEngine:
    config = ms.InferenceConfig(
        block_size_tokens=block_size_tokens, max_requests=6, max_tokens_per_step=192, max_sequence_length=400,
        num_kv_blocks=100, num_mamba_slots=50, num_cuda_graphs=graphs,
    )  # fmt: skip
    return ms.DynamicInferenceEngine(model, config)


@pytest.mark.parametrize("split", splits())
@pytest.mark.parametrize("graphs", [None, 64], ids=["eager", "graphs"])
def test_tokens_are_the_cpus_by_the_rule_of_float32(world: World, split: str, graphs: int | None) -> None:
    whole = model_of(world, None, device=torch.device("cpu"))
    expected = engine_of(whole).generate(PROMPTS, GREEDY)
    engine = engine_of(model_of(world, split), graphs)
    comparison = Comparison()
    for _ in range(2):  # the second time with all that the first left in the cache
        for prompt, result, other in zip(PROMPTS, engine.generate(PROMPTS, GREEDY), expected, strict=True):
            comparison.add(whole, prompt, other.tokens, result.tokens)
    assert engine.context.cache_stats().num_resumed_tokens
    assert not graphs or len(engine.core.step_runner.graphs.shapes) > 3
    stats = world.gathered(engine.context.cache_stats())
    assert all(each == stats[0] for each in stats)
    print(f"{split}: {comparison.same} answers the same, {comparison.ties} parted at a tie")


@pytest.mark.parametrize("split", splits())
def test_ranks_generate_the_same_tokens_in_bfloat16_with_graphs(world: World, split: str) -> None:
    check_ranks(world, engine_of(model_of(world, split, torch.bfloat16), graphs=64), PROMPTS)


def check_ranks(world: World, engine: ms.DynamicInferenceEngine, prompts: list[list[int]]) -> None:
    """All ranks give the same greedy and sampled answers, through captured graphs."""
    params = [
        ms.SamplingParams(max_tokens=40, temperature=None if seed % 2 else 1.0, seed=seed)
        for seed in range(len(prompts))
    ]
    answers = [[result.tokens for result in engine.generate(prompts, params)] for _ in range(2)]
    of_ranks = world.gathered(answers)
    assert all(each == of_ranks[0] for each in of_ranks)
    assert len(engine.core.step_runner.graphs.shapes) > 3


@pytest.mark.parametrize("split", splits())
def test_a_step_that_fails_on_one_rank_ends_where_graphs_hold_collectives(
    world: World, split: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group can be aborted while its collectives run in a graph, and the engine goes on after `reset`."""

    def lead() -> None:
        engine = engine_of(present().model, graphs=64)
        before = [[result.tokens for result in engine.generate(PROMPTS, GREEDY)] for _ in range(2)]
        assert len(engine.core.step_runner.graphs.shapes) > 3
        for prompt in PROMPTS[:3]:
            engine.add_request(prompt, GREEDY)
        engine.step()
        engine.call_on_all(fail_in, [1], "SampledStep")
        with pytest.raises(RuntimeError, match="rank 1 raised InjectedError: on rank 1"):
            deque((engine.step() for _ in range(2)), 0)
        engine.reset()
        after = [[result.tokens for result in engine.generate(PROMPTS, GREEDY)] for _ in range(2)]
        assert after == before

    begin(world, split, monkeypatch, model_of(world, split))
    present().run(lead)


# ---- models of transformers

CASES = ["granitemoehybrid MoE", "qwen3_next", "qwen3_5_moe", "lfm2"]
"""Of each kind of state, and experts with each."""


@pytest.mark.parametrize("split", splits("tp 2", "tp 4"))
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers_in_float32(world: World, split: str, case: str) -> None:
    pytest.importorskip("transformers")
    from mambaslots.hf import ServedModel
    from oracle.hf_models import VOCABULARY, reference_logits, reference_model
    from oracle.hf_steps import step_errors, texts

    both = texts(VOCABULARY)
    expected = tuple(reference_logits(case, text).to(world.device) for text in both)
    model = ServedModel(copy.deepcopy(reference_model(case)).to(world.device), world.groups(*SPLITS[split]))
    errors, without_state = step_errors(model, both, expected)
    assert max(errors.values()) < 1e-4, errors
    assert without_state > 1e-3
    print(f"{case} over {split}: largest error {max(errors.values()):.1e}")


@pytest.mark.parametrize("split", splits("tp 2", "tp 4"))
@pytest.mark.parametrize("case", CASES)
def test_ranks_of_a_model_of_transformers_agree(world: World, split: str, case: str) -> None:
    """In bfloat16, with graphs that hold the sums of experts and layers."""
    pytest.importorskip("transformers")
    from mambaslots.hf import ServedModel
    from oracle.hf_models import VOCABULARY, reference_model

    whole = copy.deepcopy(reference_model(case, torch.bfloat16)).to(world.device)
    model = ServedModel(whole, world.groups(*SPLITS[split]))
    prompts = [[token % VOCABULARY for token in prompt] for prompt in PROMPTS]
    check_ranks(world, engine_of(model, graphs=64, block_size_tokens=64), prompts)
