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
        self._step, self._offset, self._eps, self._original = step, offset, eps_of(norm), norm.forward

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """[..., n] -> [..., n] in the same dtype."""
        weight = self._norm.weight
        if weight.dtype != hidden_states.dtype:  # the dtype of the result is then a matter of the module
            original: Tensor = self._original(hidden_states)
            return original
        return self._step.kernels.rms_norm(hidden_states, weight, self._eps, offset=self._offset)

    def after_waiting(self, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream plus what waits in the step, and the norm of this sum; nothing waits then."""
        added, self._step.waiting = self._step.waiting, None
        if added is None:
            return residual, self(residual)
        weight = self._norm.weight
        if not weight.dtype == residual.dtype == added.dtype:
            residual = residual + added
            return residual, self(residual)
        return self._step.kernels.add_rms_norm(residual, added, weight, self._eps, offset=self._offset)


_NORMS: tuple[tuple[str, ...], ...] = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"))


class AttentionForward:
    """Attention over the paged KV cache; its queries and keys may be normalised, rotated and gated.

    A norm is of each head, or of all heads together. Some channels are rotated, or none. Where the query's
    projection is twice as wide as what the last projection reads, it also gives the gates.
    """

    def __init__(self, attention: Any, layer: int, step: CurrentStep, offset: float) -> None:
        self._attention = attention
        self._layer = layer
        self._step = step
        self._offset = offset
        head_dim, projections = attention.head_dim, (attention.q_proj, attention.k_proj, attention.v_proj)
        self._joint = JointLinear(attention, ("q_proj", "k_proj", "v_proj"))
        self._last = "o_proj" if hasattr(attention, "o_proj") else "out_proj"
        norms = next((names for names in _NORMS if hasattr(attention, names[0])), ())
        is_wide = bool(norms) and getattr(attention, norms[0]).weight.numel() > head_dim
        self._wide_norms = norms if is_wide else ()
        self._head_norms = () if is_wide else norms
        self._eps = eps_of(getattr(attention, norms[0])) if norms else 0.0
        self._is_gated = attention.q_proj.out_features == 2 * getattr(attention, self._last).in_features
        self._widths = [projection.out_features for projection in projections]
        self._query_heads = (-1, head_dim * (1 + self._is_gated))
        self._heads = (-1, head_dim)

    def __call__(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """[1, T, hidden] -> [1, T, hidden]; `position_embeddings` are cosines and sines, [1, T, R]."""
        module, inputs, kernels = self._attention, self._step.inputs, self._step.kernels
        query, key, value = torch.split_with_sizes(self._joint(hidden_states[0]), self._widths, dim=-1)
        if self._wide_norms:
            of_query, of_key = (getattr(module, name) for name in self._wide_norms)
            query, key = of_query(query), of_key(key)
        query = torch.unflatten(query, -1, self._query_heads)
        key, value = torch.unflatten(key, -1, self._heads), torch.unflatten(value, -1, self._heads)
        if self._is_gated:
            query, gate = query.chunk(2, dim=-1)
        if getattr(module, "key_multiplier", 1) != 1:
            key = key * module.key_multiplier
        if position_embeddings is None and self._head_norms:
            raise ValueError(
                f"position_embeddings of {type(module).__name__} is None; accepted: cosines and sines"
            )
        if position_embeddings is not None:
            cos, sin = (angles[0] for angles in position_embeddings)
            of_query, of_key = [getattr(module, name).weight for name in self._head_norms] or (None, None)
            query, key = kernels.qk_norm_rotary(
                query, key, cos, sin, of_query, of_key, self._eps, offset=self._offset
            )
        cache = inputs.kv_cache[self._layer]
        out = attend(query, key, value, cache, inputs, kernels, scale=module.scaling)
        if self._is_gated:
            out = kernels.sigmoid_mul(out, gate)
        return getattr(module, self._last)(out.flatten(1))[None], None


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
    *first, last = mlp_projections(mlp)
    of_gate, of_out = getattr(mlp, "gate_multiplier", 1), getattr(mlp, "down_multiplier", 1)
    joint = JointLinear(mlp, tuple(first)) if len(first) > 1 else None

    def forward(x: Tensor) -> Tensor:
        wide: Tensor = getattr(mlp, first[0])(x) if joint is None else joint(x)
        if first == ["up_proj"]:
            inner = step.kernels.relu_squared(wide)
        else:
            gate, up = wide.chunk(2, dim=-1)
            inner = step.kernels.silu_mul(scaled(gate, of_gate), up)
        return scaled(getattr(mlp, last)(inner), of_out)

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

    "grouped_mm" does not synchronise in bfloat16 on compute capability 9.0; "eager" reads on the host which
    experts have tokens. Where ranks split the experts, "grouped_mm" drops those of other ranks; in "eager"
    they are one of this rank with the weight zero.
    """
    from transformers.integrations.moe import grouped_mm_experts_forward

    is_grouped = hidden_states.device.type == "cuda"
    part: Part | None = getattr(module, "mambaslots_experts", None)
    if part is not None:
        is_here = (top_k_index >= part.start) & (top_k_index < part.stop)
        other = part.count if is_grouped else 0
        top_k_index = torch.where(is_here, top_k_index - part.start, other)
        top_k_weights = top_k_weights * is_here
    if is_grouped:
        computed: Tensor = grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    else:
        eager = type(module).forward.__wrapped__  # type: ignore[attr-defined]
        computed = eager(module, hidden_states, top_k_index, top_k_weights)
    return computed


def register_with_transformers() -> None:
    """Register both names at transformers, without a mask function: no mask is then made on the host."""
    from transformers import AttentionInterface
    from transformers.integrations.moe import ExpertsInterface

    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    ExpertsInterface.register(EXPERTS_NAME, experts_forward)
