"""The step that a served model computes now."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from ..inference.contexts.step_inputs import StepInputs
from ..inference.kernels.kernel_set import KernelSet


class CurrentStep:
    """What the replaced modules of one served model read; the modules share one object.

    Attributes:
        inputs: the step. `kernels`: the functions to compute it with. Both exist inside `running` only.
        waiting: what the next norm of the residual stream adds to this stream first, [1, T, hidden]; None
            where nothing waits.
    """

    inputs: StepInputs
    kernels: KernelSet
    waiting: Tensor | None = None

    @contextmanager
    def running(self, inputs: StepInputs, kernels: KernelSet) -> Iterator[None]:
        """Set the step for the duration of one call of the model."""
        self.inputs, self.kernels, self.waiting = inputs, kernels, None
        try:
            yield
        finally:
            del self.inputs, self.kernels
            self.waiting = None
