"""Decoder layers of transformers' models, and which modules of which architecture are replaced."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .current_step import CurrentStep
from .fused_modules import (
    AttentionForward,
    AttentionShape,
    NormForward,
    gated_mlp,
    granite_mlp,
    lfm2_mlp,
    relu_squared_mlp,
    scaled,
)  # fmt: skip

Branch = Callable[..., Tensor]
"""From a normalised [1, T, hidden] and the keyword arguments of the layer to what the layer adds."""

NamedBranches = Sequence[tuple[str, Branch]]
"""The names of a layer's norms, each with what is computed from the norm."""


class LayerForward:
    """The forward of a decoder layer.

    The output of the last branch waits in the step, and the next norm adds it to the residual stream: a sum
    and the norm after it are one launch. Ranks that split the model add up what their branches give. With
    `adds`, the layer itself adds its last output, for a successor that does not.
    """

    def __init__(
        self, branches: Sequence[tuple[NormForward, Branch]], step: CurrentStep, adds: bool,
        returned: Callable[[Tensor], Any],
    ) -> None:  # fmt: skip
        self._branches, self._step, self._adds, self._returned = branches, step, adds, returned

    def __call__(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        return self._returned(self.added(hidden_states, **kwargs))

    def added(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """The residual stream after the layer, or in front of what waits in the step."""
        for norm, branch in self._branches:
            hidden_states, normed = norm.after_waiting(hidden_states)
            self._step.waiting = self._step.summed(branch(normed, **kwargs))
        if self._adds and self._step.waiting is not None:
            hidden_states, self._step.waiting = hidden_states + self._step.waiting, None
        return hidden_states


def _attend(attention: Any, normed: Tensor, **kwargs: Any) -> Tensor:
    attended: Tensor = attention(hidden_states=normed, **kwargs)[0]
    return attended


def _plain(module: Any) -> Branch:
    """A module that needs nothing but its input, and may return more than its output."""

    def branch(normed: Tensor, **_: Any) -> Tensor:
        out: Any = module(normed)
        computed: Tensor = out[0] if isinstance(out, tuple) else out
        return computed

    return branch


def _mixer(layer: Any, name: str) -> Branch:
    """The mixer `name` of a layer that has one, else the layer's attention."""
    mixer = getattr(layer, name, None)
    if mixer is not None:
        return _plain(mixer)
    return lambda normed, **kwargs: _attend(layer.self_attn, normed, **kwargs)


def two_branches(
    mixer: str, mlp: str, norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
) -> Callable[[Any], NamedBranches]:
    """A mixer or attention, then an MLP or a mixture of experts."""
    return lambda layer: [(norms[0], _mixer(layer, mixer)), (norms[1], _plain(getattr(layer, mlp)))]


def nemotron_h_branches(layer: Any) -> NamedBranches:
    """One mixer, MLP, mixture of experts or attention."""
    if layer.block_type != "full_attention":
        return [("norm", _plain(layer.mixer))]
    return [("norm", lambda normed, **kwargs: _attend(layer.mixer, normed, **kwargs))]


def granite_branches(layer: Any) -> NamedBranches:
    """A Mamba-2 mixer or attention, then experts or an MLP, each times a multiplier."""
    mixer = _mixer(layer, "mamba")

    def first(normed: Tensor, **kwargs: Any) -> Tensor:
        return scaled(mixer(normed, **kwargs), layer.residual_multiplier)

    def second(normed: Tensor, **_: Any) -> Tensor:
        out: Tensor = layer.shared_mlp(normed)
        if layer.has_experts:
            out = layer.block_sparse_moe(normed) + out
        return scaled(out, layer.residual_multiplier)

    return [("input_layernorm", first), ("post_attention_layernorm", second)]


def falcon_h1_branches(layer: Any) -> NamedBranches:
    """A Mamba-2 mixer and attention of one input, each with multipliers, then an MLP."""

    def both(normed: Tensor, mamba_attention_mask: Any = None, **kwargs: Any) -> Tensor:
        mixed = scaled(layer.mamba(hidden_states=normed), layer.ssm_out_multiplier)
        attended = _attend(layer.self_attn, scaled(normed, layer.attention_in_multiplier), **kwargs)
        return mixed + scaled(attended, layer.attn_out_multiplier)

    return [("input_layernorm", both), ("pre_ff_layernorm", _plain(layer.feed_forward))]


class LayerStack:
    """A base model whose embeddings go to the layers as they are, without transformers' own forward.

    That forward makes masks, caches and output objects that a served model has no use for, and handles
    keyword arguments in every layer: about as much time of the host as three layers.
    """

    def __init__(self, base: Any, layers: Sequence[LayerForward], final_norm: NormForward) -> None:
        self._embeddings = base.get_input_embeddings()
        self._rotary = getattr(base, "rotary_emb", None)
        self._layers = layers
        self._final_norm = final_norm

    def __call__(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Token ids and positions [T] -> what the head reads, [T, hidden]."""
        hidden: Tensor = self._embeddings(token_ids[None])
        angles = None if self._rotary is None else self._rotary(hidden, positions[None])
        for layer in self._layers:
            hidden = layer.added(hidden, position_embeddings=angles)
        return self._final_norm.after_waiting(hidden)[1][0]


@dataclass(frozen=True)
class Fusion:
    """What is replaced in the models of one architecture, apart from their mixers.

    Attributes:
        prefix: of the names of transformers' classes.
        norm_offset: what the RMS norms add to their weights.
        layer: the class of the layers whose branches are known, after `prefix`; None: no layer is replaced.
        branches: of such a layer. returned: what it returns.
        final_norm: the name of the norm after the last layer. None where another layer may follow one that
            is replaced: each layer then adds its last output itself.
        mlp, attention: their forwards; None: they stay as they are.
        is_stack: whether the model is an embedding, layers, a norm and a head, with nothing between them.
    """

    prefix: str
    norm_offset: float = 0.0
    layer: str | None = None
    branches: Callable[[Any], NamedBranches] | None = None
    final_norm: str | None = None
    returned: Callable[[Tensor], Any] = lambda hidden: hidden
    mlp: Callable[[Any, CurrentStep], Callable[[Tensor], Tensor]] | None = gated_mlp
    attention: AttentionShape | None = None
    is_stack: bool = False


def _qwen(prefix: str) -> Fusion:
    attention = AttentionShape(("q_norm", "k_norm"), norm_offset=1.0, is_gated=True)
    return Fusion(
        prefix, norm_offset=1.0, layer="DecoderLayer", branches=two_branches("linear_attn", "mlp"),
        final_norm="norm", attention=attention, is_stack=True,
    )  # fmt: skip


FUSIONS: dict[str, Fusion] = {
    "bamba": Fusion(
        "Bamba", layer="DecoderLayer", final_norm="final_layernorm", attention=AttentionShape(),
        branches=two_branches("mamba", "feed_forward", ("input_layernorm", "pre_ff_layernorm")),
        returned=lambda hidden: (hidden, None), is_stack=True,
    ),
    "falcon_h1": Fusion(
        "FalconH1", layer="DecoderLayer", branches=falcon_h1_branches, final_norm="final_layernorm",
        returned=lambda hidden: (hidden,), attention=AttentionShape(),
    ),
    "granitemoehybrid": Fusion(
        "GraniteMoeHybrid", layer="DecoderLayer", branches=granite_branches, final_norm="norm",
        mlp=granite_mlp, attention=AttentionShape(),
    ),
    "lfm2": Fusion(
        "Lfm2", layer="DecoderLayer", final_norm="embedding_norm",
        branches=two_branches("conv", "feed_forward", ("operator_norm", "ffn_norm")),
        mlp=lfm2_mlp, attention=AttentionShape(("q_layernorm", "k_layernorm"), out="out_proj"),
        is_stack=True,
    ),
    "mamba2": Fusion("Mamba2", mlp=None),  # its residual stream may be wider than its weights
    "nemotron_h": Fusion(
        "NemotronH", layer="Block", branches=nemotron_h_branches, final_norm="norm_f",
        mlp=relu_squared_mlp, attention=AttentionShape(), is_stack=True,
    ),
    "olmo_hybrid": Fusion(
        "OlmoHybrid", layer="LinearAttentionDecoderLayer", branches=two_branches("linear_attn", "mlp")
    ),
    "qwen3_next": _qwen("Qwen3Next"),
    "qwen3_5_text": _qwen("Qwen3_5"),
    "qwen3_5_moe_text": _qwen("Qwen3_5Moe"),
}  # fmt: skip
"""By the `model_type` of the text model."""


def install(model: nn.Module, config: Any, step: CurrentStep) -> LayerStack | None:
    """Replace the forwards of known modules; returns what runs the layers, or None if transformers does."""
    fusion = FUSIONS[config.model_type]
    norms: dict[nn.Module, NormForward] = {}
    for module in modules_of(model, fusion.prefix + "RMSNorm"):
        norms[module] = NormForward(module, step, fusion.norm_offset)
        module.forward = norms[module]
    if fusion.mlp is not None and getattr(config, "mlp_hidden_act", "relu2") == "relu2":
        for module in modules_of(model, fusion.prefix + "MLP"):
            module.forward = fusion.mlp(module, step)
    if fusion.attention is not None:
        for module in modules_of(model, fusion.prefix + "Attention"):
            module.forward = AttentionForward(module, step, fusion.attention)
    if fusion.layer is not None and fusion.branches is not None:
        for layer in modules_of(model, fusion.prefix + fusion.layer):
            branches = [(norms[getattr(layer, name)], branch) for name, branch in fusion.branches(layer)]
            layer.forward = LayerForward(branches, step, fusion.final_norm is None, fusion.returned)
    _install_head(model, config, step)
    if fusion.final_norm is None:
        return None
    base: Any = model.base_model
    final = getattr(base, fusion.final_norm)
    final.forward = lambda hidden_states: norms[final].after_waiting(hidden_states)[1]
    if not fusion.is_stack:
        return None
    return LayerStack(base, [layer.forward for layer in base.layers], norms[final])


def _install_head(model: nn.Module, config: Any, step: CurrentStep) -> None:
    """Logits in float32 from the product itself, where the head is a product and nothing else."""
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


def modules_of(model: nn.Module, name: str) -> list[nn.Module]:
    """The modules of a model whose class has this name."""
    return [module for module in model.modules() if type(module).__name__ == name]
