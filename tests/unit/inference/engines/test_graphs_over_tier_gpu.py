"""On a GPU, states leave for pinned memory and come back while graphs replay decodes: no bit changes."""

from typing import Any

import mambaslots as ms
import pytest
import torch
from mambaslots.inference.engines.cuda_graphs import CapturedForward
from oracle.drafters import RememberingDrafter
from oracle.serving import random_tokens, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_fla_configuration")]
BLOCK = 32
LENGTH = 12


def engine_of(model: Any, drafter: Any = None, **overrides: Any) -> ms.DynamicInferenceEngine:
    settings = {
        "block_size_tokens": BLOCK, "max_requests": 2, "max_tokens_per_step": 96, "max_sequence_length": 384,
        "num_kv_blocks": 96, "batch_invariant": True,
    }  # fmt: skip
    config = ms.InferenceConfig(**settings | overrides)  # type: ignore[arg-type]
    return ms.DynamicInferenceEngine(model, config, drafter=drafter)


@pytest.mark.parametrize("drafts", [0, 3])
def test_conversations_answer_as_without_cache_and_graphs(
    drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch-invariant engines promise the bits, whatever is cached, captured or drafted."""
    launches = []
    launch = CapturedForward.launch

    def counted(self: CapturedForward) -> torch.Tensor:
        launches.append(self)
        return launch(self)

    monkeypatch.setattr(CapturedForward, "launch", counted)
    model = tiny_model(torch.bfloat16, "cuda")
    uncached = engine_of(model, enable_prefix_caching=False)
    slot_bytes = uncached.context.spec.slot_bytes
    drafter = RememberingDrafter() if drafts else None
    tiered = engine_of(
        model, drafter, num_mamba_slots=1, num_cuda_graphs=16, num_speculative_tokens=drafts,
        host_cache_gb=64 * slot_bytes / (1 << 30),
    )  # fmt: skip
    params = ms.SamplingParams(max_tokens=LENGTH, return_log_probs=True)
    texts = [random_tokens(70, seed) for seed in range(4)]
    for turn in range(3):
        answers = uncached.generate(texts, params)
        if drafter is not None:  # right drafts for half of the texts, wrong ones for the others
            pairs = list(zip(texts, answers, strict=True))
            drafter.sequences = [[*text, *answer.tokens] for text, answer in pairs[::2]]
        results = tiered.generate(texts, params)
        tiered.check_integrity()
        for index, (text, result, answer) in enumerate(zip(texts, results, answers, strict=True)):
            assert (result.tokens, result.log_probs) == (answer.tokens, answer.log_probs)
            texts[index] = [*text, *result.tokens, *random_tokens(9, 10 * turn + index)]
    stats = tiered.stats()
    assert stats.cache.tiers.num_host_states > 4
    assert stats.cache.tiers.num_states_fetched > 2
    assert stats.cache.num_resumed_tokens > 0
    assert 0 < stats.speculation.num_accepted < stats.speculation.num_drafted or not drafts
    assert len(launches) > 20
