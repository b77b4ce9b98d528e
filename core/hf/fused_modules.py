"""Norms, attention and MLPs of transformers' models in fewer launches: they round less often. Experts."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..layers.mixer_step import attend
from ..model_parts import Part
from .current_step import CurrentStep
from .joint_linear import JointLinear

ATTENTION_NAME = "mambaslots"  # the `attn_implementation` of served models
EXPERTS_NAME = "mambaslots"  # the `experts_implementation` of served models


def eps_of(norm: Any) -> float:
    """What a norm of transformers adds to the mean square, under either of its names."""
    eps: float = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
    return eps


class NormForward:
    """The forward of an RMS norm: x / rms(x) * (weight + offset), in one launch on a GPU."""

    def __init__(self, norm: nn.Module, step: CurrentStep, offset: float) -> None:
        self._norm: Any = norm
        self._original = norm.forward
        self._step = step
        self._offset = offset
        self._eps = eps_of(norm)

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """[..., n] -> [..., n] in the same dtype."""
        weight = self._norm.weight
        if weight.dtype != hidden_states.dtype:  # the dtype of the result is then a matter of the module
            original: Tensor = self._original(hidden_states)
            return original
        return self._step.kernels.rms_norm(hidden_states, weight, self._eps, offset=self._offset)

    def add_pending(self, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream plus the step's pending output, and the norm of this sum; no output pends."""
        output = self._step.pending_output
        self._step.pending_output = None
        if output is None:
            return residual, self(residual)
        weight = self._norm.weight
        if not weight.dtype == residual.dtype == output.dtype:
            residual = residual + output
            return residual, self(residual)
        return self._step.kernels.add_rms_norm(residual, output, weight, self._eps, offset=self._offset)


_NORMS: tuple[tuple[str, ...], ...] = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"))


