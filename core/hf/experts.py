"""Which of transformers' experts a served mixture-of-experts model runs."""

from typing import Any

from torch import Tensor, nn

EXPERTS_NAME = "mambaslots"
"""The `experts_implementation` of served models."""


def experts_forward(module: nn.Module, hidden_states: Tensor, *routing: Any) -> Tensor:
    """transformers' experts, "grouped_mm" on a GPU and "eager" elsewhere.

    "grouped_mm" sorts the tokens by expert and multiplies all experts in one launch. It does not synchronise
    in bfloat16 on a GPU of compute capability 9.0; "eager" reads on the host which experts have tokens.

    Args:
        module: the experts of one layer.
        hidden_states: [T, hidden]. routing: the experts of each token and their weights.
    """
    from transformers.integrations.moe import grouped_mm_experts_forward

    if hidden_states.device.type == "cuda":
        computed: Tensor = grouped_mm_experts_forward(module, hidden_states, *routing)
    else:
        computed = type(module).forward.__wrapped__(module, hidden_states, *routing)  # type: ignore[attr-defined]
    return computed


def register_experts() -> None:
    """Tell transformers the name; more than once is fine."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(EXPERTS_NAME, experts_forward)
