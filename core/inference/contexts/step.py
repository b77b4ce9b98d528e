"""One step of all requests that advance together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .request_step import RequestStep
from .step_inputs import StepInputs


@dataclass(frozen=True)
class Step:
    """What `begin_step` prepared: all slots are reserved and all inputs are built.

    Attributes:
        requests: what each request does, in the order of the inputs' rows: decodes first.
        inputs: what the model reads; valid until the next step is begun.
    """

    requests: tuple[RequestStep, ...]
    inputs: StepInputs


class StepObserver(Protocol):
    """Is called with each step of a context. An error that an observer raises fails the step."""

    def step_begun(self, steps: Sequence[RequestStep], inputs: StepInputs) -> None:
        """All slots are reserved and `inputs` are built for `steps`, in row order; no forward is launched."""

    def step_ended(self, steps: Sequence[RequestStep]) -> None:
        """The steps' states are committed and their requests advanced; wrong drafts are cut off."""
