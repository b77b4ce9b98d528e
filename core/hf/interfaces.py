"""The attention and the experts of served models, which transformers calls by its registered interfaces."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..model_parts import Part
from ..models.layer_steps import attend
from ..validation import refused
from .current_step import CurrentStep

ATTENTION_NAME = "mambaslots"  # the `attn_implementation` of served models
EXPERTS_NAME = "mambaslots"  # the `experts_implementation` of served models


@dataclass(frozen=True)
class PagedAttention:
    """Where one attention module keeps its keys and values: `layer` of `StepInputs.kv_cache`."""

    layer: int
    step: CurrentStep

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Store the keys and values of all tokens [T, kv heads, D], and attend: [T, heads, D]."""
        inputs = self.step.inputs
        return attend(query, key, value, inputs.kv_cache[self.layer], inputs, self.step.kernels, scale=scale)


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float, *, sliding_window: int | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The attention that transformers calls, [1, heads, T, D]; ValueError for what is not served."""
    unserved = {
        "attention_mask": attention_mask,
        "sliding_window": sliding_window,
        "softcap": softcap,
        "s_aux": s_aux,
    }
    for name, asked in unserved.items():
        if asked is not None:
            raise refused(f"{name} of {type(module).__name__}", asked, "None")
    paged: PagedAttention = module.mambaslots_attention  # type: ignore[assignment]
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return paged(queries, keys, values, scaling)[None], None


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
