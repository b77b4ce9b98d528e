"""The architectures of transformers that are served, and what each needs in the cache.

A row of `ARCHITECTURES` names the classes of transformers, the forwards that take the place of theirs, and
how the states follow from the config.
"""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..files import CONFIG, ModelFolderError
from ..layers.weight_part import part_of
from ..model_parts import ModelShard, Part
from ..parallel_groups import ParallelGroups
from ..state_spec import (
    HybridStateSpec,
    StateTensor,
    gated_delta_net_states,
    mamba2_states,
    short_conv_states,
)
from .current_step import CurrentStep
from .fused_modules import ATTENTION_NAME, EXPERTS_NAME, register_with_transformers
from .layer_forwards import Branches, falcon_h1_branches, granite_branches, nemotron_h_branches, two_branches
from .mixer_forwards import GatedDeltaNetForward, Mamba2Forward, short_conv_forward
from .moved_hooks import names_moved_hooks

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

States = Callable[[Any, int, torch.dtype, torch.dtype, ParallelGroups], tuple[StateTensor, ...]]
"""From a config, the number of layers, the model's dtype, the dtype of recurrent states and the ranks."""

STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Architecture:
    """How models of one `model_type` are served.

    Attributes:
        prefix: of the names of transformers' classes.
        mixer: the class of the mixers, after `prefix`.
        forward: what replaces the mixers' forward.
        states: the states of all mixers.
        layer: the class of the layers whose branches are known, after `prefix`; None: no layer is replaced.
        branches: of such a layer. returned: what it returns.
        final_norm: the name of the norm after the last layer. None where another layer may follow one that
            is replaced: each layer then adds its last output itself.
        norm_offset: what the RMS norms add to their weights.
        is_stack: whether the model is an embedding, layers, a norm and a head, with nothing between them.
        activation: the field of the config with the activation after the convolutions, or None.
        mixer_layers, attention_layers, other_layers: the names in `config.layer_types`.
        splits: whether ranks can split the model.
    """

    prefix: str
    mixer: str
    forward: Callable[[nn.Module, int, CurrentStep], Callable[..., Tensor]]
    states: States
    layer: str | None = "DecoderLayer"
    branches: Callable[[Any], Branches] | None = None
    returned: Callable[[Tensor], Any] = lambda hidden: hidden
    final_norm: str | None = "norm"
    norm_offset: float = 0.0
    is_stack: bool = False
    activation: str | None = "hidden_act"
    mixer_layers: frozenset[str] = frozenset({"linear_attention"})
    attention_layers: frozenset[str] = frozenset({"full_attention"})
    other_layers: frozenset[str] = frozenset()
    splits: bool = True


_MAMBA2_FIELDS = {
    "heads": ("mamba_n_heads", "mamba_num_heads", "num_heads"),
    "head_dim": ("mamba_d_head", "mamba_head_dim", "head_dim"),
    "groups": ("mamba_n_groups", "n_groups"),
    "state_dim": ("mamba_d_state", "ssm_state_size", "state_size"),
    "conv_kernel": ("mamba_d_conv", "conv_kernel"),
    "grid": ("mamba_chunk_size", "chunk_size"),
}
"""What configs call the arguments of `mamba2_states`; the first name that a config has."""


def _mamba2(
    config: Any, layers: int, dtype: torch.dtype, state_dtype: torch.dtype, groups: ParallelGroups
) -> tuple[StateTensor, ...]:
    sizes = {
        argument: next(getattr(config, name) for name in names if hasattr(config, name))
        for argument, names in _MAMBA2_FIELDS.items()
    }
    sizes |= {name: part_of(sizes[name], groups) for name in ("heads", "groups")}
    return mamba2_states(layers=layers, conv_dtype=dtype, ssm_dtype=state_dtype, **sizes)


def _gated_delta_net(
    config: Any, layers: int, dtype: torch.dtype, state_dtype: torch.dtype, groups: ParallelGroups
) -> tuple[StateTensor, ...]:
    return gated_delta_net_states(
        layers=layers,
        key_heads=part_of(config.linear_num_key_heads, groups),
        key_dim=config.linear_key_head_dim,
        value_heads=part_of(config.linear_num_value_heads, groups),
        value_dim=config.linear_value_head_dim,
        conv_kernel=config.linear_conv_kernel_dim,
        conv_dtype=dtype,
        state_dtype=state_dtype,
    )


def _short_conv(
    config: Any, layers: int, dtype: torch.dtype, state_dtype: torch.dtype, groups: ParallelGroups
) -> tuple[StateTensor, ...]:
    channels = part_of(config.hidden_size, groups)
    return short_conv_states(layers=layers, channels=channels, conv_kernel=config.conv_L_cache, dtype=dtype)


