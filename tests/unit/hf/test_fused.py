"""The forwards that replace transformers' own: module by module beside the originals, and what they call."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from mambaslots.hf import served_model as served_model_module
from mambaslots.hf.architectures import ARCHITECTURES
from mambaslots.hf.served_model import ServedModel
from mambaslots.inference.kernels.gpu_kernels import GpuKernelSet
from mambaslots.inference.kernels.kernel_set import KernelSet
from oracle.counting_kernels import POINTWISE, CountingKernels
from oracle.float64_casts import Float64Casts
from oracle.hf_models import CONFIGS, VOCABULARY, reference_logits, relative_error, served_model
from oracle.hf_steps import BLOCK, Steps, texts
from oracle.steps import Row, build_step

UNIT_ROUNDOFF = 2.0**-8
"""Of bfloat16."""


def replaced(model: ServedModel, ending: str) -> list[nn.Module]:
    """The model's modules of the architecture's class with this ending."""
    name = ARCHITECTURES[model.config.model_type].prefix + ending
    return [module for module in model.model.modules() if type(module).__name__ == name]


def inputs_of(module: Any, dtype: torch.dtype) -> Tensor:
    width = next(child for child in module.modules() if isinstance(child, nn.Linear)).in_features
    return torch.randn(1, 5, width, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)


def run(model: ServedModel, module: nn.Module, x: Tensor) -> Tensor:
    with model._step.running(None, KernelSet()):  # type: ignore[arg-type]
        out: Tensor = module(x)
    return out


@pytest.mark.parametrize("case", CONFIGS)
def test_norms(case: str) -> None:
    """In float64 the original's result; in bfloat16 the exact result, rounded once."""
    with Float64Casts():
        model = served_model(case, torch.float64)
        norms = replaced(model, "RMSNorm")
        assert norms
        for norm in norms:
            x = torch.randn(5, len(norm.weight), dtype=torch.float64)
            expected = type(norm).forward(norm, x)
            torch.testing.assert_close(run(model, norm, x), expected, rtol=1e-12, atol=1e-12)
    model = served_model(case, torch.bfloat16)
    for norm in replaced(model, "RMSNorm"):
        x = torch.randn(5, len(norm.weight)).bfloat16()
        found = run(model, norm, x)
        original, norm.weight.data = norm.weight.data, norm.weight.data.double()
        with Float64Casts():
            exact = type(norm).forward(norm, x.double())
        norm.weight.data = original
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.double(), exact, rtol=1.01 * UNIT_ROUNDOFF, atol=1e-7)


@pytest.mark.parametrize("case", [case for case in CONFIGS if case != "mamba2"])
def test_mlps(case: str) -> None:
    model = served_model(case, torch.float64)
    mlps = replaced(model, "MLP")
    assert mlps
    for mlp in mlps:
        assert "forward" in vars(mlp)
        x = inputs_of(mlp, torch.float64)
        expected = type(mlp).forward(mlp, x)
        torch.testing.assert_close(run(model, mlp, x), expected, rtol=1e-12, atol=1e-12)


def test_another_activation_of_nemotron_h_is_left_to_transformers() -> None:
    from transformers.activations import ACT2FN

    model = served_model("nemotron_h dense").model
    assert all("forward" in vars(mlp) for mlp in model.modules() if type(mlp).__name__ == "NemotronHMLP")
    served = served_model("nemotron_h dense")
    plain = type(served.model)(served.config)
    served.config.mlp_hidden_act = plain.config.mlp_hidden_act = "gelu"
    for mlp in plain.modules():
        if type(mlp).__name__ == "NemotronHMLP":
            mlp.act_fn = ACT2FN["gelu"]
    other = ServedModel(plain.requires_grad_(False))
    assert not any("forward" in vars(mlp) for mlp in replaced(other, "MLP"))


