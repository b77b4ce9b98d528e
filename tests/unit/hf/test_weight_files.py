"""Weights come out of a model's files as transformers loads them, or an error names what is wrong."""

import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from mambaslots import hf  # noqa: E402
from oracle.hf_folders import (  # noqa: E402
    INDEX,
    WHOLE,
    change_config,
    rewrite,
    save_model,
    stored_tensors,
)
from oracle.hf_models import CONFIGS, reference_model, tiny_config  # noqa: E402

MOE = "qwen3_5_moe"
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"

Tensors = dict[str, Tensor]


def tensors_of(model: Any) -> Tensors:
    return dict((*model.named_parameters(), *model.named_buffers()))


def assert_equal(got: Any, expected: Any) -> None:
    """Parameters and buffers, those that no file holds included."""
    ours, theirs = tensors_of(got), tensors_of(expected)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.device.type == "cpu"
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("case", CONFIGS)
def test_all_weights_are_those_that_were_saved(case: str, tmp_path: Path) -> None:
    save_model(case, tmp_path, shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_equal(hf.load(tmp_path).model, reference_model(case))


@pytest.mark.parametrize("case", ["nemotron_h MoE", "falcon_h1", MOE])
def test_weights_in_another_dtype_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    """transformers keeps some weights in float32 in narrower models."""
    save_model(case, tmp_path)
    for dtype in (torch.bfloat16, torch.float16):
        theirs = type(reference_model(case)).from_pretrained(tmp_path, dtype=dtype)
        assert_equal(hf.load(tmp_path, dtype=dtype).model, theirs)


def test_the_dtype_is_the_one_that_the_model_names(tmp_path: Path) -> None:
    save_model("lfm2", tmp_path)
    change_config(tmp_path, dtype="bfloat16")
    assert hf.load(tmp_path).dtype == torch.bfloat16
    assert hf.load(tmp_path, dtype=torch.float64).dtype == torch.float64


def as_text_and_images(tensors: Tensors) -> None:
    """The names of a model of text and images, with its vision tower and a draft layer."""
    for name in list(tensors):
        if name.startswith("model."):
            tensors["model.language_model." + name.removeprefix("model.")] = tensors.pop(name)
    tensors["model.visual.patch_embed.proj.weight"] = torch.ones(3)
    tensors["mtp.fc.weight"] = torch.ones(2, 2)


@pytest.mark.parametrize("case", ["qwen3_5", MOE])
def test_the_text_part_of_a_model_of_text_and_images(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_model(case, tmp_path)
    rewrite(tmp_path, as_text_and_images)
    tiny_config(case).save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO, "mambaslots.hf"):
        served = hf.load(tmp_path, dtype=torch.float32)
    assert_equal(served.model, reference_model(case))
    (record,) = caplog.records
    assert record.getMessage().endswith(": model.visual.patch_embed.proj.weight, mtp.fc.weight")


def test_experts_that_are_merged_on_disk(tmp_path: Path) -> None:
    """Some checkpoints hold all experts of a layer as one tensor, as the model does."""
    save_model(MOE, tmp_path)

    def merge(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            del tensors[name]
        tensors |= {
            name: value for name, value in reference_model(MOE).state_dict().items() if ".experts." in name
        }

    rewrite(tmp_path, merge)
    assert_equal(hf.load(tmp_path).model, reference_model(MOE))


def test_tied_embeddings_are_one_tensor(tmp_path: Path) -> None:
    stored = save_model("granitemoehybrid dense", tmp_path)
    assert "lm_head.weight" not in stored
    model: Any = hf.load(tmp_path).model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_model_without_its_embeddings_may_have_the_head_that_they_are_tied_to(tmp_path: Path) -> None:
    save_model("granitemoehybrid dense", tmp_path)
    rewrite(
        tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")})
    )
    assert_equal(hf.load(tmp_path).model, reference_model("granitemoehybrid dense"))


def test_a_load_that_takes_long_shows_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mambaslots.hf import weight_sources

    save_model(MOE, tmp_path)
    monkeypatch.setattr(weight_sources, "PROGRESS_S", 0.0)
    hf.load(tmp_path)
    shown = list(map(int, re.findall(rf"{tmp_path.name}: +(\d+)%", capsys.readouterr().err)))
    assert shown == sorted(shown)
    assert shown[-1] == 100


def test_a_conversion_of_another_kind_is_refused() -> None:
    from mambaslots.hf.weight_sources import WeightSource
    from transformers.core_model_loading import Transpose, WeightConverter

    converter = WeightConverter("feed_forward.w1.weight", "feed_forward.w1.weight", [Transpose()])
    with pytest.raises(hf.ModelFolderError, match="w1 is made by Transpose; accepted: Merge"):
        WeightSource.of("w1", converter)


@pytest.mark.parametrize("count", [2**31 - 1, 2**62])
def test_more_layers_than_a_model_has_are_not_listed(count: int, tmp_path: Path) -> None:
    """transformers makes a list of the layers when it reads a config."""
    save_model("mamba2", tmp_path)
    change_config(tmp_path, num_hidden_layers=count)
    with pytest.raises(hf.ModelFolderError, match=rf"num_hidden_layers is {count}; accepted: at most 10000"):
        hf.load(tmp_path)


def test_code_in_the_folder_is_not_run(tmp_path: Path) -> None:
    save_model("lfm2", tmp_path)
    (tmp_path / "code.py").write_text("raise SystemExit('the code was run')")
    change_config(tmp_path, auto_map={"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"})
    assert_equal(hf.load(tmp_path).model, reference_model("lfm2"))
    change_config(tmp_path, model_type="of_its_own")
    with pytest.raises(hf.ModelFolderError, match=r"transformers cannot read .*config.json"):
        hf.load(tmp_path)


# ---- what is refused


def remove(*names: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove(NORM), f"lacks weights of Qwen3_5MoeForCausalLM: {NORM}"),
        (remove(EXPERT), rf"lacks weights of model.layers.1.mlp.experts.gate_up_proj: {EXPERT}"),
        (
            lambda tensors: remove(*[name for name in tensors if ".up_proj" in name])(tensors),
            r"lacks all weights 'mlp.experts.\*.up_proj.weight' of model.layers.0.mlp.experts.gate_up_proj",
        ),
        (
            lambda tensors: tensors.update({"model.layers.7.bias": torch.ones(1)}),
            r"has weights that Qwen3_5MoeForCausalLM has not: model.layers.7.bias",
        ),
        (
            lambda tensors: tensors.update({NORM: torch.ones(5)}),
            rf"{NORM} of the folder has the shape \(5,\); accepted for {NORM}: \(32,\)",
        ),
        (
            lambda tensors: tensors.update({EXPERT: torch.ones(5, 5)}),
            r"1.mlp.experts.gate_up_proj cannot be made of model.layers.1.mlp.experts.0.gate_proj",
        ),
        (
            lambda tensors: tensors.update({EXPERT.replace("2", "9"): tensors[EXPERT].clone()}),
            r"model.layers.1.mlp.experts.gate_up_proj cannot be made of",
        ),
    ],
    ids=["missing", "no expert", "no experts", "superfluous", "shape", "expert's shape", "more experts"],
)  # fmt: skip
def test_weights_that_do_not_fit(change: Callable[[Tensors], None], message: str, tmp_path: Path) -> None:
    save_model(MOE, tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(hf.ModelFolderError, match=message):
        hf.load(tmp_path)


def test_two_tensors_that_are_one_weight(tmp_path: Path) -> None:
    save_model("qwen3_5", tmp_path)
    other = "model.language_model.norm.weight"
    rewrite(tmp_path, lambda tensors: tensors.update({other: tensors["model.norm.weight"].clone()}))
    with pytest.raises(
        hf.ModelFolderError, match=f"{other} and model.norm.weight of the folder are both mod"
    ):
        hf.load(tmp_path)


def test_long_lists_of_names_are_cut(tmp_path: Path) -> None:
    save_model("lfm2", tmp_path)
    rewrite(tmp_path, Tensors.clear)
    num_weights = len(reference_model("lfm2").state_dict())
    with pytest.raises(hf.ModelFolderError, match=f"and {num_weights - 20} more"):
        hf.load(tmp_path)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def scramble(path: Path) -> None:
    path.write_bytes(b"\0" * 100)


@pytest.mark.parametrize("spoil", [cut, scramble, Path.touch, Path.mkdir], ids=lambda spoil: spoil.__name__)
def test_a_spoilt_file_is_named_and_no_file_stays_open(spoil: Callable[[Path], None], tmp_path: Path) -> None:
    save_model("lfm2", tmp_path, shard_size="60KB")
    path = sorted(tmp_path.glob("*.safetensors"))[-1]
    if spoil in (Path.touch, Path.mkdir):
        path.unlink()
    spoil(path)
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(hf.ModelFolderError, match=path.name):
        hf.load(tmp_path)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_file_that_fails_while_it_is_read_is_named(tmp_path: Path) -> None:
    """The file is cut after its header was read."""
    from mambaslots.hf.weight_files import WeightFiles

    save_model("lfm2", tmp_path)
    with WeightFiles(tmp_path) as checkpoint:
        os.truncate(tmp_path / WHOLE, 100)
        with pytest.raises(hf.ModelFolderError, match=f"{WHOLE}: {checkpoint.names[-1]} cannot be read"):
            checkpoint.read(checkpoint.names[-1], torch.device("cpu"), None)


def change_index(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        change(index)
        (folder / INDEX).write_text(json.dumps(index))

    return spoil


def naming(file: object) -> Callable[[Path], None]:
    return change_index(lambda index: index["weight_map"].update({"model.norm.weight": file}))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (naming("model-00009.safetensors"), r"names model-00009.safetensors, which is missing"),
        (naming("../secret.safetensors"), r"weight_map has '../secret.safetensors' for model.norm.weight"),
        (naming("/etc/secret.safetensors"), r"weight_map has '/etc/secret.safetensors'"),
        (naming("a\\b.safetensors"), r"weight_map has 'a\\\\b.safetensors'"),
        (naming("weights.bin"), r"weight_map has 'weights.bin'"),
        (naming(3), r"weight_map has 3 for model.norm.weight"),
        (naming(""), r"weight_map has ''"),
        (change_index(lambda index: index.pop("weight_map")), r"index.json has no weight_map"),
        (change_index(lambda index: index["weight_map"].clear()), r"index.json has no weight_map"),
        (
            change_index(
                lambda index: index["weight_map"].update(more=index["weight_map"]["model.norm.weight"])
            ),
            r"names more, which model-0000\d-of-0000\d.safetensors has not",
        ),
        (lambda folder: (folder / INDEX).write_text("{"), r"index.json is no JSON"),
        (lambda folder: (folder / INDEX).unlink(), rf"has neither {WHOLE} nor {INDEX}"),
        (lambda folder: (folder / "config.json").unlink(), r"has no config.json"),
        (lambda folder: (folder / "config.json").write_text("[]"), r"config.json holds a JSON list"),
        (
            lambda folder: (folder / "config.json").write_text("\udcff", errors="surrogateescape"),
            "is no JSON",
        ),
    ],
)
def test_a_spoilt_index_or_config(spoil: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    save_model("qwen3_next", tmp_path, shard_size="60KB")
    spoil(tmp_path)
    with pytest.raises(hf.ModelFolderError, match=message):
        hf.load(tmp_path)


def test_a_tensor_of_two_files_comes_from_the_one_that_the_index_names(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_model("bamba", tmp_path, shard_size="60KB")
    files = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    path = next(
        path for path in sorted(tmp_path.glob("*.safetensors")) if path.name != files["lm_head.weight"]
    )
    save_file(load_file(path) | {"lm_head.weight": torch.zeros(3)}, path)
    assert_equal(hf.load(tmp_path).model, reference_model("bamba"))


def test_pickle_files_are_refused(tmp_path: Path) -> None:
    save_model("lfm2", tmp_path)
    torch.save(stored_tensors(tmp_path), tmp_path / "pytorch_model.bin")
    (tmp_path / WHOLE).unlink()
    with pytest.raises(hf.ModelFolderError, match=r"pytorch_model.bin, a pickle file.*save_pretrained"):
        hf.load(tmp_path)


@pytest.mark.parametrize(
    "dtype",
    [torch.int8, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2],
    ids=lambda dtype: str(dtype),
)
def test_elements_of_a_quantisation_that_the_config_does_not_name_are_refused(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    save_model(MOE, tmp_path)
    for name in (NORM, EXPERT):
        stored = stored_tensors(tmp_path)[name]
        rewrite(tmp_path, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))  # noqa: B023
        message = f"{name} of the folder has the dtype {dtype}; accepted: torch.float16, "
        with pytest.raises(hf.ModelFolderError, match=message):
            hf.load(tmp_path)
        rewrite(tmp_path, lambda tensors: tensors.update({name: stored}))  # noqa: B023
    assert_equal(hf.load(tmp_path).model, reference_model(MOE))


def test_dtypes_that_are_no_numbers_of_a_model_are_refused(tmp_path: Path) -> None:
    save_model("lfm2", tmp_path)
    rewrite(
        tmp_path,
        lambda tensors: tensors.update({"model.embedding_norm.weight": torch.ones(32).to(torch.complex64)}),
    )
    with pytest.raises(hf.ModelFolderError, match=r"model.embedding_norm.weight has the dtype C64"):
        hf.load(tmp_path)