class AttentionForward:
    """Attention over the paged KV cache; its queries and keys may be normalised, rotated and gated."""

    def __init__(self, attention: Any, layer: int, step: CurrentStep, offset: float) -> None:
        self._attention = attention
        self._layer = layer
        self._step = step
        self._offset = offset
        head_dim = attention.head_dim
        projections = ("q_proj", "k_proj", "v_proj")
        self._joint = JointLinear(attention, projections)
        self._out = "o_proj" if hasattr(attention, "o_proj") else "out_proj"
        norms = next((names for names in _NORMS if hasattr(attention, names[0])), ())
        is_wide = bool(norms) and getattr(attention, norms[0]).weight.numel() > head_dim
        self._wide_norms = norms if is_wide else ()
        self._head_norms = () if is_wide else norms
        self._eps = eps_of(getattr(attention, norms[0])) if norms else 0.0
        self._is_gated = attention.q_proj.out_features == 2 * getattr(attention, self._out).in_features
        self._widths = [getattr(attention, name).out_features for name in projections]
        self._query_heads = (-1, head_dim * (1 + self._is_gated))
        self._heads = (-1, head_dim)

    def __call__(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """[1, T, hidden] -> [1, T, hidden]; `position_embeddings` are cosines and sines, [1, T, R]."""
        module = self._attention
        inputs = self._step.inputs
        kernels = self._step.kernels
        query, key, value = torch.split_with_sizes(self._joint(hidden_states[0]), self._widths, dim=-1)
        if self._wide_norms:
            query_norm, key_norm = self._wide_norms
            query = getattr(module, query_norm)(query)
            key = getattr(module, key_norm)(key)
        query = torch.unflatten(query, -1, self._query_heads)
        key = torch.unflatten(key, -1, self._heads)
        value = torch.unflatten(value, -1, self._heads)
        if self._is_gated:
            query, gate = query.chunk(2, dim=-1)
        if getattr(module, "key_multiplier", 1) != 1:
            key = key * module.key_multiplier
        if position_embeddings is None and self._head_norms:
            name = type(module).__name__
            raise ValueError(f"position_embeddings of {name} is None; accepted: cosines and sines")
        if position_embeddings is not None:
            cos, sin = (angles[0] for angles in position_embeddings)
            weights = [getattr(module, name).weight for name in self._head_norms]
            query_weight, key_weight = weights or (None, None)
            query, key = kernels.qk_norm_rotary(
                query, key, cos, sin, query_weight, key_weight, self._eps, offset=self._offset
            )
        cache = inputs.kv_cache[self._layer]
        out = attend(query, key, value, cache, inputs, kernels, scale=module.scaling)
        if self._is_gated:
            out = kernels.sigmoid_mul(out, gate)
        return getattr(module, self._out)(out.flatten(1))[None], None


PROJECTIONS_OF_MLPS = (
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("input_linear", "output_linear"),
    ("up_proj", "down_proj"),
)
"""The names of an MLP's projections, the last one last. Without a gate the activation is relu squared.

An `input_linear` has the gate's rows, then those of the up projection."""


def mlp_projections(mlp: Any) -> tuple[str, ...]:
    """The names that an MLP has."""
    return next(names for names in PROJECTIONS_OF_MLPS if hasattr(mlp, names[0]))


def mlp_forward(mlp: Any, step: CurrentStep) -> Callable[[Tensor], Tensor]:
    """An MLP: down(silu(gate(x)) * up(x)), with Falcon-H1's multipliers, or down(relu(up(x)) squared)."""
    *input_names, output_name = mlp_projections(mlp)
    gate_multiplier = getattr(mlp, "gate_multiplier", 1)
    out_multiplier = getattr(mlp, "down_multiplier", 1)
    joint = JointLinear(mlp, tuple(input_names)) if len(input_names) > 1 else None

    def forward(x: Tensor) -> Tensor:
        wide: Tensor = getattr(mlp, input_names[0])(x) if joint is None else joint(x)
        if input_names == ["up_proj"]:
            hidden = step.kernels.relu_squared(wide)
        else:
            gate, up = wide.chunk(2, dim=-1)
            hidden = step.kernels.silu_mul(scaled(gate, gate_multiplier), up)
        return scaled(getattr(mlp, output_name)(hidden), out_multiplier)

    return forward


def scaled(x: Tensor, multiplier: float) -> Tensor:
    return x if multiplier == 1 else x * multiplier


def attention_forward(module: nn.Module, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """What stands for attention at transformers; a ValueError where a module was not replaced by ours."""
    raise ValueError(f"attention is a {type(module).__name__}; accepted: a class of the architecture")


def experts_forward(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """transformers' experts, "grouped_mm" on a GPU and "eager" elsewhere: what this rank's experts add.

    "grouped_mm" does not synchronise in bfloat16 on compute capability 9.0; "eager" reads on the CPU which
    experts have tokens. Where ranks split the experts, "grouped_mm" drops those of other ranks; in "eager"
    they are one of this rank with the weight zero.
    """
    from transformers.integrations.moe import grouped_mm_experts_forward

    is_grouped = hidden_states.device.type == "cuda"
    part: Part | None = getattr(module, "mambaslots_experts", None)
    if part is not None:
        is_here = (top_k_index >= part.start) & (top_k_index < part.stop)
        foreign_expert = part.count if is_grouped else 0
        top_k_index = torch.where(is_here, top_k_index - part.start, foreign_expert)
        top_k_weights = top_k_weights * is_here
    if is_grouped:
        computed: Tensor = grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    else:
        eager = type(module).forward.__wrapped__  # type: ignore[attr-defined]
        computed = eager(module, hidden_states, top_k_index, top_k_weights)
    return computed


def register_with_transformers() -> None:
    """Register both names at transformers, without a mask function: no mask is then made on the CPU."""
    from transformers import AttentionInterface
    from transformers.integrations.moe import ExpertsInterface

    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    ExpertsInterface.register(EXPERTS_NAME, experts_forward)
