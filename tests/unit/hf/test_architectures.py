"""Which configs and models are served, what is refused, and models that are built on the meta device."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from mambaslots.files import SERVED_MODEL_TYPES
from mambaslots.hf import architectures
from mambaslots.hf.fused_modules import attention_forward
from mambaslots.hf.served_model import ServedModel
from mambaslots.models.weights import MODEL_TYPE
from oracle.hf_models import CONFIGS, VOCABULARY, reference_logits, reference_model, served_model, tiny_config
from oracle.hf_steps import step_errors, texts

CASES = list(CONFIGS)


@pytest.mark.sampled(case=("nemotron_h MoE", "granitemoehybrid dense", "falcon_h1", "qwen3_5"))
@pytest.mark.parametrize("case", CASES)
def test_a_skeleton_with_weights_answers_like_transformers(case: str) -> None:
    """Its rotary frequencies and multipliers, which no state dict holds, are right."""
    model = architectures.skeleton(tiny_config(case), torch.float32)
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} <= {"meta"}
    model.load_state_dict(reference_model(case).state_dict(), assign=True)
    model.tie_weights()
    architectures.restore_buffers(model, "cpu")
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cpu"}
    both = texts(VOCABULARY)
    expected = reference_logits(case, both[0]), reference_logits(case, both[1])
    errors, _ = step_errors(ServedModel(model), both, expected)
    assert max(errors.values()) < 1e-4


def test_a_skeleton_keeps_in_float32_what_transformers_keeps(tmp_path: Path) -> None:
    reference_model("nemotron_h MoE").save_pretrained(tmp_path)
    loaded = type(reference_model("nemotron_h MoE")).from_pretrained(tmp_path, dtype=torch.bfloat16)
    model = architectures.skeleton(tiny_config("nemotron_h MoE"), torch.bfloat16)
    expected = {name: tensor.dtype for name, tensor in loaded.state_dict().items()}
    assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == expected
    assert set(expected.values()) == {torch.bfloat16, torch.float32}


def test_the_spec_names_the_states_of_each_kind() -> None:
    names = {case: [state.name for state in served_model(case).state_spec().states] for case in CASES}
    assert names["bamba"] == names["mamba2"] == names["falcon_h1"] == ["conv", "ssm"]
    assert names["qwen3_next"] == names["olmo_hybrid"] == ["gdn_conv", "delta"]
    assert names["lfm2"] == ["short_conv"]


def test_a_model_without_attention_has_no_kv() -> None:
    spec = served_model("mamba2").state_spec()
    assert spec.num_attention_layers == 0
    assert spec.kv_block_bytes(8) == 0


def test_attention_of_another_class_is_refused_in_the_step() -> None:
    tensor = torch.zeros(1, 1, 1, 4)
    with pytest.raises(ValueError, match="attention is a Linear; accepted: a class of the architecture"):
        attention_forward(torch.nn.Linear(1, 1), tensor, tensor, tensor, attention_mask=None, scaling=1.0)


def test_the_first_dtype_that_a_config_names_counts() -> None:
    text = architectures.text_config(tiny_config("nemotron_h dense"))
    text.mamba_ssm_cache_dtype, text.mamba_ssm_dtype = "float32", "bfloat16"
    assert architectures.state_spec(text, torch.bfloat16).states[1].dtype == torch.float32
    assert architectures.state_spec(text, torch.float64).states[1].dtype == torch.float64


@pytest.mark.parametrize("field", ["mamba_ssm_cache_dtype", "mamba_ssm_dtype"])
def test_a_config_says_the_dtype_of_recurrent_states(field: str) -> None:
    text = architectures.text_config(tiny_config("bamba"))  # its class has neither field
    setattr(text, field, "bfloat16")
    conv, ssm = architectures.state_spec(text, torch.float16).states
    assert (conv.dtype, ssm.dtype) == (torch.float16, torch.bfloat16)
    assert {state.dtype for state in architectures.state_spec(text, torch.float64).states} == {torch.float64}
    setattr(text, field, "int8")
    with pytest.raises(ValueError, match=f"{field} is 'int8'; accepted: float32"):
        architectures.state_spec(text, torch.float32)


def test_the_command_line_knows_what_is_served_without_torch() -> None:
    served = {MODEL_TYPE, *architectures.ARCHITECTURES, *architectures.WRAPPERS}
    assert sorted(served) == list(SERVED_MODEL_TYPES)


@pytest.mark.parametrize("model_type", ["llama", "kimi_linear", "jamba", "qwen3_5_vision"])
def test_another_architecture_is_refused_by_name(model_type: str) -> None:
    from transformers import CONFIG_MAPPING

    with pytest.raises(
        ValueError, match=f"model_type is '{model_type}'.*accepted: bamba, falcon_h1, .*qwen3_5,"
    ):
        architectures.skeleton(CONFIG_MAPPING[model_type](), torch.float32)


@pytest.mark.parametrize(
    ("case", "overrides", "message"),
    [
        ("nemotron_h dense", {"sliding_window": 16}, "sliding_window is 16; accepted: None"),
        ("lfm2", {"layer_types": ["conv", "sliding_attention", "conv", "conv"]}, "has 'sliding_attention'"),
        ("mamba2", {"hidden_act": "gelu"}, "hidden_act is 'gelu'.*accepted: 'silu'"),
        ("nemotron_h dense", {"mamba_hidden_act": "relu"}, "mamba_hidden_act is 'relu'"),
        (
            "qwen3_5",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type is 'dynamic'",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(case: str, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        architectures.skeleton(tiny_config(case, **overrides), torch.float32)


def test_a_window_that_is_switched_off_is_none() -> None:
    config = tiny_config("bamba", sliding_window=4096, use_sliding_window=False)
    assert architectures.text_config(config).model_type == "bamba"


def test_another_class_of_mixer_is_refused_by_name() -> None:
    model = architectures.skeleton(tiny_config("bamba"), torch.float32)
    mixer = model.model.layers[2].mamba
    mixer.__class__ = type("NewMixer", (type(mixer),), {})
    with pytest.raises(ValueError, match="1 modules BambaMixer; accepted: 2"):
        ServedModel(model)


def test_another_class_of_attention_is_refused() -> None:
    model = architectures.skeleton(tiny_config("bamba"), torch.float32)
    attention = model.model.layers[1].self_attn
    attention.__class__ = type("NewAttention", (type(attention),), {})
    with pytest.raises(ValueError, match="0 modules BambaAttention; accepted: 1"):
        ServedModel(model)


def test_another_head_is_refused() -> None:
    model = architectures.skeleton(tiny_config("bamba"), torch.float32)
    with pytest.raises(ValueError, match="model is a BambaModel; accepted: a BambaForCausalLM"):
        ServedModel(model.model)


def test_an_unknown_buffer_is_refused_by_name() -> None:
    model = architectures.skeleton(tiny_config("bamba"), torch.float32)
    model.model.register_buffer("table", torch.empty(2, device="meta"), persistent=False)
    with pytest.raises(ValueError, match=r"the buffer model\.table is in no file of weights"):
        architectures.restore_buffers(model, "cpu")
