"""`ms.load` and `hf.load` of models of transformers, from folders and from names on the hub."""

import errno
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mambaslots as ms
import pytest
import torch

pytest.importorskip("transformers")

import huggingface_hub
from huggingface_hub import errors
from mambaslots import hf
from oracle.hf_folders import change_config, save_model
from oracle.hf_models import reference_logits
from transformers import AutoModelForCausalLM

CASE = "bamba"
CHAT = [{"role": "user", "content": "Hello"}]


def save_with_text(folder: Path) -> None:
    """The model of `CASE`, whose tokens are ASCII, with all files of text."""
    save_model(CASE, folder)
    ids = [byte - 32 if 32 <= byte < 127 else 200 + byte for byte in range(256)]
    tokenizer = ms.text.ByteTokenizer({"<|end|>": 95, "<|begin|>": 96}, ids)
    tokenizer.save(folder)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (folder / "generation_config.json").write_text('{"eos_token_id": [95, 1], "max_new_tokens": 7}')


def test_a_model_with_its_text_answers_as_transformers(tmp_path: Path) -> None:
    save_with_text(tmp_path)
    loaded = ms.load(tmp_path)
    assert isinstance(loaded.model, hf.ServedModel)
    config = ms.InferenceConfig(
        block_size_tokens=16, max_tokens_per_step=64, num_kv_blocks=64, num_mamba_slots=16
    )
    engine = ms.DynamicInferenceEngine(loaded.model, config)
    prompt = list(range(3, 40))
    (result,) = engine.generate([prompt], loaded.sampling_params(stop_token_ids=()))
    expected = list(prompt)
    for _ in range(7):
        expected.append(int(reference_logits(CASE, expected)[-1].argmax()))
    assert result.tokens == expected[len(prompt) :]
    assert loaded.sampling_params().stop_token_ids == (95, 1)
    assert loaded.text is not None
    assert loaded.codec.decode(loaded.codec.encode_chat(CHAT)) == "Hello"


def test_a_model_without_text(tmp_path: Path) -> None:
    save_model(CASE, tmp_path)
    loaded = ms.load(str(tmp_path), dtype=torch.bfloat16)
    assert loaded.model.state_spec().kv_dtype == torch.bfloat16
    assert loaded.text is None
    with pytest.raises(ValueError, match=f"{tmp_path} has no tokenizer"):
        loaded.codec.encode("Hello")


def test_what_fla_core_warns_of_without_a_gpu_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers imports it when it builds a model."""
    save_model(CASE, tmp_path)
    build = AutoModelForCausalLM.from_config

    def importing(*arguments: Any, **named: Any) -> Any:
        text = "Triton is not supported on current platform, roll back to CPU."
        warnings.warn_explicit(text, UserWarning, "hardware.py", 62, module="fla.utils.hardware")
        return build(*arguments, **named)

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", importing)
    hf.load(tmp_path)  # a warning that is shown is an error here


def test_an_architecture_that_is_not_served_is_named(tmp_path: Path) -> None:
    save_model(CASE, tmp_path)
    change_config(tmp_path, model_type="llama", layer_types=None)
    with pytest.raises(ValueError, match=r"model_type is 'llama'; accepted: bamba, falcon_h1"):
        hf.load(tmp_path)
    change_config(tmp_path, model_type="gpt9")
    with pytest.raises(ValueError, match=r"transformers cannot read .*config.json: .*gpt9"):
        hf.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["mamba"]}, "transformers cannot read .*config.json"),
        ({"layer_types": 3}, "transformers cannot read .*config.json"),
        ({"dtype": "banana"}, "transformers cannot read .*config.json"),
        ({"intermediate_size": -1}, "config.json describes no model: .*-1"),
        ({"hidden_act": "banana"}, "banana"),
        ({"text_config": "x"}, "config.json: text_config is 'x'; accepted: an object"),
    ],
)
@pytest.mark.parametrize("load", [hf.load, ms.load])
def test_an_odd_config_is_named(
    load: Callable[[Path], Any], change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_model(CASE, tmp_path)
    change_config(tmp_path, **change)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path_or_name": "no/such/folder"}, "'no/such/folder' is no folder; accepted: a folder, or 'org"),
        ({"path_or_name": Path("no/folder")}, "'no/folder' is no folder"),
        ({"path_or_name": "../model"}, "'../model' is no folder"),
        ({"path_or_name": ""}, "path_or_name is ''"),
        ({"path_or_name": 3}, "path_or_name is 3"),
        ({"path_or_name": ".", "device": "meta"}, "device is 'meta'"),
        ({"path_or_name": ".", "device": "tpu9"}, "device is 'tpu9'"),
        ({"path_or_name": ".", "dtype": "bfloat16"}, "dtype is 'bfloat16'; accepted: torch.float16"),
        ({"path_or_name": ".", "dtype": torch.int8}, "dtype is torch.int8"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hf.load(**arguments)


# ---- names on the hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., object]], None]:
    """Sets what a download does."""

    def answer(download: Callable[..., object]) -> None:
        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)

    return answer


@pytest.mark.parametrize("load", [hf.load, ms.load])
def test_a_name_is_downloaded(load: Callable[[str], Any], hub: Any, tmp_path: Path) -> None:
    save_model(CASE, tmp_path)
    asked = []

    def download(name: str, **options: Any) -> str:
        asked.append((name, options))
        return str(tmp_path)

    hub(download)
    load("some-organisation/model_1.5")
    ((name, options),) = asked
    assert name == "some-organisation/model_1.5"
    assert "*.safetensors" in options["allow_patterns"]
    assert not any(pattern.endswith((".bin", ".py", ".pt")) for pattern in options["allow_patterns"])


def raising(error: Exception) -> Callable[..., object]:
    def download(*_: Any, **__: Any) -> object:
        raise error

    return download


def test_a_name_that_cannot_be_downloaded_is_named(hub: Any) -> None:
    failure = errors.LocalEntryNotFoundError("offline")
    hub(raising(failure))
    with pytest.raises(ConnectionError) as caught:
        hf.load("a/b")
    assert str(caught.value) == (
        "'a/b' is no folder here and not in the cache of huggingface_hub, and the hub cannot be reached; "
        "accepted without a network: a folder"
    )
    assert caught.value.__cause__ is failure
    hub(raising(errors.RepositoryNotFoundError("404", response=Mock())))
    with pytest.raises(hf.ModelFolderError, match="'a/b' is no folder here, and no model on the hub"):
        ms.load("a/b")
    hub(raising(errors.HFValidationError("two dots")))
    with pytest.raises(
        hf.ModelFolderError, match=r"'a/b..c' is no folder here, and no model on the hub .*: two"
    ):
        ms.load("a/b..c")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_a_disk_that_takes_no_files_is_no_missing_network(number: int, hub: Any) -> None:
    hub(raising(OSError(number, "the disk")))
    with pytest.raises(OSError, match="the disk") as caught:
        ms.load("a/b")
    assert not isinstance(caught.value, ConnectionError)


def test_a_wrong_text_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    save_with_text(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 0}')
    with pytest.raises(hf.ModelFolderError, match="max_tokens is 0"):
        ms.load(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(hf.ModelFolderError, match=r"the tokenizer in .* cannot be read"):
        ms.load(tmp_path)
