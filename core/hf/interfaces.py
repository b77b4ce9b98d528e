"""The attention and the experts of served models, as transformers has them registered."""

from typing import Any

import torch
from torch import Tensor, nn

from ..model_parts import Part

ATTENTION_NAME = "mambaslots"  # the `attn_implementation` of served models
EXPERTS_NAME = "mambaslots"  # the `experts_implementation` of served models


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
