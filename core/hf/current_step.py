"""The step that a served model computes now."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from ..inference.contexts.step_inputs import StepInputs
from ..inference.kernels.kernel_set import KernelSet
from ..layers.over_ranks import sum_over_ranks
from ..parallel_groups import ParallelGroups


class CurrentStep:
    """What the replaced modules of one served model read; the modules share one object.

    `inputs` and `kernels` exist inside `running` only. `pending_output` [1, T, hidden] or None is the last
    output, which the next norm adds to the residual stream first.
    """

    inputs: StepInputs
    kernels: KernelSet
    pending_output: Tensor | None = None

    def __init__(self, groups: ParallelGroups) -> None:
        self.ranks = groups if groups.tensor_size > 1 else None

    def summed(self, partial: Tensor) -> Tensor:
        """The sum of the ranks' results, in the dtype of `partial`, which is overwritten."""
        return sum_over_ranks(partial, self.ranks, self.kernels)

    def summing(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`forward`, whose results the ranks add up."""
        return lambda *args, **kwargs: self.summed(forward(*args, **kwargs))

    @contextmanager
    def running(self, inputs: StepInputs, kernels: KernelSet) -> Iterator[None]:
        """Set the step for the duration of one call of the model."""
        self.inputs = inputs
        self.kernels = kernels
        self.pending_output = None
        try:
            yield
        finally:
            del self.inputs, self.kernels
            self.pending_output = None
