"""What the engine needs of a model."""

from typing import Protocol

from torch import Tensor

from ...state_spec import HybridStateSpec
from ..contexts.step_inputs import StepInputs


class Model(Protocol):
    """A hybrid model: any callable object with a `state_spec`."""

    def state_spec(self) -> HybridStateSpec:
        """What one sequence costs in cache: the shapes that a context allocates by."""

    def __call__(self, inputs: StepInputs) -> Tensor:
        """Compute one step.

        Reads the states at `inputs.state_sources`, and writes new ones at the destinations that `inputs`
        names, keys and values at `inputs.kv_write_positions`, and nothing else.

        Returns:
            Logits [len(inputs.logit_tokens), vocabulary] of floating point.
        """
