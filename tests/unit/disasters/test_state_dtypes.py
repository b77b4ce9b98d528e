"""States were stored in the dtype of activations though their pool is float32: a hit was not a miss."""

from types import ModuleType
from typing import Any

import mambaslots as ms
import pytest
import torch
from mambaslots.inference.kernels.kernel_set import KernelSet
from mambaslots.models import hybrid_lm
from oracle.cached_states import cached_prefixes, stored_state
from oracle.model_kinds import kind_of_model
from oracle.serving import random_tokens, small_config
from torch import Tensor

BLOCK = 8
SCANS = {"ssm": "M*-M", "delta": "G*-G"}
"""The state of each scan, and the layers of a model that has no other."""


class Inputs:
    """Notes the operands of every scan and update of one sequence, by layer, and computes them."""

    def __init__(self, kernels: ModuleType, layers: int) -> None:
        self._kernels, self._layers = kernels, layers
        self.operands: list[list[tuple[Tensor, ...]]] = [[] for _ in range(layers)]
        self._calls = 0

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._kernels, name)
        scans = (
            "ssd_chunk_scan",
            "selective_state_update",
            "gated_delta_rule_scan",
            "gated_delta_rule_update",
        )
        if name not in scans:
            return function

        def noting(*args: Any, **named: Any) -> Any:
            per_token = [arg.flatten(0, 1) if "update" in name and arg.dim() > 1 else arg for arg in args[:6]]
            self.operands[self._calls % self._layers].append(tuple(arg.double() for arg in per_token))
            self._calls += 1
            return function(*args, **named)

        return noting

    def states_after(self, name: str, layer: int, length: int) -> Tensor:
        """The recurrence in float64 over the operands as the kernel got them, of the first tokens."""
        parts = self.operands[layer]
        if name == "ssm":
            x, dt, B = (torch.cat([part[i] for part in parts])[:length] for i in (0, 1, 3))
            A = parts[0][2]
            heads = x.shape[1]
            state = torch.zeros(heads, x.shape[2], B.shape[2], dtype=torch.float64)
            for t in range(length):
                b = B[t].repeat_interleave(heads // B.shape[1], dim=0)
                state = state * (dt[t] * A).exp()[:, None, None]
                state += (dt[t, :, None] * x[t])[:, :, None] * b[:, None, :]
            return state
        _, k, v, g, beta = (torch.cat([part[i] for part in parts])[:length] for i in range(5))
        k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        k = k.repeat_interleave(v.shape[1] // k.shape[1], dim=1)
        state = torch.zeros(v.shape[1], k.shape[2], v.shape[2], dtype=torch.float64)
        for t in range(length):
            state = state * g[t].exp()[:, None, None]
            error = beta[t][:, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], state))
            state = state + k[t][:, :, None] * error[:, None, :]
        return state


@pytest.mark.disaster(number=7)
@pytest.mark.sampled
@pytest.mark.parametrize("name", list(SCANS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cached_state_of_a_16_bit_model_is_the_float32_accumulator(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stored inside a prefill, at its end and by a decode; operands are those that kernels were given."""
    model = ms.models.HybridLM(small_config(dtype=dtype, pattern=SCANS[name]), seed=3)
    layers = SCANS[name].count(SCANS[name][0])
    inputs = Inputs(KernelSet(), layers)
    monkeypatch.setattr(hybrid_lm, "kernel_set", lambda device, of: inputs)
    config = ms.InferenceConfig(
        block_size_tokens=BLOCK, max_requests=1, max_tokens_per_step=16, max_sequence_length=64,
        num_kv_blocks=16,
        num_mamba_slots=8, checkpoint_plan=ms.CheckpointPlan.every_block(BLOCK),
    )  # fmt: skip
    engine = ms.DynamicInferenceEngine(model, config)
    prompt = random_tokens(35, seed=100)
    (result,) = engine.generate([prompt], ms.SamplingParams(max_tokens=10))
    lengths = []
    for slot, tokens in cached_prefixes(engine.context).items():
        assert list(tokens) == [*prompt, *result.tokens][: len(tokens)]
        stored = stored_state(engine.context, slot)[name]
        assert stored.dtype == torch.float32
        assert (stored.to(dtype).float() != stored).float().mean() > 0.9, "states are rounded"
        for layer in range(layers):
            expected = inputs.states_after(name, layer, len(tokens))
            error = (stored[layer].double() - expected).abs().max() / expected.abs().max()
            assert error < 2e-6, f"{name} of layer {layer} after {len(tokens)} tokens"
        lengths.append(len(tokens))
    assert sorted(lengths) == [8, 16, 24, 32, 40]


@pytest.mark.disaster(number=7)
@pytest.mark.parametrize("kind", ["Mamba-2", "delta net", "mix of all"])
def test_a_hit_reads_the_bits_that_a_miss_has_in_its_live_slot(kind: str) -> None:
    """A request goes on from a boundary's state: once as its own, once as another's that it resumes from."""
    with kind_of_model(kind):
        model = ms.models.HybridLM(small_config(dtype=torch.bfloat16), seed=3)
        read: list[tuple[Tensor, ...]] = []

        class Reading:
            state_spec = staticmethod(model.state_spec)

            def __call__(self, inputs: ms.StepInputs) -> Tensor:
                (source,) = inputs.state_sources.tolist()
                if source >= 0 and int(inputs.positions[0]) == 2 * BLOCK:
                    read.append(tuple(t[:, source].clone() for t in inputs.state_pool.tensors))
                return model(inputs)

        config = ms.InferenceConfig(
            block_size_tokens=BLOCK, max_requests=1, max_tokens_per_step=2 * BLOCK, max_sequence_length=64,
            num_kv_blocks=16, num_mamba_slots=8,
        )  # fmt: skip
        engine = ms.DynamicInferenceEngine(Reading(), config)
        params = ms.SamplingParams(max_tokens=3, return_log_probs=True)
        first, second = (engine.generate([random_tokens(20, seed=101)], params)[0] for _ in range(2))
        assert second.num_resumed_tokens == 2 * BLOCK
        assert len(read) == 2
        assert all(torch.equal(*both) for both in zip(*read, strict=True))
        assert (first.tokens, first.log_probs) == (second.tokens, second.log_probs)