def _qwen(prefix: str) -> Architecture:
    return Architecture(
        prefix, "GatedDeltaNet", GatedDeltaNetForward, _gated_delta_net,
        norm_offset=1.0, branches=two_branches("linear_attn", "mlp"), is_stack=True,
    )  # fmt: skip


ARCHITECTURES: dict[str, Architecture] = {
    "bamba": Architecture(
        "Bamba", "Mixer", Mamba2Forward, _mamba2,
        branches=two_branches("mamba", "feed_forward", ("input_layernorm", "pre_ff_layernorm")),
        returned=lambda hidden: (hidden, None), final_norm="final_layernorm", is_stack=True,
    ),
    "falcon_h1": Architecture(
        "FalconH1", "Mixer", Mamba2Forward, _mamba2,
        branches=falcon_h1_branches, returned=lambda hidden: (hidden,), final_norm="final_layernorm",
        mixer_layers=frozenset({"hybrid"}), attention_layers=frozenset({"hybrid"}),
    ),
    "granitemoehybrid": Architecture(
        "GraniteMoeHybrid", "MambaLayer", Mamba2Forward, _mamba2,
        branches=granite_branches,
    ),
    "lfm2": Architecture(
        "Lfm2", "ShortConv", short_conv_forward, _short_conv,
        branches=two_branches("conv", "feed_forward", ("operator_norm", "ffn_norm")),
        final_norm="embedding_norm", is_stack=True,
        activation=None, mixer_layers=frozenset({"conv"}),
    ),
    "mamba2": Architecture(
        "Mamba2", "Mixer", Mamba2Forward, _mamba2, layer=None,
        final_norm=None,  # its residual stream may be wider than its weights
        attention_layers=frozenset(),
    ),
    "nemotron_h": Architecture(
        "NemotronH", "Mamba2Mixer", Mamba2Forward, _mamba2,
        layer="Block", branches=nemotron_h_branches, final_norm="norm_f", is_stack=True,
        activation="mamba_hidden_act", other_layers=frozenset({"mlp", "moe"}),
    ),
    "olmo_hybrid": Architecture(
        "OlmoHybrid", "GatedDeltaNet", GatedDeltaNetForward, _gated_delta_net,
        layer="LinearAttentionDecoderLayer", branches=two_branches("linear_attn", "mlp"), final_norm=None,
        splits=False,
    ),
    "qwen3_next": _qwen("Qwen3Next"),
    "qwen3_5_text": _qwen("Qwen3_5"),
    "qwen3_5_moe_text": _qwen("Qwen3_5Moe"),
}  # fmt: skip
"""By the `model_type` of the text model."""

WRAPPERS = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
"""Models of more than text, by `model_type`, and the text model in their `text_config`."""


def read_config(path: Path) -> "PreTrainedConfig":
    """The config in a file, or in a folder's config.json; a ModelFolderError where it cannot be read."""
    from transformers import AutoConfig

    file = path / CONFIG if path.is_dir() else path
    if not file.is_file():
        raise ModelFolderError(f"{file} is no file; accepted: a config in JSON, or a folder with {CONFIG}")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            str(file), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # each class of configs checks its values in its own way
        reason = str(error).partition("\n")[0]
        raise ModelFolderError(f"transformers cannot read {file}: {reason}") from error
    return config


def text_config(config: "PreTrainedConfig") -> "PreTrainedConfig":
    """A copy of the config of the text model in `config`; a ValueError names what of it is not served."""
    text: Any = config
    if config.model_type in WRAPPERS:
        text = config.get_text_config()
        if text.model_type != WRAPPERS[config.model_type]:
            raise ValueError(
                f"text_config.model_type is {text.model_type!r}; accepted in {config.model_type}: "
                f"{WRAPPERS[config.model_type]!r}"
            )
    if text.model_type not in ARCHITECTURES:
        model_types = sorted([*ARCHITECTURES, *WRAPPERS])
        raise ValueError(f"model_type is {text.model_type!r}; accepted: {', '.join(model_types)}")
    text = copy.deepcopy(text)
    text.tie_word_embeddings = text.tie_word_embeddings or config.tie_word_embeddings
    _check_features(text)
    return text


