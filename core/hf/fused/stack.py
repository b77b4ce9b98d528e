"""The layers of a model of transformers, run one after another without transformers' own forward.

That forward makes masks, caches and output objects that a served model has no use for, and handles keyword
arguments in every layer: about as much time of the host as three layers.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .layers import LayerForward
from .norms import NormForward


class LayerStack:
    """A base model whose embeddings go to the layers as they are.

    Args:
        base: the base model; its embeddings and its rotary angles, where it has them, are computed by its
            own modules.
        layers: the forwards of its layers.
        final_norm: the norm behind the last layer.
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
