"""What models cost: the published figures, and what their configs say."""

from pathlib import Path

import pytest
import torch
from mambaslots.replay.setting import MODELS, ModelShape, model_shape, shape_of
from mambaslots.state_spec import HybridStateSpec, StateTensor, gated_delta_net_states, mamba2_states

CONFIGS = Path(__file__).parents[1] / "hf/configs"
MEBIBYTE = 1 << 20
PUBLISHED = {
    "Nemotron-H-8B": (97, 49, 4.0, 6_234, 4096, 24, 4, 24),
    "Nemotron-3-Nano-30B-A3B": (47, 24, 1.5, 7_989, 2688, 23, 6, 23),
    "Qwen3-Next-80B-A3B": (74, 38, 6.0, 3_144, 2048, 36, 12, 48),
    "Qwen3.5-35B-A3B": (61, 31, 5.0, 3_144, 2048, 30, 10, 40),
}
"""MiB of a state in float32 and in bfloat16, of the KV of 256 tokens, and the tokens whose KV is as large as
a state; the hidden size; recurrent, attention and MLP layers."""


# Recurrent layers, heads, head dim, state size, channels of the convolutions, and the KV bytes of a token;
# then the first four figures of `PUBLISHED`.
MAMBA2 = {
    "Nemotron-H-8B": ((24, 128, 64, 128, 10240, 16384), (97, 49, 4.0, 6_234)),
    "Nemotron-H-47B": ((45, 256, 64, 256, 20480, 20480), (725, 365, 5.0, 37_134)),
    "Nemotron-H-56B": ((54, 256, 64, 256, 20480, 40960), (870, 438, 10.0, 22_280)),
    "Nemotron-Nano-9B-v2": ((27, 128, 80, 128, 12288, 16384), (137, 69, 4.0, 8_762)),
    "Nemotron-3-Nano-30B-A3B": ((23, 64, 64, 128, 6144, 6144), (47, 24, 1.5, 7_989)),
    "Bamba-9B": ((29, 128, 64, 128, 8448, 12288), (117, 59, 3.0, 10_018)),
    "Granite-4.0-H-Small": ((36, 128, 64, 128, 8448, 16384), (146, 74, 4.0, 9_327)),
    "Falcon-H1-34B": ((72, 32, 128, 256, 5120, 147456), (290, 146, 36.0, 2_063)),
}


@pytest.mark.parametrize("name", MAMBA2)
def test_a_state_beside_kv(name: str) -> None:
    (layers, heads, head_dim, state_dim, channels, kv_bytes), figures = MAMBA2[name]
    groups = (channels - heads * head_dim) // (2 * state_dim)
    states = mamba2_states(
        layers, heads, head_dim, groups, state_dim, 4, torch.bfloat16, torch.float32, grid=128
    )
    assert physics(states, kv_bytes) == figures


def test_a_state_of_a_gated_delta_net_beside_kv() -> None:
    states = gated_delta_net_states(36, 16, 128, 32, 128, 4, torch.bfloat16, torch.float32)
    assert physics(states, 24576) == (74, 38, 6.0, 3_144)  # Qwen3-Next-80B-A3B


def physics(states: tuple[StateTensor, ...], kv_bytes: int) -> tuple[object, ...]:
    cpu = torch.device("cpu")
    spec = HybridStateSpec(states, 1, 1, kv_bytes // 4, torch.bfloat16, 100, cpu)
    return figures_of(shape_of("", spec, 1, 1), shape_of("", spec, 1, 1, "bfloat16"))[:4]


@pytest.mark.parametrize("name", PUBLISHED)
def test_configs_of_published_models(name: str) -> None:
    pytest.importorskip("transformers")
    path = str(CONFIGS / f"{name}.json")
    shape, half = model_shape(path), model_shape(path, "bfloat16")
    assert figures_of(shape, half) == PUBLISHED[name]
    assert shape.name == name
    assert shape.state_size == 128


@pytest.mark.parametrize(
    ("name", "config"), [("nemotron-h-8b", "Nemotron-H-8B"), ("qwen3.5-35b", "Qwen3.5-35B-A3B")]
)
@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16", "int8"])
def test_named_models_are_those_of_their_configs(name: str, config: str, dtype: str | None) -> None:
    assert figures_of(model_shape(name), model_shape(name, "bfloat16")) == PUBLISHED[config]
    pytest.importorskip("transformers")
    named, read = model_shape(name, dtype), model_shape(str(CONFIGS / f"{config}.json"), dtype)
    assert vars(named) | {"name": ""} == vars(read) | {"name": ""}


def figures_of(shape: ModelShape, half: ModelShape) -> tuple[object, ...]:
    return (
        round(shape.state_bytes / MEBIBYTE),
        round(half.durable_state_bytes / MEBIBYTE),
        256 * shape.kv_bytes_per_token / MEBIBYTE,
        round(shape.state_bytes / shape.kv_bytes_per_token),
        shape.hidden_size,
        shape.num_recurrent_layers,
        shape.num_attention_layers,
        shape.num_mlp_layers,
    )


@pytest.mark.parametrize("name", MODELS)
def test_int8_makes_more_than_3_5_states_of_one(name: str) -> None:
    assert model_shape(name, "int8").durable_state_bytes * 3.5 < model_shape(name).state_bytes
    assert model_shape(name, "int8").state_bytes == model_shape(name).state_bytes


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nemotron",), "model is 'nemotron'; accepted: nemotron-h-8b, qwen3.5-35b, or the path"),
        (("nemotron-h-8b", "int4"), "state_dtype is 'int4'; accepted: float32, bfloat16, int8"),
    ],
)
def test_what_is_not_known_is_named(arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError, match="accepted") as raised:
        model_shape(*arguments)
    assert said in str(raised.value)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_cached_state_has_the_bytes_of_an_engines_slot(dtype: str) -> None:
    states = mamba2_states(4, 8, 64, 2, 128, 4, torch.bfloat16, torch.float32, grid=128)
    spec = HybridStateSpec(states, 1, 1, 64, torch.bfloat16, 100, torch.device("cpu"))
    shape = shape_of("", spec, 1, 1, dtype)
    assert shape.durable_state_bytes == spec.durable_slot_bytes(dtype)
