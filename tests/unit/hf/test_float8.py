"""Block-scaled FP8 checkpoints load as the product of element and scale; other quantisations are refused."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from mambaslots import hf
from mambaslots.hf.weight_files import dequantize
from oracle.hf_folders import change_config, quantize, rewrite, save_model
from oracle.hf_models import reference_model

MOE = "qwen3_5_moe"
BLOCKS = (16, 12)  # neither divides all sizes of the model
HEAD = "lm_head.weight"
PROJECTION = "model.layers.1.self_attn.q_proj.weight"

Tensors = dict[str, Tensor]


def is_quantized(name: str) -> bool:
    return "proj" in name and name.endswith("weight") and "in_proj_b" not in name


def save_float8(folder: Path, merged: bool = False) -> Tensors:
    """Save a model in FP8; returns the float64 value of every quantised weight."""
    save_model(MOE, folder)
    generator = torch.Generator().manual_seed(0)
    expected = {}

    def change(tensors: Tensors) -> None:
        if merged:
            for name in [name for name in tensors if ".experts." in name]:
                del tensors[name]
            state = reference_model(MOE).state_dict()
            tensors |= {name: value.clone() for name, value in state.items() if ".experts." in name}
        for name in list(tensors):
            if is_quantized(name) or (merged and ".experts." in name):
                stored, scales, value = quantize(tensors[name], BLOCKS, generator)
                tensors[name], tensors[name + "_scale_inv"], expected[name] = stored, scales, value

    rewrite(folder, change)
    change_config(folder, quantization_config={
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": BLOCKS,
        "modules_to_not_convert": ["lm_head"],
    })  # fmt: skip
    return expected


def with_merged_experts(weights: Tensors) -> Tensors:
    """The weights under the model's names, where each layer's experts are one tensor."""
    merged = {name: value for name, value in weights.items() if ".experts." not in name}
    for layer in range(3):
        experts = f"model.layers.{layer}.mlp.experts"
        gates, ups, downs = (
            torch.stack([weights[f"{experts}.{i}.{part}_proj.weight"] for i in range(4)])
            for part in ("gate", "up", "down")
        )
        merged |= {f"{experts}.gate_up_proj": torch.cat([gates, ups], 1), f"{experts}.down_proj": downs}
    return merged


@pytest.mark.parametrize("merged", [False, True], ids=["one tensor an expert", "merged experts"])
def test_weights_are_elements_times_scales(
    merged: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = save_float8(tmp_path, merged)
    expected = saved if merged else with_merged_experts(saved)
    plain = reference_model(MOE).state_dict()
    with caplog.at_level(logging.INFO, "mambaslots.hf"):
        loaded: Any = hf.load(tmp_path, dtype=torch.float64)
    for name, weight in loaded.model.state_dict().items():
        assert weight.dtype == torch.float64
        assert torch.equal(weight, expected[name] if name in expected else plain[name].double()), name
    assert len(expected) > 10
    (record,) = caplog.records
    assert record.getMessage().endswith(": FP8 in blocks of 16 x 12, loaded as torch.float64")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_narrower_weights_are_the_nearest(dtype: torch.dtype, tmp_path: Path) -> None:
    expected = with_merged_experts(save_float8(tmp_path))
    state: Tensors = hf.load(tmp_path, dtype=dtype).model.state_dict()
    for name, value in expected.items():
        ulp = torch.finfo(dtype).eps * value.abs()
        assert ((state[name].double() - value).abs() <= 0.51 * ulp).all(), name


@pytest.mark.parametrize("shape", [(130, 257), (1, 1), (128, 128), (3, 40, 300), (300, 5)])
def test_blocks_need_not_divide_the_weight(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside numpy, element by element; in steps of few rows."""
    monkeypatch.setattr("mambaslots.hf.weight_files._STEP_ELEMENTS", 1)
    generator = torch.Generator().manual_seed(1)
    blocks = (128, 128)
    stored, scales, _ = quantize(torch.randn(shape, generator=generator), blocks, generator)
    expected = stored.float().numpy().astype(np.float64)
    for index in np.ndindex(shape):
        *before, row, column = index
        expected[index] *= float(scales[(*before, row // 128, column // 128)])
    got = dequantize(stored, scales, blocks, torch.float64)
    assert np.array_equal(got.numpy(), expected)


def test_scales_may_be_powers_of_two() -> None:
    stored = torch.full((4, 4), 2.0).to(torch.float8_e4m3fn)
    scales = torch.tensor([[0.25, 8.0]]).to(torch.float8_e8m0fnu)
    got = dequantize(stored, scales, (4, 2), torch.bfloat16)
    assert got.tolist() == [[0.5, 0.5, 16.0, 16.0]] * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.pop(PROJECTION + "_scale_inv"),
            rf"{PROJECTION} is stored in float8_e4m3fn, and {PROJECTION}_scale_inv is missing",
        ),
        (lambda tensors: tensors.pop(PROJECTION), rf"{PROJECTION}_scale_inv has no weight: {PROJECTION} is"),
        (
            lambda tensors: tensors.update({PROJECTION: torch.ones(tensors[PROJECTION].shape)}),
            rf"{PROJECTION} is stored in torch.float32 with {PROJECTION}_scale_inv",
        ),
        (
            lambda tensors: tensors.update({HEAD: tensors[HEAD].to(torch.float8_e5m2)}),
            rf"{HEAD} of the folder has the dtype torch.float8_e5m2; accepted: torch.float16, ",
        ),
        (
            lambda tensors: tensors.update({PROJECTION + "_scale_inv": torch.ones(2, 2)}),
            rf"{PROJECTION}_scale_inv is torch.float32, \(2, 2\); accepted for {PROJECTION}",
        ),
        (
            lambda tensors: tensors.update({
                PROJECTION + "_scale_inv": tensors[PROJECTION + "_scale_inv"].to(torch.int32)
            }),
            rf"{PROJECTION}_scale_inv is torch.int32",
        ),
        (
            lambda tensors: tensors.update({
                HEAD: torch.ones(97).to(torch.float8_e4m3fn), HEAD + "_scale_inv": torch.ones(1)
            }),
            rf"{HEAD}_scale_inv is torch.float32, \(1,\)",
        ),
    ],
    ids=["no scales", "no weight", "no FP8", "other FP8", "shape", "dtype", "vector"],
)  # fmt: skip
def test_scales_that_do_not_fit(change: Callable[[Tensors], object], message: str, tmp_path: Path) -> None:
    save_float8(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(hf.ModelFolderError, match=message):
        hf.load(tmp_path)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "'gptq'"),
        ({"quant_method": "awq"}, "'awq'"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "'compressed-tensors'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'"),
        ({"load_in_8bit": True}, "quantised by None"),
        ({"quant_method": "mxfp4"}, "'mxfp4'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "'modelopt'"),
        ({"quant_method": "fbgemm_fp8"}, "'fbgemm_fp8'"),
        ({"bits": 4}, "quantised by None"),
        ({"quant_method": "fp8"}, "weight_block_size is None; accepted: two positive integers"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size is \[128\]"),
        ({"quant_method": "fp8", "weight_block_size": [0, 1]}, r"weight_block_size is \[0, 1\]"),
        ({"quant_method": "fp8", "weight_block_size": [8, 8], "expert_dtype": "fp4"}, "experts in 'fp4'"),
        ("fp8", "config.json: quantization_config is 'fp8'; accepted: an object"),
        ([], r"config.json: quantization_config is \[\]; accepted: an object"),
    ],
)
@pytest.mark.parametrize("place", ["config", "text_config"])
def test_other_quantisations_are_refused_by_name(
    quantization: object, message: str, place: str, tmp_path: Path
) -> None:
    save_model("lfm2", tmp_path)
    found = {"quantization_config": quantization}
    change_config(tmp_path, **(found if place == "config" else {"text_config": found}))
    with pytest.raises(hf.ModelFolderError, match=message):
        hf.load(tmp_path)


def test_float8_weights_that_the_config_does_not_know_are_refused(tmp_path: Path) -> None:
    save_float8(tmp_path)
    change_config(tmp_path, quantization_config=None)
    with pytest.raises(hf.ModelFolderError, match="scale_inv"):
        hf.load(tmp_path)


def test_scales_of_activations_are_named_and_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_float8(tmp_path)
    name = PROJECTION.removesuffix("weight") + "input_scale"
    rewrite(tmp_path, lambda tensors: tensors.update({name: torch.ones(1)}))
    with caplog.at_level(logging.INFO, "mambaslots.hf"):
        hf.load(tmp_path)
    assert any(f"activations are not quantised: {name}" in record.getMessage() for record in caplog.records)
