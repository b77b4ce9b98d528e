"""The step that a served model computes now, and the attention and experts that transformers calls in it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..inference.contexts.step_inputs import StepInputs
from ..inference.kernels.kernel_set import KernelSet
from ..models.layer_steps import attend
from ..parallel_groups import ParallelGroups, Part
from ..validation import shown


class CurrentStep:
    """What the replaced modules of one served model read; the modules share one object.

    Args:
        groups: the ranks that the model is split over; None for one rank.

    Attributes:
        inputs: the step. `kernels`: the functions to compute it with. Both exist inside `running` only.
        waiting: what the next norm of the residual stream adds to this stream first, [1, T, hidden]; None
            where nothing waits.
    """

    inputs: StepInputs
    kernels: KernelSet
    waiting: Tensor | None = None

    def __init__(self, groups: ParallelGroups | None = None) -> None:
        self.groups = groups or ParallelGroups()

    def summed(self, partial: Tensor) -> Tensor:
        """The sum of what the ranks computed, in the dtype of `partial`, which is overwritten.

        The ranks add in float32 or wider.
        """
        if self.groups.tensor_size == 1:
            return partial
        wide = partial.to(self.kernels.compute_dtype(partial.dtype))
        return self.groups.sum_partials(wide).to(partial.dtype)

    def summing(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`forward`, whose results the ranks add up."""
        return lambda *args, **kwargs: self.summed(forward(*args, **kwargs))

    @contextmanager
    def running(self, inputs: StepInputs, kernels: KernelSet) -> Iterator[None]:
        """Set the step for the duration of one call of the model."""
        self.inputs, self.kernels, self.waiting = inputs, kernels, None
        try:
            yield
        finally:
            del self.inputs, self.kernels
            self.waiting = None


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
