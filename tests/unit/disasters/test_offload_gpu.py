"""Copies to and from host memory on a GPU whose copy stream sleeps before each of them."""

from typing import Any

import mambaslots as ms
import pytest
import torch
from mambaslots.inference.contexts.tier_copies import HostCopies
from oracle.serving import random_tokens, tiny_model

pytestmark = pytest.mark.gpu


def test_copies_that_sleep_in_both_directions_change_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots are used again meanwhile; answers and hits are those of a pool that evicts nothing."""
    keep, bring = HostCopies._copy_to_host, HostCopies._copy_back

    def slept(real: Any) -> Any:
        def call(*arguments: Any) -> Any:
            torch.cuda._sleep(20_000_000)
            return real(*arguments)

        return call

    monkeypatch.setattr(HostCopies, "_copy_to_host", slept(keep))
    monkeypatch.setattr(HostCopies, "_copy_back", slept(bring))
    model = tiny_model(torch.float32, "cuda")
    texts = [random_tokens(150, seed) for seed in range(6)]
    found = []
    for num_slots, num_host in ((64, 0), (2, 60)):
        config = ms.InferenceConfig(
            block_size_tokens=64, max_requests=2, max_tokens_per_step=256, max_sequence_length=512,
            num_kv_blocks=64,
            num_mamba_slots=num_slots,
            host_cache_gb=num_host * model.state_spec().slot_bytes / (1 << 30),
        )  # fmt: skip
        engine = ms.DynamicInferenceEngine(model, config)
        params = ms.SamplingParams(max_tokens=4, return_log_probs=True)
        results = [engine.generate([[*text, turn]], params)[0] for turn in range(3) for text in texts]
        engine.check_integrity()
        found.append([(result.tokens, result.num_resumed_tokens) for result in results])
    assert found[0] == found[1]
    assert engine.stats().cache.tiers.num_states_fetched > 0
    assert engine.stats().cache.tiers.num_copies_damaged == 0
