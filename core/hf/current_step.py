"""The step that a served model computes now."""

from collections.abc import Iterator
from contextlib import contextmanager

from ..inference.contexts.step_inputs import StepInputs
from ..inference.kernels.kernel_set import KernelSet


class CurrentStep:
    """What the replaced modules of one served model read; the modules share one object.

    Attributes:
        inputs: the step. `kernels`: the functions to compute it with. Both exist inside `running` only.
    """

    inputs: StepInputs
    kernels: KernelSet

    @contextmanager
    def running(self, inputs: StepInputs, kernels: KernelSet) -> Iterator[None]:
        """Set the step for the duration of one call of the model."""
        self.inputs, self.kernels = inputs, kernels
        try:
            yield
        finally:
            del self.inputs, self.kernels
