"""The protocol of a model that an engine serves."""

from typing import Protocol

from torch import Tensor

from ...state_spec import HybridStateSpec
from ..contexts.step_inputs import StepInputs


class Model(Protocol):
    """A hybrid model that a `DynamicInferenceEngine` can serve.

    `testing.check_model` checks that a model keeps the rules of `StepInputs`.
    """

    def state_spec(self) -> HybridStateSpec:
        """What the context allocates for this model; the same at every call."""

    def __call__(self, inputs: StepInputs) -> Tensor:
        """Compute one step.

        Args:
            inputs: the step. Its `kv_cache` is written at `kv_write_positions`, and its `state_pool` at the
                destinations, before the call returns or, on a GPU, in the order of the current stream.

        Returns:
            Logits of `inputs.logit_tokens`: [len(inputs.logit_tokens), vocab_size], floating point, on the
            device of `state_spec()`.
        """
