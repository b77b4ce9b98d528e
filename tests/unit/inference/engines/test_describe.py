"""`describe` says what serves a model."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mambaslots.inference.kernels import attention
from mambaslots.inference.kernels.gpu_kernels import GpuKernelSet
from oracle.serving import small_engine, tiny_model


@pytest.mark.usefixtures("kind")
def test_on_a_cpu() -> None:
    device, kernels, graphs, steps, decodes, evicted, promise = small_engine().describe().splitlines()
    assert device == "device: cpu (no GPU), KV in float64"
    assert kernels == "attention, scans and norms: torch operations in float64"
    assert graphs.startswith("CUDA graphs: none")
    assert steps == "decode steps: wait for the tokens of the step before, because of a CPU"
    assert decodes == "decodes: update a state at each token"
    assert evicted.startswith("evicted states: ")
    assert promise.startswith("batch invariance: off, because the model is on cpu")
    replaying = small_engine(decode_by_replay=True)
    chunk = replaying.context.spec.chunk_tokens(replaying.config.block_size_tokens)
    assert f"replay the inputs since the last multiple of {chunk} tokens" in replaying.describe()


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"async_scheduling": True}, "launched before the tokens of the step before are read"),
        ({"async_scheduling": False}, "because of async_scheduling"),
        ({"num_speculative_tokens": 2}, "because of num_speculative_tokens"),
    ],
)
def test_how_steps_are_launched(setting: dict[str, object], said: str) -> None:
    assert said in small_engine(**setting).describe().splitlines()[-4]


def test_what_a_gpu_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: of the kernels of a GPU, for a spec that says it is on one."""
    spec: Any = SimpleNamespace(
        num_attention_layers=1, head_dim=64, kv_dtype=torch.bfloat16, device=torch.device("cuda")
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    attention.flash_rejection.cache_clear()
    (line,) = GpuKernelSet.describe(spec)
    attention.flash_rejection.cache_clear()
    assert "FlashAttention-3 needs compute capability 9.0, this GPU has 8.0" in line


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    model = tiny_model(torch.bfloat16, "cuda")  # whose chunks the kernels of a GPU take
    said = small_engine(model=model, block_size_tokens=64, num_cuda_graphs=4).describe()
    assert "KV in bfloat16" in said
    assert "0 captured; at most 4 of decodes" in said
    assert "launched before the tokens of the step before are read\n" in said
