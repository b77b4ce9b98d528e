"""Which of transformers' experts a served mixture-of-experts model runs."""

import torch
from torch import Tensor, nn

from ..parallel_groups import Part

EXPERTS_NAME = "mambaslots"
"""The `experts_implementation` of served models."""


def experts_forward(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """transformers' experts, "grouped_mm" on a GPU and "eager" elsewhere.

    "grouped_mm" sorts the tokens by expert and multiplies all experts in one launch. It does not synchronise
    in bfloat16 on a GPU of compute capability 9.0; "eager" reads on the host which experts have tokens.

    Where ranks split the experts, "grouped_mm" leaves out those of other ranks. Not all of transformers'
    "eager" experts can: there a token's expert of another rank is one of this rank with the weight zero.

    Args:
        module: the experts of one layer, or a rank's part of them.
        hidden_states: [T, hidden].
        top_k_index, top_k_weights: [T, K], the experts of each token, among all ranks', and their weights.

    Returns: [T, hidden], what the experts of this rank add.
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


def register_experts() -> None:
    """Tell transformers the name; more than once is fine."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(EXPERTS_NAME, experts_forward)
