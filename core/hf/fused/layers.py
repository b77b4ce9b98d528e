"""Decoder layers of transformers' models whose branches each normalise the residual stream first."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..current_step import CurrentStep
from .norms import NormForward

Branch = Callable[..., Tensor]
"""From a normalised [1, T, hidden] and the keyword arguments of the layer to what the layer adds."""

NamedBranches = Sequence[tuple[str, Branch]]
"""The names of a layer's norms, each with what is computed from the norm."""


class LayerForward:
    """The forward of a decoder layer.

    The output of the last branch waits in the step, and the next norm adds it to the residual stream: a sum
    and the norm behind it are one launch. Ranks that split the model add up what their branches give.

    Args:
        branches: the norms, and what is computed from each.
        step: the step that the model computes now.
        adds: whether the layer itself adds its last output, for a successor that does not.
        returned: from the residual stream to what the layer of transformers returns.
    """

    def __init__(
        self,
        branches: Sequence[tuple[NormForward, Branch]],
        step: CurrentStep,
        adds: bool,
        returned: Callable[[Tensor], Any],
    ) -> None:
        self._branches = branches
        self._step = step
        self._adds = adds
        self._returned = returned

    def __call__(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        return self._returned(self.added(hidden_states, **kwargs))

    def added(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """The residual stream behind the layer, or in front of what waits in the step."""
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
    """A module that needs nothing but its input."""

    def branch(normed: Tensor, **_: Any) -> Tensor:
        out: Tensor = module(normed)
        return out

    return branch


def nemotron_h_branches(layer: Any) -> NamedBranches:
    """One mixer, MLP, mixture of experts or attention."""
    if layer.block_type != "full_attention":
        return [("norm", _plain(layer.mixer))]
    return [("norm", lambda normed, **kwargs: _attend(layer.mixer, normed, **kwargs))]


def qwen_branches(layer: Any) -> NamedBranches:
    """A gated delta net or attention, then an MLP or a mixture of experts."""

    def mlp(normed: Tensor, **_: Any) -> Tensor:
        out: Any = layer.mlp(normed)
        computed: Tensor = out[0] if isinstance(out, tuple) else out
        return computed

    return [
        ("input_layernorm", _mixer(layer, "linear_attn")),
        ("post_attention_layernorm", mlp),
    ]


def bamba_branches(layer: Any) -> NamedBranches:
    """A Mamba-2 mixer or attention, then an MLP."""
    return [("input_layernorm", _mixer(layer, "mamba")), ("pre_ff_layernorm", _plain(layer.feed_forward))]


def lfm2_branches(layer: Any) -> NamedBranches:
    """A short convolution or attention, then an MLP."""
    return [("operator_norm", _mixer(layer, "conv")), ("ffn_norm", _plain(layer.feed_forward))]


def olmo_branches(layer: Any) -> NamedBranches:
    """A gated delta net, then an MLP."""
    return [("input_layernorm", _plain(layer.linear_attn)), ("post_attention_layernorm", _plain(layer.mlp))]


def granite_branches(layer: Any) -> NamedBranches:
    """A Mamba-2 mixer or attention, then experts or an MLP, each times a multiplier."""
    mixer = _mixer(layer, "mamba")

    def first(normed: Tensor, **kwargs: Any) -> Tensor:
        return _scaled(mixer(normed, **kwargs), layer.residual_multiplier)

    def second(normed: Tensor, **_: Any) -> Tensor:
        out: Tensor = layer.shared_mlp(normed)
        if layer.has_experts:
            out = layer.block_sparse_moe(normed) + out
        return _scaled(out, layer.residual_multiplier)

    return [("input_layernorm", first), ("post_attention_layernorm", second)]


def falcon_h1_branches(layer: Any) -> NamedBranches:
    """A Mamba-2 mixer beside attention, each with multipliers, then an MLP."""

    def both(normed: Tensor, mamba_attention_mask: Any = None, **kwargs: Any) -> Tensor:
        mixed = _scaled(layer.mamba(hidden_states=normed), layer.ssm_out_multiplier)
        attended = _attend(layer.self_attn, _scaled(normed, layer.attention_in_multiplier), **kwargs)
        return mixed + _scaled(attended, layer.attn_out_multiplier)

    return [("input_layernorm", both), ("pre_ff_layernorm", _plain(layer.feed_forward))]


def _mixer(layer: Any, name: str) -> Branch:
    """The mixer `name` of a layer that has one, else the layer's attention."""
    mixer = getattr(layer, name, None)
    if mixer is not None:
        return _plain(mixer)
    return lambda normed, **kwargs: _attend(layer.self_attn, normed, **kwargs)


def _scaled(x: Tensor, multiplier: float) -> Tensor:
    return x if multiplier == 1 else x * multiplier
