"""A model in a folder: what is saved is loaded, and what is wrong is named."""

import json
import os
from pathlib import Path

import mambaslots as ms
import pytest
import torch
from mambaslots.models import HybridConfig, HybridLM
from oracle.recurrent_lm import RecurrentLM
from safetensors.torch import load, load_file, save_file

SHIPPED = Path(__file__).parents[3] / "models/tiny-code"
PROMPT = list(b"def f(x):\n    return")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    HybridLM(HybridConfig.tiny(torch.float64, pattern="MG-C*"), seed=5).save_pretrained(tmp_path / "new/one")
    return tmp_path / "new/one"


def change_config(folder: Path, **values: object) -> None:
    content = json.loads((folder / "config.json").read_text()) | values
    content = {name: value for name, value in content.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(content))


def answer(model: HybridLM) -> list[int]:
    config = ms.InferenceConfig(
        block_size_tokens=16, max_requests=2, max_tokens_per_step=64, max_sequence_length=128,
        num_kv_blocks=16,
        num_mamba_slots=8,
    )  # fmt: skip
    params = ms.SamplingParams(max_tokens=8)
    return ms.DynamicInferenceEngine(model, config).generate([PROMPT], params)[0].tokens


def test_what_is_saved_is_loaded(folder: Path) -> None:
    model = HybridLM(HybridConfig.tiny(torch.float64, pattern="MG-C*"), seed=5)
    loaded = HybridLM.from_pretrained(folder)
    assert loaded.config == model.config
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.get_parameter(name), weight), name
    assert answer(loaded) == answer(model) == RecurrentLM(model).generate_greedy(PROMPT, 8)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_loaded_in_another_dtype(folder: Path, dtype: torch.dtype) -> None:
    exact = HybridLM.from_pretrained(folder)
    loaded = HybridLM.from_pretrained(folder, dtype=dtype)
    assert loaded.config.dtype == dtype
    for name, weight in exact.state_dict().items():
        wide = name.endswith(("dt_bias", "A_log", "D"))
        assert torch.equal(loaded.get_parameter(name), weight.to(torch.float32 if wide else dtype)), name


def test_a_model_is_stored_in_another_dtype(folder: Path, tmp_path: Path) -> None:
    model = HybridLM.from_pretrained(folder, dtype=torch.float32)
    model.save_pretrained(tmp_path / "half", dtype=torch.float16)
    stored = load_file(tmp_path / "half/model.safetensors")
    for name, weight in model.state_dict().items():
        dtype = torch.float32 if name.endswith(("dt_bias", "A_log", "D")) else torch.float16
        assert torch.equal(stored[name], weight.to(dtype)), name
    assert HybridLM.from_pretrained(tmp_path / "half").config.dtype == torch.float16


def test_other_weights_have_another_name(folder: Path) -> None:
    def name() -> str:
        return HybridLM.from_pretrained(folder).state_spec().model

    before = name()
    assert name() == before
    HybridLM(HybridConfig.tiny(torch.float64, pattern="MG-C*"), seed=6).save_pretrained(folder)
    assert name() != before


def test_a_call_that_fails_while_it_writes_leaves_the_old_files(folder: Path) -> None:
    before = [(folder / name).read_bytes() for name in ("config.json", "model.safetensors")]
    (folder / "config.json.part").mkdir()
    with pytest.raises(OSError, match=r"config.json.part"):
        HybridLM(HybridConfig.tiny(pattern="MG"), seed=6).save_pretrained(folder)
    assert [(folder / name).read_bytes() for name in ("config.json", "model.safetensors")] == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba2"}, "model_type of .* is 'mamba2'; accepted: 'mambaslots_hybrid_lm'"),
        ({"head_dim": None}, "config.json has no head_dim"),
        ({"head_dim": 15}, "config.json: head_dim is 15; accepted: an even integer"),
        ({"pattern": "MX"}, "config.json: pattern is 'MX'; accepted: "),
        ({"heads": 3}, "config.json has heads; accepted: vocab_size, "),
        ({"dtype": "int8"}, "dtype of .*config.json is 'int8'; accepted: float16, "),
        ({"dtype": []}, r"dtype of .*config.json is \[\]; accepted: float16, "),
        ({"mlp_hidden_size": 64}, r"layers.2.up_proj of .* has the shape \[128, 64\]; accepted: \[64, 64\]"),
        ({"mamba_num_heads": 2**31 - 2}, r"layers.0.in_proj of .* the shape .*; accepted: \[\d{11}, 64\]"),
        ({"mamba_state_dim": 2**31 - 1}, r"layers.0.in_proj of .* the shape .*; accepted: \[\d{10}, 64\]"),
        ({"delta_value_dim": 2**31 - 1}, r"layers.1.in_proj of .* the shape .*; accepted: \[\d{11}, 64\]"),
        ({"head_dim": 2**31 - 2}, r"layers.\d.q_proj of .* the shape .*; accepted: \[\d{10}, 64\]"),
        ({"mlp_hidden_size": 2**31 - 1}, r"layers.2.up_proj of .* the shape .*; accepted: \[2147483647, "),
        ({"pattern": "MG-C*-"}, "model.safetensors has no layers.5.up_proj"),
        ({"pattern": "MG-C"}, "has weights that the model has not: layers.4.k_proj, layers.4.o_proj"),
    ],
)  # fmt: skip
def test_a_wrong_config_is_named(folder: Path, change: dict[str, object], message: str) -> None:
    change_config(folder, **change)
    with pytest.raises(ValueError, match=message):
        HybridLM.from_pretrained(folder)


