"""What surrounds our kernels does not synchronise: steps of fake tensors on a GPU.

Fake tensors have a shape, a dtype and a device, and no data. An operation whose result depends on data that
the host must read raises an error, on a machine without a GPU, too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from mambaslots.hf import served_model as served_model_module
from mambaslots.hf.served_model import ServedModel
from mambaslots.inference.contexts.step_inputs import StepInputs
from mambaslots.inference.kernels.kernel_set import KernelSet
from oracle.hf_models import CONFIGS, VOCABULARY, served_model
from oracle.hf_steps import BLOCK, Steps
from oracle.steps import Row, build_step
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

DEVICE = "cuda:0"


@pytest.mark.sampled(case=("nemotron_h MoE", "falcon_h1", "mamba2", "lfm2", "qwen3_5_moe", "olmo_hybrid"))
def test_a_step_on_a_gpu_reads_nothing_back(case: str) -> None:
    """Attention, mixers, experts, rotary positions and the choice of logits, in bfloat16."""
    model = served_model(case, torch.bfloat16)
    inputs = _step(model)
    with _fake_gpu(model):
        logits = model(_moved(inputs))
    assert logits.shape == (2, VOCABULARY)
    assert (str(logits.device), logits.dtype) == (DEVICE, torch.float32)


def test_other_experts_would_synchronise() -> None:
    """The test above sees what it is to see."""
    model = served_model("qwen3_5_moe", torch.bfloat16)
    model.model.set_experts_implementation("eager")
    inputs = _step(model)
    with (
        _fake_gpu(model),
        pytest.raises((DataDependentOutputException, DynamicOutputShapeException)),
    ):
        model(_moved(inputs))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", CONFIGS)


def _step(model: ServedModel) -> StepInputs:
    """A decode row, and a prefill row with a checkpoint."""
    steps = Steps(model)
    checkpoints = {BLOCK: 3} if steps.spec.chunk_size in (None, BLOCK) else {}
    decode = Row([5], 11, 2, 2, range(10), decode=True)
    prefill = Row(range(20), 0, -1, 1, range(10, 20), checkpoints=checkpoints)
    inputs = build_step(steps.spec, steps.pool, steps.kv_cache, BLOCK, [decode, prefill])
    return replace(inputs, state_pool={state.name: steps.pool[state.name] for state in steps.spec.states})


@contextmanager
def _fake_gpu(model: ServedModel) -> Iterator[None]:
    """Every tensor is fake meanwhile; the model's lie on a GPU."""
    kernels = SimpleNamespace(
        compute_dtype=KernelSet.compute_dtype,
        rms_norm=KernelSet.rms_norm, add_rms_norm=KernelSet.add_rms_norm,
        relu_squared=KernelSet.relu_squared, silu_mul=KernelSet.silu_mul,
        sigmoid_mul=KernelSet.sigmoid_mul, qk_norm_rotary=KernelSet.qk_norm_rotary,
        head_product=KernelSet.head_product,
        causal_conv1d_prefill=_like_first, causal_conv1d_update=_like_first,
        ssd_chunk_scan=_like_first, selective_state_update=_like_first,
        time_steps=_time_steps, delta_gates=_delta_gates,
        gate_then_rms_norm=_like_first, rms_norm_then_gate=_like_first,
        gated_delta_rule_scan=_like_values, gated_delta_rule_update=_like_values,
        write_kv=lambda *args: None, paged_attention=lambda query, *args, **kwargs: query,
    )  # fmt: skip
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        mock.patch.object(served_model_module, "kernel_set", return_value=kernels),
        mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)),
    ):
        for module in model.model.modules():
            for tensors in (module._parameters, module._buffers):
                tensors.update({name: _moved(tensor) for name, tensor in tensors.items()})
        yield


def _like_first(first: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.empty(first.shape, dtype=first.dtype, device=first.device)


def _time_steps(dt: Tensor, dt_bias: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return dt.float(), dt_bias.float()


def _delta_gates(a: Tensor, b: Tensor, *args: Any, doubled: bool) -> tuple[Tensor, Tensor]:
    return a.flatten(1).float(), b.flatten(1).float()


def _like_values(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Tensor:
    return _like_first(v)


def _moved(value: Any) -> Any:
    """`value` with its tensors on the fake GPU."""
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device=DEVICE)
    if isinstance(value, dict):
        return {name: _moved(item) for name, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _moved(getattr(value, field.name)) for field in fields(value)})
    return value