def _check_features(text: Any) -> None:
    """Raise a ValueError that names what the config asks for and is not served."""
    architecture = ARCHITECTURES[text.model_type]
    if getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True):
        accepted = "None, attention sees the whole sequence"
        raise ValueError(f"sliding_window is {text.sliding_window}; accepted: {accepted}")
    layer_types = architecture.mixer_layers | architecture.attention_layers | architecture.other_layers
    for name in text.layer_types:
        if name not in layer_types:
            accepted = ", ".join(sorted(layer_types))
            raise ValueError(f"layer_types has {name!r}; accepted in {text.model_type}: {accepted}")
    activation = None if architecture.activation is None else getattr(text, architecture.activation)
    if activation not in (None, "silu", "swish"):
        raise ValueError(
            f"{architecture.activation} is {activation!r}, which also follows the mixers' convolutions; "
            "accepted: 'silu'"
        )
    rope_type = (getattr(text, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope_type in ("dynamic", "longrope"):
        raise ValueError(
            f"rope_type is {rope_type!r}, whose frequencies depend on the longest sequence of a step; "
            "accepted: types whose frequencies are fixed"
        )


def state_spec(
    config: Any, dtype: torch.dtype, device: torch.device | str = "cpu", groups: ParallelGroups | None = None
) -> HybridStateSpec:
    """What a context allocates for a `text_config`; recurrent states have `_state_dtype`, others `dtype`."""
    groups = groups or ParallelGroups()
    architecture = ARCHITECTURES[config.model_type]
    num_mixers = sum(name in architecture.mixer_layers for name in config.layer_types)
    num_attention = sum(name in architecture.attention_layers for name in config.layer_types)
    kv_heads = Part(0, 1, 1)
    head_dim = 1
    if num_attention:
        kv_heads = part_of(config.num_key_value_heads, groups)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return HybridStateSpec(
        states=architecture.states(config, num_mixers, dtype, _state_dtype(config, dtype), groups),
        num_attention_layers=num_attention,
        num_kv_heads=kv_heads.count,
        head_dim=head_dim,
        kv_dtype=dtype,
        vocab_size=config.vocab_size,
        device=torch.device(device),
        supports_replay=True,
        strided_blocks=True,
        shard=ModelShard(attention_layers=Part(0, num_attention, num_attention), kv_heads=kv_heads),
        groups=groups,
        model=f"{config.model_type} {config.to_diff_dict()}",
    )


def _state_dtype(config: Any, dtype: torch.dtype) -> torch.dtype:
    """The first field that is set; at least float64 in a float64 model."""
    for field in ("mamba_ssm_cache_dtype", "mamba_ssm_dtype"):
        if (value := getattr(config, field, None)) is not None:
            name = str(value).removeprefix("torch.")
            if name not in STATE_DTYPES:
                raise ValueError(f"{field} is {name!r}; accepted: {', '.join(STATE_DTYPES)}")
            return torch.float64 if dtype == torch.float64 else STATE_DTYPES[name]
    return torch.promote_types(dtype, torch.float32)


@names_moved_hooks
def skeleton(config: "PreTrainedConfig", dtype: torch.dtype) -> "PreTrainedModel":
    """The text model of a config on the meta device; ValueError for what is not served."""
    from transformers import AutoModelForCausalLM

    text = text_config(config)
    state_spec(text, dtype)  # raises for a dtype of states that is not served
    register_with_transformers()
    with torch.device("meta"), warnings.catch_warnings():
        # transformers imports it for its own forwards; it warns where there is no GPU.
        warnings.filterwarnings("ignore", module=r"fla\b")
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            text, dtype=dtype, attn_implementation=ATTENTION_NAME, experts_implementation=EXPERTS_NAME
        )
    wide_names = [f".{name}." for name in getattr(model, "_keep_in_fp32_modules_strict", None) or ()]
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if dtype.itemsize < 4 and any(part in f".{name}." for part in wide_names):
            tensor.data = tensor.data.float()
    return model.eval().requires_grad_(False)


def restore_buffers(model: "PreTrainedModel", device: torch.device | str) -> None:
    """Compute the buffers that no file of weights holds: rotary frequencies, and Falcon-H1's multipliers."""
    config: Any = model.config
    for path, module in model.named_modules():
        values: dict[str, Tensor] = {}
        if hasattr(module, "original_inv_freq"):
            with torch.device("cpu"):
                values = dict(type(module)(config=module.config).named_buffers())
        elif hasattr(module, "mup_vector"):
            with torch.device("cpu"):
                values = {"mup_vector": import_module(type(module).__module__).compute_mup_vector(config)}
        for name in module._non_persistent_buffers_set:
            if name not in values:
                raise ValueError(f"the buffer {path}.{name} is in no file of weights and has no known values")
            setattr(module, name, values[name].to(device, getattr(module, name).dtype))
