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
    """Told what a context decided. What it raises fails the step, like any error of the step itself."""

    def step_begun(self, steps: Sequence[RequestStep], inputs: StepInputs) -> None:
        """All is reserved and built for these, in row order; no forward has been launched."""

    def step_ended(self, steps: Sequence[RequestStep]) -> None:
        """Their states are committed and their requests advanced; wrong drafts are no longer among them."""
