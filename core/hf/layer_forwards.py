"""Decoder layers of transformers' models, and what replaces their modules."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from ..layers.over_ranks import head_logits
from .current_step import CurrentStep
from .fused_modules import NormForward, mlp_forward, scaled

Branch = Callable[..., Tensor]
"""From a normalised [1, T, hidden] and the keyword arguments of the layer to what the layer adds."""

Branches = Sequence[tuple[str, Branch]]
"""The names of a layer's norms, each with what is computed from the norm."""


class LayerForward:
    """The forward of a decoder layer. The next norm adds its last output; with `adds`, the layer does."""

    def __init__(
        self, branches: Sequence[tuple[NormForward, Branch]], step: CurrentStep, adds: bool,
        returned: Callable[[Tensor], Any],
    ) -> None:  # fmt: skip
        self._branches = branches
        self._step = step
        self._adds = adds
        self._returned = returned

    def __call__(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        return self._returned(self.run(hidden_states, **kwargs))

    def run(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """The residual stream after the layer, without the step's pending output."""
        for norm, branch in self._branches:
            hidden_states, normed = norm.add_pending(hidden_states)
            self._step.pending_output = self._step.summed(branch(normed, **kwargs))
        if self._adds and self._step.pending_output is not None:
            hidden_states = hidden_states + self._step.pending_output
            self._step.pending_output = None
        return hidden_states


def _branch(module: Any, is_attention: bool = False) -> Branch:
    """A module, which may return more than its output; only attention needs more than its input."""

    def branch(normed: Tensor, **kwargs: Any) -> Tensor:
        out: Any = module(normed, **kwargs) if is_attention else module(normed)
        computed: Tensor = out[0] if isinstance(out, tuple) else out
        return computed

    return branch


def _mixer(layer: Any, name: str) -> Branch:
    """The mixer `name` of a layer that has one, else the layer's attention."""
    mixer = getattr(layer, name, None)
    return _branch(layer.self_attn, is_attention=True) if mixer is None else _branch(mixer)


def two_branches(
    mixer: str, mlp: str, norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
) -> Callable[[Any], Branches]:
    """A mixer or attention, then an MLP or a mixture of experts."""
    return lambda layer: [(norms[0], _mixer(layer, mixer)), (norms[1], _branch(getattr(layer, mlp)))]


def nemotron_h_branches(layer: Any) -> Branches:
    """One mixer, MLP, mixture of experts or attention."""
    return [("norm", _branch(layer.mixer, layer.block_type == "full_attention"))]


def granite_branches(layer: Any) -> Branches:
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


def falcon_h1_branches(layer: Any) -> Branches:
    """A Mamba-2 mixer and attention of one input, each with multipliers, then an MLP."""

    def both(normed: Tensor, **kwargs: Any) -> Tensor:
        mixed = scaled(layer.mamba(hidden_states=normed), layer.ssm_out_multiplier)
        attended = layer.self_attn(scaled(normed, layer.attention_in_multiplier), **kwargs)[0]
        return mixed + scaled(attended, layer.attn_out_multiplier)

    return [("input_layernorm", both), ("pre_ff_layernorm", _branch(layer.feed_forward))]


class LayerStack:
    """A base model without transformers' own forward, which takes the CPU as long as about three layers."""

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
            hidden = layer.run(hidden, position_embeddings=angles)
        return self._final_norm.add_pending(hidden)[1][0]


def replace_forwards(
    model: nn.Module, config: Any, architecture: Any, step: CurrentStep
) -> LayerStack | None:
    """Replace the forwards that an `Architecture` names; returns what runs layers, if not transformers."""
    norms: dict[nn.Module, NormForward] = {}
    for module in modules_of(model, architecture.prefix + "RMSNorm"):
        norms[module] = NormForward(module, step, architecture.norm_offset)
        module.forward = norms[module]
    if getattr(config, "mlp_hidden_act", "relu2") == "relu2":
        for module in modules_of(model, architecture.prefix + "MLP"):
            module.forward = mlp_forward(module, step)
    if architecture.layer is not None and architecture.branches is not None:
        for layer in modules_of(model, architecture.prefix + architecture.layer):
            norms_and_branches = architecture.branches(layer)
            branches = [(norms[getattr(layer, name)], branch) for name, branch in norms_and_branches]
            adds = architecture.final_norm is None
            layer.forward = LayerForward(branches, step, adds, architecture.returned)
    _install_head(model, config, step)
    if architecture.final_norm is None:
        return None
    base: Any = model.base_model
    final = getattr(base, architecture.final_norm)
    final.forward = lambda hidden_states: norms[final].add_pending(hidden_states)[1]
    if not architecture.is_stack:
        return None
    return LayerStack(base, [layer.forward for layer in base.layers], norms[final])


def _install_head(model: nn.Module, config: Any, step: CurrentStep) -> None:
    """Logits in float32 from the product itself, where the head is a product and nothing else."""
    head: Any = model.lm_head
    if type(head) is not nn.Linear or head.bias is not None:
        return

    head.forward = lambda hidden: head_logits(
        hidden, head.weight, config.vocab_size, step.ranks, step.kernels
    )


def modules_of(model: nn.Module, name: str) -> list[nn.Module]:
    """The modules of a model whose class has this name."""
    return [module for module in model.modules() if type(module).__name__ == name]
