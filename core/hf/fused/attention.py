"""Attention of transformers' models: norms and rotation in one launch, and the gate in another."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..current_step import CurrentStep
from .joint import JointLinear
from .norms import eps_of


@dataclass(frozen=True)
class AttentionShape:
    """How an attention module of transformers differs from the plain one.

    Args:
        norms: the names of the norms of queries and keys; None where there are none.
        norm_offset: what transformers adds to the weights of these norms.
        out: the name of the last projection.
        is_gated: whether the query's projection also gives a gate for each head's output.
    """

    norms: tuple[str, str] | None = None
    norm_offset: float = 0.0
    out: str = "o_proj"
    is_gated: bool = False


class AttentionForward:
    """The forward of an attention module that rotates the first channels of each head, or none.

    Args:
        attention: the module, at which a `PagedAttention` is installed; its weights are used.
        step: the step that the model computes now.
        shape: how the module differs from the plain one.
    """

    def __init__(self, attention: Any, step: CurrentStep, shape: AttentionShape) -> None:
        self._attention = attention
        self._step = step
        self._shape = shape
        head_dim, projections = attention.head_dim, (attention.q_proj, attention.k_proj, attention.v_proj)
        self._joint = JointLinear(attention, ("q_proj", "k_proj", "v_proj"))
        self._widths = [projection.out_features for projection in projections]
        self._query_heads = (-1, head_dim * (2 if shape.is_gated else 1))
        self._heads = (-1, head_dim)
        self._eps = eps_of(getattr(attention, shape.norms[0])) if shape.norms is not None else 0.0

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """[1, T, hidden] -> [1, T, hidden]; `position_embeddings` are cosines and sines, [1, T, R]."""
        module, shape, hidden = self._attention, self._shape, hidden_states[0]
        query, key, value = torch.split_with_sizes(self._joint(hidden), self._widths, dim=-1)
        query = torch.unflatten(query, -1, self._query_heads)
        key, value = torch.unflatten(key, -1, self._heads), torch.unflatten(value, -1, self._heads)
        if shape.is_gated:
            query, gate = query.chunk(2, dim=-1)
        if getattr(module, "key_multiplier", 1) != 1:
            key = key * module.key_multiplier
        if position_embeddings is None and shape.norms is not None:
            raise ValueError(
                f"position_embeddings of {type(module).__name__} is None; accepted: cosines and sines"
            )
        if position_embeddings is not None:
            query, key = self._rotated(query, key, *(angles[0] for angles in position_embeddings))
        out: Tensor = module.mambaslots_attention(query, key, value, module.scaling)
        if shape.is_gated:
            out = self._step.kernels.sigmoid_mul(out, gate)
        return getattr(module, shape.out)(out.flatten(1))[None], None

    def _rotated(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        module, shape, kernels = self._attention, self._shape, self._step.kernels
        if shape.norms is None:
            return kernels.qk_norm_rotary(query, key, cos, sin)
        query_norm, key_norm = (getattr(module, name) for name in shape.norms)
        return kernels.qk_norm_rotary(
            query, key, cos, sin, query_norm.weight, key_norm.weight, self._eps, offset=shape.norm_offset
        )
