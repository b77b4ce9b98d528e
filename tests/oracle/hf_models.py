"""Tiny random models of every architecture of transformers that is served, and what they answer."""

import copy
import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from mambaslots.hf.served_model import ServedModel
from oracle.float64_casts import Float64Casts
from torch import Tensor

VOCABULARY = 97
CHUNK = 8
"""The grid of the models whose grid their config says."""

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": CHUNK,
}  # fmt: skip
_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3,
}  # fmt: skip
_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}  # fmt: skip
_NEMOTRON = {
    "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "conv_kernel": 4,
    "chunk_size": CHUNK, "head_dim": 16, "time_step_min": 0.05,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "nemotron_h dense": (
        "nemotron_h",
        {**_ATTENTION, **_NEMOTRON, "hybrid_override_pattern": "M-*M-"},
    ),
    "nemotron_h MoE": (
        "nemotron_h",
        {
            **_ATTENTION, **_NEMOTRON, "hybrid_override_pattern": "ME*EM", "n_routed_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 24,
            "routed_scaling_factor": 2.5, "n_group": 2, "topk_group": 1, "moe_latent_size": 16,
        },
    ),
    "granitemoehybrid dense": (
        "granitemoehybrid",
        {
            **_ATTENTION, **_MAMBA, "num_hidden_layers": 3, "num_local_experts": 0, "num_experts_per_tok": 0,
            "layer_types": ["mamba", "attention", "mamba"], "shared_intermediate_size": 48,
            "position_embedding_type": "rope", "rope_parameters": _ROPE, "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0, "residual_multiplier": 0.6, "logits_scaling": 2.0,
            "tie_word_embeddings": True,
        },
    ),
    "granitemoehybrid MoE": (
        "granitemoehybrid",
        {
            **_ATTENTION, **_MAMBA, "num_hidden_layers": 3, "num_local_experts": 4, "num_experts_per_tok": 2,
            "layer_types": ["mamba", "attention", "mamba"], "shared_intermediate_size": 24,
            "intermediate_size": 24, "position_embedding_type": "nope", "attention_multiplier": 0.2,
        },
    ),
    "bamba": (
        "bamba",
        {
            **_ATTENTION, **_MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1],
            "rope_parameters": _ROPE, "time_step_limit": [0.02, 0.4],
        },
    ),
    "falcon_h1": (
        "falcon_h1",
        {
            **_ATTENTION, **_MAMBA, "mamba_d_ssm": 64, "num_hidden_layers": 2, "head_dim": 16,
            "num_key_value_heads": 1, "rope_parameters": _ROPE, "mamba_rms_norm": False,
            "lm_head_multiplier": 0.5, "embedding_multiplier": 2.0, "mlp_multipliers": [0.8, 0.7],
            "key_multiplier": 0.6, "attention_out_multiplier": 0.9, "attention_in_multiplier": 1.1,
            "ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9], "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.8,
            "projectors_bias": True,
        },
    ),
    "falcon_h1 with a norm": (
        "falcon_h1",
        {
            **_ATTENTION, **_MAMBA, "mamba_d_ssm": 64, "num_hidden_layers": 2, "rope_parameters": _ROPE,
            "mamba_rms_norm": True, "mamba_norm_before_gate": False,
            "ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9],
        },
    ),
    "mamba2": (
        "mamba2",
        {
            "num_heads": 4, "head_dim": 16, "state_size": 16, "n_groups": 2, "expand": 2, "conv_kernel": 4,
            "chunk_size": CHUNK, "num_hidden_layers": 2, "use_bias": True,
        },
    ),
    "lfm2": (
        "lfm2",
        {
            **_ATTENTION, "num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"],
            "conv_L_cache": 3, "rope_parameters": _ROPE, "conv_bias": True, "block_auto_adjust_ff_dim": False,
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        {
            **_ATTENTION, **_DELTA, **_EXPERTS, "head_dim": 16, "mlp_only_layers": [1],
            "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.25},
        },
    ),
    "qwen3_5": (
        "qwen3_5",
        {
            **_ATTENTION, **_DELTA, "head_dim": 32,
            "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]},
        },
    ),
    "qwen3_5_moe": (
        "qwen3_5_moe",
        {
            **_ATTENTION, **_DELTA, **_EXPERTS, "head_dim": 32,
            "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]},
        },
    ),
    "olmo_hybrid": (
        "olmo_hybrid",
        {
            **_ATTENTION, **_DELTA, "linear_key_head_dim": 12, "linear_value_head_dim": 24,
            "linear_num_key_heads": 4, "rope_parameters": _ROPE,
        },
    ),
}  # fmt: skip
"""By the name of a case, the `model_type` and the fields of the config."""


