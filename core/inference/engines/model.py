"""What the engine needs of a model."""

from typing import Protocol

from torch import Tensor

from ...state_spec import HybridStateSpec
from ..contexts.step_inputs import StepInputs


class Model(Protocol):
    """A hybrid model: any callable object with a `state_spec`."""

    def state_spec(self) -> HybridStateSpec:
        """What a context allocates for this model."""

    def __call__(self, inputs: StepInputs) -> Tensor:
        """Compute one step.

        Reads the states at `inputs.state_sources`. Writes new states at the destinations that `inputs` names,
        and keys and values at `inputs.kv_write_positions`. Writes nothing else.

        Returns:
            Floating-point logits [len(inputs.logit_tokens), vocabulary].
        """
