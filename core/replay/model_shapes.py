"""What models cost in the cache: published ones by name, others by their config."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..state_kinds import gated_delta_net_states, mamba2_states
from ..state_spec import HybridStateSpec
from ..state_tensor import StateTensor
from .setting import ModelShape

STATE_DTYPES = ("float32", "bfloat16", "int8")
"""How cached states may be stored. Live states are as the model has them."""


def _nemotron_h_8b(state_dtype: str | None) -> ModelShape:
    states = mamba2_states(
        layers=24, heads=128, head_dim=64, groups=8, state_dim=128, conv_kernel=4,
        conv_dtype=torch.bfloat16, ssm_dtype=torch.float32, grid=128,
    )  # fmt: skip
    spec = _spec(states, num_attention_layers=4, num_kv_heads=8, head_dim=128)
    return shape_of("nemotron-h-8b", spec, state_dtype, hidden_size=4096, num_mlp_layers=24)


def _qwen3_5_35b(state_dtype: str | None) -> ModelShape:
    states = gated_delta_net_states(
        layers=30, key_heads=16, key_dim=128, value_heads=32, value_dim=128, conv_kernel=4,
        conv_dtype=torch.bfloat16, state_dtype=torch.float32,
    )  # fmt: skip
    spec = _spec(states, num_attention_layers=10, num_kv_heads=2, head_dim=256)
    return shape_of("qwen3.5-35b", spec, state_dtype, hidden_size=2048, num_mlp_layers=40)


def _spec(
    states: tuple[StateTensor, ...], num_attention_layers: int, num_kv_heads: int, head_dim: int
) -> HybridStateSpec:
    return HybridStateSpec(
        states, num_attention_layers, num_kv_heads, head_dim, torch.bfloat16, 1 << 17, torch.device("cpu")
    )


MODELS: dict[str, Callable[[str | None], ModelShape]] = {
    "nemotron-h-8b": _nemotron_h_8b,
    "qwen3.5-35b": _qwen3_5_35b,
}
"""Models that need no config: Nemotron-H-8B, and Qwen3.5-35B-A3B."""


def model_shape(model: str, state_dtype: str | None = None) -> ModelShape:
    """The shape of a model.

    Args:
        model: one of `MODELS`, or the path of a config.json or of a folder with one. Configs are read with
            transformers.
        state_dtype: one of `STATE_DTYPES`, for cached states; None stores them as live states are.

    Raises:
        ValueError: the model, or its architecture, or the dtype is not known.
        ImportError: a config is given, and transformers is not installed.
    """
    if state_dtype is not None and state_dtype not in STATE_DTYPES:
        raise ValueError(f"state_dtype is {state_dtype!r}; accepted: {', '.join(STATE_DTYPES)}")
    if model in MODELS:
        return MODELS[model](state_dtype)
    if not Path(model).exists():
        raise ValueError(
            f"model is {model!r}; accepted: {', '.join(MODELS)}, or the path of a config.json that is there"
        )
    return _shape_of_config(Path(model), state_dtype)


def _shape_of_config(path: Path, state_dtype: str | None) -> ModelShape:
    from ..hf import architectures, state_sizes

    config = state_sizes.read_config(path)
    text: Any = architectures.text_config(config)
    spec = architectures.state_spec(text, text.dtype or config.dtype or torch.bfloat16)
    named = [name in ("mlp", "moe") for name in text.layer_types]
    num_mlp_layers = sum(named) if any(named) or text.model_type == "mamba2" else len(named)
    return shape_of(
        state_sizes.name_of(path), spec, state_dtype,
        hidden_size=text.hidden_size, num_mlp_layers=num_mlp_layers,
    )  # fmt: skip


def shape_of(
    name: str, spec: HybridStateSpec, state_dtype: str | None = None, *, hidden_size: int, num_mlp_layers: int
) -> ModelShape:
    """The shape of a model with this spec; `state_dtype` as for `model_shape`."""
    widths = {"ssm": 2, "delta": 1}  # where the shape of a recurrent tensor has its state size
    sizes = [tensor.shape[widths[tensor.name]] for tensor in spec.states if tensor.name in widths]
    return ModelShape(
        name=name if state_dtype is None else f"{name}, cached states in {state_dtype}",
        state_bytes=spec.slot_bytes,
        durable_state_bytes=_durable_bytes(spec, state_dtype),
        kv_bytes_per_token=spec.kv_block_bytes(1),
        grid_tokens=spec.grid,
        hidden_size=hidden_size,
        num_recurrent_layers=max((tensor.num_layers for tensor in spec.states), default=0),
        num_attention_layers=spec.num_attention_layers,
        num_mlp_layers=num_mlp_layers,
        state_size=max(sizes, default=0),
    )


def _durable_bytes(spec: HybridStateSpec, state_dtype: str | None) -> int:
    """Bytes of a cached state, as an engine stores it."""
    return spec.durable_slot_bytes(None if state_dtype == "float32" else state_dtype)
