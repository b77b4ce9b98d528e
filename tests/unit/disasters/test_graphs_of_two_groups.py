"""Two kinds of states in one captured graph: the index tensors of the second kind were never updated."""

from collections.abc import Sequence
from typing import Any

import mambaslots as ms
import pytest
import torch
from mambaslots.inference.contexts.step_inputs import INDEX_FIELDS, StepInputs
from oracle.cached_states import assert_cached_states
from oracle.float32_rule import Comparison
from oracle.model_kinds import kind_of_model
from oracle.recorded_graphs import Recorded, graphed_engine, recording
from oracle.serving import assert_answers, random_tokens, tiny_model
from torch import Tensor

TWO_GROUPS = ["mix of all", "no attention"]
"""Kinds of models with two kinds of states, on grids of their own."""
PROMPTS = [random_tokens(length, seed=90 + length) for length in (20, 21, 44)]
PARAMS = ms.SamplingParams(max_tokens=20, return_log_probs=True)


def index_tensors(inputs: StepInputs) -> dict[str, Tensor]:
    """All that a captured step reads which another step writes anew, and the pools."""
    found = {"KV": inputs.kv_cache, "states": inputs.state_pool.memory}
    for field in INDEX_FIELDS:
        owner = getattr(inputs, field.owner) if field.owner else inputs
        if owner is not None:
            found[field.key] = getattr(owner, field.name)
    return found


class LastInputs:
    """Observes a context: the inputs of its step under way."""

    def __init__(self, engine: ms.DynamicInferenceEngine) -> None:
        self.inputs: StepInputs | None = None
        engine.context.observers.append(self)

    def step_begun(self, steps: Sequence[object], inputs: StepInputs) -> None:
        self.inputs = inputs

    def step_ended(self, steps: Sequence[object]) -> None:
        """Nothing is to be done."""


def serve_by_turns(
    engine: ms.DynamicInferenceEngine, prompts: Sequence[list[int]], params: ms.SamplingParams = PARAMS
) -> list[ms.RequestResult]:
    """Pairs of requests, one pair after another; steps of one shape find other blocks and slots each time."""
    results: list[ms.RequestResult] = []
    for number in range(len(prompts)):
        results += engine.generate([prompts[number], prompts[number - 1]], params)
    return results


@pytest.mark.disaster(number=9)
@pytest.mark.sampled
@pytest.mark.parametrize("settings", [{}, {"decode_by_replay": True}], ids=["", "replay"])
@pytest.mark.parametrize("kind", TWO_GROUPS)
def test_a_graph_of_two_groups_reads_the_tables_of_the_step_that_launches_it(
    kind: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stands in the place of graphs reads the tensors that it was captured with, at every launch."""
    with kind_of_model(kind):
        graphs = recording(monkeypatch)
        engine = graphed_engine(**settings)
        last, launches, tables = LastInputs(engine), 0, set()
        plain_launch = Recorded.launch

        def launch(self: Recorded) -> Tensor:
            nonlocal launches
            assert last.inputs is not None
            captured, present = index_tensors(self._inputs), index_tensors(last.inputs)
            assert captured.keys() == present.keys()
            for name, tensor in captured.items():
                assert tensor.data_ptr() == present[name].data_ptr(), f"{name} lies somewhere else"
                assert torch.equal(tensor, present[name]) or tensor.is_floating_point()
            tables.add(tuple(captured["block_table"].flatten().tolist()))
            launches += 1
            return plain_launch(self)

        monkeypatch.setattr(Recorded, "launch", launch)
        for _ in range(2):
            for number, result in enumerate(serve_by_turns(engine, PROMPTS)):
                assert_answers(PROMPTS[number // 2 - number % 2], result)
            assert_cached_states(engine.context)
        assert engine.context.cache_stats().num_resumed_tokens > 0
        assert launches > 3 * graphs.captures > 0  # type: ignore[attr-defined]
        assert len(tables) > graphs.captures  # type: ignore[attr-defined]


@pytest.mark.disaster(number=9)
@pytest.mark.gpu
@pytest.mark.usefixtures("one_fla_configuration")
@pytest.mark.parametrize("settings", [{}, {"decode_by_replay": True}], ids=["", "replay"])
@pytest.mark.parametrize("kind", TWO_GROUPS)
def test_so_it_is_on_a_gpu(kind: str, settings: dict[str, Any]) -> None:
    prompts = [random_tokens(length, seed=95 + length) for length in (80, 81, 170)]
    with kind_of_model(kind):
        config: dict[str, Any] = {
            "block_size_tokens": 32, "max_requests": 4, "max_tokens_per_step": 192,
            "max_sequence_length": 400,
            "num_kv_blocks": 100, "num_mamba_slots": 50,
        }  # fmt: skip
        model, cpu = tiny_model(torch.float32, "cuda"), tiny_model(torch.float32)
        plain = ms.InferenceConfig(**config | {"enable_prefix_caching": False, "num_mamba_slots": None})
        expected = ms.DynamicInferenceEngine(cpu, plain).generate(prompts, PARAMS)
        engine = ms.DynamicInferenceEngine(
            model, ms.InferenceConfig(**config, **settings, num_cuda_graphs=64)
        )
        comparison = Comparison()
        for _ in range(2):
            for number, result in enumerate(serve_by_turns(engine, prompts)):
                at = number // 2 - number % 2
                comparison.add(model, prompts[at], expected[at].tokens, result.tokens)
            assert assert_cached_states(engine.context, cpu, atol=2e-3, rtol=2e-3) > 0
        assert engine.context.cache_stats().num_resumed_tokens > 0
        assert engine.core.step_runner.graphs.shapes
