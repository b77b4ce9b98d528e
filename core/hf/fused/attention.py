"""Attention of transformers' models: norms and rotation in one launch, and the gate in another."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import attention_forward
from ..current_step import CurrentStep


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
        attention: the module; its weights are used, and not copied.
        step: the step that the model computes now.
        shape: how the module differs from the plain one.
    """

    def __init__(self, attention: nn.Module, step: CurrentStep, shape: AttentionShape) -> None:
        self._attention: Any = attention
        self._step = step
        self._shape = shape

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """[1, T, hidden] -> [1, T, hidden]; `position_embeddings` are cosines and sines, [1, T, R]."""
        module, shape, hidden = self._attention, self._shape, hidden_states[0]
        width = module.head_dim * (2 if shape.is_gated else 1)
        projected = torch.unflatten(module.q_proj(hidden), -1, (-1, width))
        query, gate = projected[..., : module.head_dim], projected[..., module.head_dim :]
        key = torch.unflatten(module.k_proj(hidden), -1, (-1, module.head_dim))
        value = torch.unflatten(module.v_proj(hidden), -1, (-1, module.head_dim))
        if getattr(module, "key_multiplier", 1) != 1:
            key = key * module.key_multiplier
        if position_embeddings is None and shape.norms is not None:
            raise ValueError(
                f"position_embeddings of {type(module).__name__} is None; accepted: cosines and sines"
            )
        if position_embeddings is not None:
            query, key = self._rotated(query, key, *(angles[0] for angles in position_embeddings))
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        attended, _ = attention_forward(module, query, key, value, attention_mask, module.scaling)
        out = attended[0]
        if shape.is_gated:
            out = self._step.kernels.sigmoid_mul(out, gate)
        return getattr(module, shape.out)(out.flatten(1))[None], None

    def _rotated(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        module, shape, kernels = self._attention, self._shape, self._step.kernels
        if shape.norms is None:
            return kernels.qk_norm_rotary(query, key, cos, sin)
        query_norm, key_norm = (getattr(module, name) for name in shape.norms)
        eps = query_norm.eps if hasattr(query_norm, "eps") else query_norm.variance_epsilon
        return kernels.qk_norm_rotary(
            query, key, cos, sin, query_norm.weight, key_norm.weight, eps, offset=shape.norm_offset
        )
