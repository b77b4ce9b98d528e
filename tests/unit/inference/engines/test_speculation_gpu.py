"""Drafts on a GPU: by graph or eagerly, nothing waits but for its tokens."""

import mambaslots as ms
import pytest
import torch
from oracle.drafters import RememberingDrafter
from oracle.serving import random_tokens, tiny_model
from oracle.synchronisation import no_synchronisation

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kind", "one_fla_configuration")]
PROMPTS = [random_tokens(length, length) for length in (33, 100, 64, 5)]


@pytest.mark.parametrize("graphs", [None, 32], ids=["eager", "graphs"])
def test_drafted_steps_do_not_synchronise_and_repeat_themselves(graphs):
    memory = RememberingDrafter()
    config = ms.InferenceConfig(
        block_size_tokens=32, max_requests=4, max_tokens_per_step=192, max_sequence_length=400,
        num_kv_blocks=100,
        num_mamba_slots=50, num_cuda_graphs=graphs, num_speculative_tokens=3,
    )  # fmt: skip
    engine = ms.DynamicInferenceEngine(tiny_model(torch.float32, "cuda"), config, drafter=memory)
    params = ms.SamplingParams(max_tokens=70)

    def answers() -> list[list[int]]:
        engine.reset_prefix_cache()
        return [result.tokens for result in engine.generate(PROMPTS, params)]

    first = answers()
    memory.sequences = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, first, strict=True)]
    second = answers()  # captures the shapes that accepted drafts make
    before = engine.stats().speculation
    with no_synchronisation():
        third = answers()
    engine.context.check_integrity()
    assert third == second
    accepted = engine.stats().speculation.num_accepted - before.num_accepted
    assert accepted > 100
    if graphs:
        assert {shape.decode_tokens for shape in engine.core.step_runner.graphs.shapes} == {1, 4}