def test_a_norm_whose_weight_has_another_dtype_is_left_to_transformers() -> None:
    model = served_model("bamba", torch.bfloat16)
    norm = replaced(model, "RMSNorm")[0]
    norm.weight.data = norm.weight.data.float()
    x = torch.randn(3, len(norm.weight)).bfloat16()
    found = run(model, norm, x)
    assert found.dtype == torch.float32
    assert torch.equal(found, type(norm).forward(norm, x))


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("nemotron_h dense", {"rms_norm": 1, "add_rms_norm": 5, "relu_squared": 2}),
        (
            "qwen3_5",
            {"rms_norm": 1, "add_rms_norm": 6, "silu_mul": 3, "qk_norm_rotary": 1, "sigmoid_mul": 1},
        ),
        ("granitemoehybrid dense", {"rms_norm": 1, "add_rms_norm": 6, "silu_mul": 3, "qk_norm_rotary": 1}),
        ("lfm2", {"rms_norm": 1, "add_rms_norm": 8, "silu_mul": 4, "qk_norm_rotary": 1}),
        ("mamba2", {"rms_norm": 3}),
    ],
)
def test_a_step_calls_each_kernel_as_often_as_there_is_something_to_do(
    case: str, expected: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One norm of the embedding; every other norm adds a branch; one product for the logits."""
    kernels = CountingKernels()
    monkeypatch.setattr(served_model_module, "kernel_set", lambda *_: kernels)
    Steps(served_model(case)).run(Row(range(5), 0, -1, 1, range(4), logits="all"))
    assert kernels.calls == {**expected, "head_product": 1}


@pytest.mark.sampled(case=("nemotron_h dense", "qwen3_5"))
@pytest.mark.parametrize(
    "case", ["nemotron_h dense", "granitemoehybrid dense", "qwen3_5", "lfm2", "falcon_h1"]
)
def test_the_gpus_functions_in_a_served_model(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their launches take the views that the models give them. In Triton's interpreter on a CPU."""
    if torch.cuda.is_available():
        pytest.skip("the interpreter runs where there is no GPU")
    names = {name: getattr(KernelSet, name) for name in dir(KernelSet)}
    kernels = SimpleNamespace(**names | {name: getattr(GpuKernelSet, name) for name in POINTWISE})
    text = texts(VOCABULARY)[1]
    model = served_model(case)
    monkeypatch.setattr(served_model_module, "kernel_set", lambda *_: kernels)
    (logits,) = Steps(model).run(Row(text, 0, -1, 1, range(math.ceil(len(text) / BLOCK)), logits="all"))
    assert relative_error(logits, reference_logits(case, text)) < 1e-4


def test_a_step_that_failed_leaves_nothing_to_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    text = texts(VOCABULARY)[1]
    row = Row(text, 0, -1, 1, range(math.ceil(len(text) / BLOCK)), logits="all")
    steps = Steps(served_model("qwen3_5"))
    with monkeypatch.context() as broken:
        broken.setattr(KernelSet, "silu_mul", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            steps.run(row)
    assert steps.model._step.pending_output is None
    assert relative_error(steps.run(row)[0], reference_logits("qwen3_5", text)) < 1e-4


def test_the_head_is_left_alone_where_it_is_more_than_a_product() -> None:
    head = served_model("qwen3_5").model.lm_head
    assert "forward" in vars(head)
    model = served_model("qwen3_5").model
    del model.lm_head.forward
    model.lm_head.bias = nn.Parameter(torch.zeros(VOCABULARY), requires_grad=False)
    assert "forward" not in vars(ServedModel(model).model.lm_head)


@pytest.mark.parametrize("case", CONFIGS)
def test_the_layers_alone_compute_what_transformers_forward_computes(case: str) -> None:
    """Some logits of a step of two rows; models with more than layers keep transformers' forward."""
    model = served_model(case)
    kept = {"falcon_h1", "granitemoehybrid", "mamba2", "olmo_hybrid"}
    assert (model._stack is None) == (model.config.model_type in kept)
    long, short = texts(VOCABULARY)
    found = {}
    for name in ("stack", "transformers"):
        if name == "transformers":
            model._stack = None
        rows = [Row(text, 0, -1, i, range(10 * i, 10 * i + 10)) for i, text in enumerate((short, long))]
        steps = Steps(model)
        found[name] = model(build_step(steps.spec, steps.pool, steps.kv_cache, BLOCK, rows))
    assert found["stack"].shape == (2, VOCABULARY)
    torch.testing.assert_close(found["stack"], found["transformers"], rtol=0, atol=0)