def test_wrong_files_are_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    tensors = load(content)
    for wrong in (content[: len(content) // 2], content[:5], b""):
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match=r"model.safetensors is truncated or corrupt"):
            HybridLM.from_pretrained(folder)
    for dtype in (torch.int32, torch.float8_e4m3fn):
        save_file({**tensors, "final_norm": tensors["final_norm"].to(dtype)}, path)
        message = rf"final_norm of .* has the dtype {dtype}; accepted: float16, "
        with pytest.raises(ValueError, match=message):
            HybridLM.from_pretrained(folder)
    path.unlink()
    with pytest.raises(ValueError, match=r"has no model.safetensors"):
        HybridLM.from_pretrained(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is no JSON"):
        HybridLM.from_pretrained(folder)
    for value in (folder / "elsewhere", "", 3):
        with pytest.raises(ValueError, match=r"folder is .*; accepted: a folder"):
            HybridLM.from_pretrained(value)


class TestTheShippedModel:
    MESSAGES = ({"role": "system", "content": "You write Python."}, {"role": "user", "content": "Grüße 😀"})

    def test_it_is_loaded_with_its_text_and_its_defaults(self) -> None:
        loaded = ms.load(SHIPPED, dtype=torch.float32)
        assert isinstance(loaded.model, HybridLM)
        assert set(loaded.model.config.pattern) == set("MG*-")
        assert (SHIPPED / "model.safetensors").stat().st_size < 8e6
        asked = loaded.codec.encode_chat(self.MESSAGES)
        assert asked == [256, 257, *b"You write Python.", 260, 258, *"Grüße 😀".encode(), 260, 259]
        assert loaded.codec.decode(asked) == "You write Python.Grüße 😀"
        params = loaded.sampling_params(max_tokens=5)
        assert params.stop_token_ids == (260, 256)
        assert params.temperature == 0.7

    def test_other_libraries_read_its_tokenizer_and_template_alike(self) -> None:
        transformers = pytest.importorskip("transformers")
        theirs, ours = transformers.PreTrainedTokenizerFast.from_pretrained(SHIPPED), ms.load(SHIPPED).codec
        for prompt in (True, False):
            expected = theirs.apply_chat_template(
                list(self.MESSAGES), add_generation_prompt=prompt, return_dict=False
            )
            assert ours.encode_chat(self.MESSAGES, add_generation_prompt=prompt) == expected
        text = "def f():\n\treturn 'é😀\x00' <|user|>"
        assert theirs(text).input_ids == ours.encode(text)
        with pytest.raises(ValueError, match="the roles are system, user and assistant"):
            ours.encode_chat([{"role": "tool", "content": ""}])

    def test_it_needs_few_bits_for_code_that_it_has_not_seen(self) -> None:
        """One bit and a half a byte; a model with a wrong layer needs more than eight."""
        code = b"import os\n\n\nclass Folder:\n    def __init__(self, path):\n        self.path = path\n\n"
        code += b"    def files(self):\n        return [name for name in os.listdir(self.path)]\n"
        model = HybridLM.from_pretrained(SHIPPED, dtype=torch.float32)
        logits = RecurrentLM(model).logits([256, *code])[:-1]
        bits = torch.nn.functional.cross_entropy(logits, torch.tensor(list(code))) / 0.6931
        print(f"bits per byte of a small class: {bits:.2f}")
        assert bits < 1.5


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("target", ["pipe", "/dev/zero"])
def test_what_never_ends_is_not_read(folder: Path, name: str, target: str) -> None:
    """A pipe, which blocks its opener, or a link to a device, which has no end."""
    path = folder / name
    path.unlink(missing_ok=True)
    if target == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(target)
    if name == "tokenizer.json":  # what is no file is no tokenizer
        assert ms.load(folder).text is None
        return
    with pytest.raises(
        ValueError, match=rf"{name} cannot be read: it is no file; accepted: a file, or a link"
    ):
        ms.load(folder)
