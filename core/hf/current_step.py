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

    `inputs` and `kernels` exist inside `running` only. `waiting` [1, T, hidden] or None is what the next norm
    adds to the residual stream first.
    """

    inputs: StepInputs
    kernels: KernelSet
    waiting: Tensor | None = None

    def __init__(self, groups: ParallelGroups | None = None) -> None:
        self.groups = groups or ParallelGroups()

    def summed(self, partial: Tensor) -> Tensor:
        """The sum of the ranks' results, in the dtype of `partial`, which is overwritten."""
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


ATTENTION_NAME = "mambaslots"  # the `attn_implementation` of served models


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
    """The attention function that transformers calls; a ValueError names attention that is not served.

    query is [1, heads, T, D], key and value are [1, kv heads, T, D], rotated, normalised and scaled.
    """
    unserved = {"attention_mask": attention_mask, "sliding_window": sliding_window}
    for name, asked in (unserved | {"softcap": softcap, "s_aux": s_aux}).items():
        if asked is not None:
            raise ValueError(f"{name} of {type(module).__name__} is {shown(asked)}; accepted: None")
    paged: PagedAttention = module.mambaslots_attention  # type: ignore[assignment]
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return paged(queries, keys, values, scaling)[None], None


EXPERTS_NAME = "mambaslots"  # the `experts_implementation` of served models


def experts_forward(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """transformers' experts, "grouped_mm" on a GPU and "eager" elsewhere: what this rank's experts add.

    "grouped_mm" does not synchronise; "eager" reads on the host which experts have tokens. Where ranks split
    the experts, "grouped_mm" drops those of other ranks; in "eager" they are one of this rank with the weight
    zero.
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
