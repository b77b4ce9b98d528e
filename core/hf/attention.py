"""Attention of transformers' models over the paged KV cache."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..models.layer_steps import attend
from ..validation import shown
from .current_step import CurrentStep

ATTENTION_NAME = "mambaslots"
"""The `attn_implementation` of served models."""


@dataclass(frozen=True)
class PagedAttention:
    """Where one attention module of a served model keeps its keys and values.

    Args:
        layer: the module's index in `StepInputs.kv_cache`.
        step: the step that the model computes now.
    """

    layer: int
    step: CurrentStep

    def install(self, module: nn.Module) -> None:
        """Let `attention_forward` find this object at `module`."""
        module.mambaslots_attention = self  # type: ignore[assignment]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Store the keys and values of all tokens [T, kv heads, D], and attend.

        Returns: [T, heads, D] for query [T, heads, D].
        """
        inputs = self.step.inputs
        return attend(query, key, value, inputs.kv_cache[self.layer], inputs, self.step.kernels, scale=scale)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls.

    Args:
        module: a module at which a `PagedAttention` is installed.
        query: [1, heads, T, D]. key, value: [1, kv heads, T, D]. Rotated, normalised and scaled as the model
            does it.
        attention_mask: None; the step says what a token sees.
        scaling: the factor of the scores.

        sliding_window, softcap, s_aux: what other attention would need; None.

    Returns: the output, [1, T, heads, D] in the dtype of `query`, and no weights.

    Raises:
        ValueError: the model asks for attention that is not served.
    """
    _check_served(
        module, attention_mask=attention_mask, sliding_window=sliding_window, softcap=softcap, s_aux=s_aux
    )
    paged: PagedAttention = module.mambaslots_attention  # type: ignore[assignment]
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return paged(queries, keys, values, scaling)[None], None


def _check_served(module: nn.Module, **unserved: object) -> None:
    for name, value in unserved.items():
        if value is not None:
            raise ValueError(f"{name} of {type(module).__name__} is {shown(value)}; accepted: None")


def register_attention() -> None:
    """Tell transformers the name; more than once is fine.

    No mask function is registered under the name: transformers then makes no mask, and looks at no position
    id on the host.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, attention_forward)