def tiny_config(case: str, **overrides: Any) -> Any:
    """The config of a case, of a model of text and images where the checkpoints are of that kind."""
    from transformers import CONFIG_MAPPING

    model_type, fields = CONFIGS[case]
    config_class = CONFIG_MAPPING[model_type]
    fields = {**_COMMON, **fields, **overrides}
    if "text_config" in config_class.sub_configs:
        return config_class(text_config=fields)
    return config_class(**fields)


@contextmanager
def without_kernel_packages() -> Iterator[None]:
    """transformers' modules that are imported meanwhile compute with torch alone."""
    names = ("fla", "causal_conv1d", "mamba_ssm")
    known = {name: sys.modules[name] for name in names if name in sys.modules}
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(known)


def reference_model(case: str, dtype: torch.dtype = torch.float32, vocabulary: int = VOCABULARY) -> Any:
    """transformers' own model of a case, on a CPU, with random weights and eager attention and experts.

    A model is made once, by whichever test comes first. One in float64 has rotary frequencies in float64.
    """
    return _reference_model(case, dtype, vocabulary)


@cache
def _reference_model(case: str, dtype: torch.dtype, vocabulary: int) -> Any:
    from transformers import AutoModelForCausalLM

    config = tiny_config(case, vocab_size=vocabulary).get_text_config()
    mode = Float64Casts() if dtype == torch.float64 else nullcontext()
    with without_kernel_packages(), torch.random.fork_rng(devices=[]), mode:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
        )
    _take_torchs_functions(sys.modules[type(model).__module__])
    _draw_weights(model)
    return model.eval().requires_grad_(False)


def _take_torchs_functions(modelling: ModuleType) -> None:
    """The first import of this file beside fla-core has given it kernels that need a GPU."""
    for name, function in list(vars(modelling).items()):
        own = getattr(function, "__wrapped__", None)
        if name.startswith("torch_") and own is not None:
            known = frozenset(inspect.signature(own).parameters)
            setattr(modelling, name, partial(_call_with, own, known))


def _call_with(function: Any, known: frozenset[str], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **{name: value for name, value in kwargs.items() if name in known})


def served_model(case: str, dtype: torch.dtype = torch.float32) -> ServedModel:
    """The same model as we serve it."""
    return ServedModel(copy.deepcopy(reference_model(case, dtype)))


@torch.no_grad()
def reference_logits(
    case: str, tokens: Sequence[int], dtype: torch.dtype = torch.float32, vocabulary: int = VOCABULARY
) -> Tensor:
    """Logits of every token of a text, computed by transformers at once without a cache: [T, vocabulary]."""
    model = reference_model(case, dtype, vocabulary)
    ids = torch.tensor([list(tokens)])
    logits: Tensor = model(input_ids=ids, use_cache=False, return_dict=True).logits[0]
    return logits


def relative_error(got: Tensor, expected: Tensor) -> float:
    """The largest difference beside the largest value."""
    return float((got - expected).abs().max() / expected.abs().max())


def _draw_weights(model: Any) -> None:
    """Draw all weights so that no part of the model is trivial, and states last for tens of tokens."""
    generator = torch.Generator().manual_seed(1)

    def normal(tensor: Tensor) -> Tensor:
        drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        return drawn.to(tensor.dtype)

    def uniform(tensor: Tensor, low: float, high: float) -> Tensor:
        drawn = torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
        return (low + (high - low) * drawn).to(tensor.dtype)

    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            last = name.rpartition(".")[2]
            if name.endswith(("inv_freq", "mup_vector")):
                continue
            if last == "A_log":
                tensor.copy_(uniform(tensor, -2.0, 1.0))
            elif last == "dt_bias":
                tensor.copy_(uniform(tensor, -3.0, 0.0))
            elif tensor.dim() == 1:  # norms around their value of one, biases and the rest around zero
                is_norm = "norm" in name and float(tensor.mean()) == 1.0
                tensor.copy_(0.2 * normal(tensor) + (1.0 if is_norm or last == "D" else 0.0))
            elif "embed" in name:
                tensor.copy_(normal(tensor))
            else:
                tensor.copy_(normal(tensor) * tensor.shape[-1] ** -0.5)
