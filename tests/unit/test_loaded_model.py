"""`ms.load` chooses the kind of model, and brings its text and its defaults along."""

import json
from pathlib import Path
from typing import Any

import mambaslots as ms
import pytest
import torch
from mambaslots.files import ModelFolderError
from oracle.fresh_process import printed_by

TEMPLATE = "{% for message in messages %}{{ message.content }}<|end|>{% endfor %}"


def save_hybrid_lm(folder: Path) -> ms.models.HybridLM:
    """A `HybridLM` with the files of a model, as `examples/train_tiny.py` writes them."""
    model = ms.models.HybridLM(ms.models.HybridConfig.tiny(vocab_size=258), seed=0)
    model.save_pretrained(folder)
    ms.text.ByteTokenizer({"<|end|>": 256, "<|begin|>": 257}).save(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "generation_config.json").write_text('{"eos_token_id": 256}')
    return model


def config() -> ms.InferenceConfig:
    return ms.InferenceConfig(
        block_size_tokens=16, max_tokens_per_step=64, num_kv_blocks=64, num_mamba_slots=16
    )


def test_a_hybrid_lm_with_its_text(tmp_path: Path) -> None:
    saved = save_hybrid_lm(tmp_path)
    loaded = ms.load(tmp_path)
    assert isinstance(loaded, ms.LoadedModel)
    assert isinstance(loaded.model, ms.models.HybridLM)
    assert loaded.codec.encode_chat([{"role": "user", "content": "é"}]) == [0xC3, 0xA9, 256]
    assert loaded.codec.decode(loaded.codec.encode("é<|begin|>")) == "é"
    assert loaded.codec.detokenizer().push(0x41) == "A"
    params = loaded.sampling_params(max_tokens=4)
    assert params == ms.SamplingParams(max_tokens=4, stop_token_ids=(256,))
    prompts = [loaded.codec.encode("What a day.")]
    expected = ms.DynamicInferenceEngine(saved, config()).generate(prompts, params)[0].tokens
    assert ms.DynamicInferenceEngine(loaded.model, config()).generate(prompts, params)[0].tokens == expected


def test_a_hybrid_lm_in_another_dtype(tmp_path: Path) -> None:
    save_hybrid_lm(tmp_path)
    loaded = ms.load(str(tmp_path), device="cpu", dtype=torch.float64)
    assert loaded.model.state_spec().kv_dtype == torch.float64


def test_a_hybrid_lm_needs_no_transformers(tmp_path: Path) -> None:
    save_hybrid_lm(tmp_path)
    code = (
        "import sys, mambaslots as ms\n"
        "for name in ('transformers', 'tokenizers', 'huggingface_hub'): sys.modules[name] = None\n"
        f"loaded = ms.load({str(tmp_path)!r})\n"
        "print(loaded.codec.encode('a'), loaded.codec.encode_chat([{'role': 'user', 'content': 'b'}]))"
    )
    printed = printed_by(code)
    assert printed == "[97] [98, 256]\n"


def test_a_model_of_transformers_without_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "lfm2"}')
    code = (
        "import sys, mambaslots as ms\n"
        "sys.modules['transformers'] = None\n"
        f"try: ms.load({str(tmp_path)!r})\n"
        "except ImportError as error: print(error)"
    )
    printed = printed_by(code)
    assert printed == "mambaslots.hf needs transformers: pip install 'mambaslots[hf]'\n"


def test_a_name_on_the_hub_without_the_extra() -> None:
    code = (
        "import sys, mambaslots as ms\n"
        "sys.modules['huggingface_hub'] = None\n"
        "try: ms.load('some/model')\n"
        "except ImportError as error: print(error)"
    )
    said = "'some/model' is no folder here; the hub needs: pip install 'mambaslots[hf]'\n"
    assert printed_by(code) == said


def test_a_model_without_text_says_so_when_text_is_asked(tmp_path: Path) -> None:
    save_hybrid_lm(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    loaded = ms.load(tmp_path)
    assert loaded.text is None
    assert loaded.sampling_params().stop_token_ids == (256,)
    with pytest.raises(ValueError, match=f"{tmp_path} has no tokenizer; accepted: token ids in place of"):
        _ = loaded.codec


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no config.json"),
        ("{", "config.json is no JSON"),
        ("3", "config.json holds a JSON int; accepted: an object"),
        ("[" * 200_000, "config.json is no JSON"),
    ],
)
def test_a_folder_that_is_no_model(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelFolderError, match=message):
        ms.load(tmp_path)


def test_a_file_with_the_form_of_a_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "file").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelFolderError, match="'some/file' is no folder; accepted: a folder, or 'org"):
        ms.load("some/file")


@pytest.mark.parametrize("name", [3, None, "", b"model", "~no_such_user/model", "a" * 5000, "a\0b"])
def test_a_folder_or_name_that_is_none(name: Any) -> None:
    with pytest.raises(ValueError, match=r"folder_or_name is |is no folder"):
        ms.load(name)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json"])
def test_odd_json_is_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    for content in ("[" * 200_000, "[]", "\udcff", '{"eos_token_id": {}, "model": [3]}'):
        save_hybrid_lm(tmp_path)
        path.write_text(content, errors="surrogateescape")
        with pytest.raises(ModelFolderError, match=name):
            ms.load(tmp_path)
    path.unlink()
    path.mkdir()
    if name == "config.json":
        with pytest.raises(ModelFolderError, match=r"config.json cannot be read"):
            ms.load(tmp_path)


def test_a_spoilt_text_is_named(tmp_path: Path) -> None:
    save_hybrid_lm(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": "end"}))
    with pytest.raises(ModelFolderError, match=r"generation_config.json: stop_token_ids"):
        ms.load(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "chat_template.jinja").write_text("{% for")
    with pytest.raises(ModelFolderError, match=r"chat_template.jinja: the chat template is no Jinja"):
        ms.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFolderError, match=r"tokenizer.json has no tokenizer of bytes"):
        ms.load(tmp_path)
