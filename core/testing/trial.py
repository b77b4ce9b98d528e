"""One step, which the model under test may compute as often as a question takes."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..inference.contexts.step_inputs import StepInputs
from .memory_stage import Fill, MemoryStage, Outcome
from .step_memory import StepMemory


class ModelRaisedError(Exception):
    """The model raised `error`."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass
class Trial:
    """A step on a stage.

    Attributes:
        inputs: of the engine, padded or not; never written.
        step: what they name.
        separate: whether the model reads a state at one slot and writes it at another. If not, sources
            that are destinations always stay in one slot.
        num_calls: calls of the model so far.
    """

    stage: MemoryStage
    model: Callable[[StepInputs], object]
    inputs: StepInputs
    step: StepMemory
    separate: bool
    num_calls: int = 0

    @property
    def num_logits(self) -> int:
        return self.inputs.num_logits

    def run(self, fill: Fill = Fill()) -> Outcome:  # noqa: B008
        """Call the model once, in memory filled so; ModelRaisedError where it raises."""
        self.num_calls += 1
        if not self.separate:
            fill = replace(fill, in_place=True)
        try:
            return self.stage.run(self.model, self.inputs, self.step, fill)
        except Exception as error:
            raise ModelRaisedError(error) from error

    def attempt(self, fill: Fill) -> Outcome | None:
        """`run`; None where the model raises."""
        try:
            return self.run(fill)
        except ModelRaisedError:
            return None
