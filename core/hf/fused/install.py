"""Which modules of which architecture are replaced."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..current_step import CurrentStep
from . import layers, mlps
from .attention import AttentionForward, AttentionShape
from .layers import LayerForward, NamedBranches
from .norms import FinalNormForward, NormForward
from .stack import LayerStack


@dataclass(frozen=True)
class Fusion:
    """What is replaced in the models of one architecture, beside their mixers.

    Args:
        prefix: of the names of transformers' classes.
        norm_offset: what the RMS norms add to their weights.
        layer: the class of the layers whose branches are known, behind `prefix`; None: no layer is replaced.
        branches: of such a layer.
        final_norm: the name of the norm behind the last layer. None where another layer may follow one that
            is replaced: each layer then adds its last output itself.
        returned: what such a layer returns.
        mlp: the forward of the MLPs; None: they are left as they are.
        attention: the attention; None: it is left as it is.
        is_stack: whether the model is an embedding, layers, a norm and a head, with nothing between them.
    """

    prefix: str
    norm_offset: float = 0.0
    layer: str | None = None
    branches: Callable[[Any], NamedBranches] | None = None
    final_norm: str | None = None
    returned: Callable[[Tensor], Any] = lambda hidden: hidden
    mlp: Callable[[Any, CurrentStep], Callable[[Tensor], Tensor]] | None = mlps.gated_mlp
    attention: AttentionShape | None = None
    is_stack: bool = False


def _qwen(prefix: str) -> Fusion:
    norms = ("q_norm", "k_norm")
    return Fusion(
        prefix,
        norm_offset=1.0,
        layer="DecoderLayer",
        branches=layers.qwen_branches,
        final_norm="norm",
        attention=AttentionShape(norms, norm_offset=1.0, is_gated=True),
        is_stack=True,
    )


FUSIONS: dict[str, Fusion] = {
    "bamba": Fusion(
        "Bamba", layer="DecoderLayer", branches=layers.bamba_branches, final_norm="final_layernorm",
        returned=lambda hidden: (hidden, None), attention=AttentionShape(), is_stack=True,
    ),
    "falcon_h1": Fusion(
        "FalconH1", layer="DecoderLayer", branches=layers.falcon_h1_branches, final_norm="final_layernorm",
        returned=lambda hidden: (hidden,), mlp=mlps.falcon_h1_mlp, attention=AttentionShape(),
    ),
    "granitemoehybrid": Fusion(
        "GraniteMoeHybrid", layer="DecoderLayer", branches=layers.granite_branches, final_norm="norm",
        mlp=mlps.granite_mlp, attention=AttentionShape(),
    ),
    "lfm2": Fusion(
        "Lfm2", layer="DecoderLayer", branches=layers.lfm2_branches, final_norm="embedding_norm",
        mlp=mlps.lfm2_mlp, attention=AttentionShape(("q_layernorm", "k_layernorm"), out="out_proj"),
        is_stack=True,
    ),
    "mamba2": Fusion("Mamba2", mlp=None),  # its residual stream may be wider than its weights
    "nemotron_h": Fusion(
        "NemotronH", layer="Block", branches=layers.nemotron_h_branches, final_norm="norm_f",
        mlp=mlps.relu_squared_mlp, attention=AttentionShape(), is_stack=True,
    ),
    "olmo_hybrid": Fusion("OlmoHybrid", layer="LinearAttentionDecoderLayer", branches=layers.olmo_branches),
    "qwen3_next": _qwen("Qwen3Next"),
    "qwen3_5_text": _qwen("Qwen3_5"),
    "qwen3_5_moe_text": _qwen("Qwen3_5Moe"),
}  # fmt: skip
"""By the `model_type` of the text model."""


def install(model: nn.Module, config: Any, step: CurrentStep) -> LayerStack | None:
    """Replace the forwards of a model's norms, layers, MLPs, attention and head.

    Args:
        model: a causal language model of transformers. Modules that are not known stay as they are.
        config: of the text model.
        step: the step that the model computes now.

    Returns: what runs the layers; None where transformers' own forward runs them.
    """
    fusion = FUSIONS[config.model_type]
    norms: dict[nn.Module, NormForward] = {}
    for module in _modules(model, fusion.prefix + "RMSNorm"):
        norms[module] = NormForward(module, step, fusion.norm_offset)
        module.forward = norms[module]
    if fusion.mlp is not None and getattr(config, "mlp_hidden_act", "relu2") == "relu2":
        for module in _modules(model, fusion.prefix + "MLP"):
            module.forward = fusion.mlp(module, step)
    if fusion.attention is not None:
        for module in _modules(model, fusion.prefix + "Attention"):
            module.forward = AttentionForward(module, step, fusion.attention)
    if fusion.layer is not None and fusion.branches is not None:
        for layer in _modules(model, fusion.prefix + fusion.layer):
            branches = [(norms[getattr(layer, name)], branch) for name, branch in fusion.branches(layer)]
            layer.forward = LayerForward(branches, step, fusion.final_norm is None, fusion.returned)
    _install_head(model, config, step)
    if fusion.final_norm is None:
        return None
    base: Any = model.base_model
    final = getattr(base, fusion.final_norm)
    final.forward = FinalNormForward(norms[final])
    if not fusion.is_stack:
        return None
    return LayerStack(base, [layer.forward for layer in base.layers], norms[final])


def _install_head(model: nn.Module, config: Any, step: CurrentStep) -> None:
    """Logits in float32 from the product itself, where the head is a product and nothing else.

    Ranks that split the model give each other their tokens' logits.
    """
    head: Any = model.lm_head
    if type(head) is not nn.Linear or head.bias is not None:
        return

    def forward(hidden: Tensor) -> Tensor:
        logits = step.kernels.head_product(hidden, head.weight)
        size = step.groups.tensor_size
        if size > 1:
            most = -(-config.vocab_size // size)
            own = F.pad(logits, (0, most - logits.shape[-1]))
            logits = step.groups.gather_columns(own)[..., : config.vocab_size].contiguous()
        return logits

    head.forward = forward


def _modules(model: nn.Module, name: str) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__ == name]
