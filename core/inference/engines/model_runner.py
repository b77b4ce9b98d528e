"""Running a model on a step's inputs."""

from torch import Tensor

from ...state_spec import HybridStateSpec
from ..contexts.row_ladder import padded_to_ladder
from ..contexts.step_inputs import StepInputs, StepShape
from .model import Model


class ModelRunner:
    """Runs every step eagerly; `GraphRunner` runs steps as CUDA graphs."""

    def __init__(self, spec: HybridStateSpec, ladder: bool = False) -> None:
        """
        Args:
            spec: what the model said of itself.
            ladder: whether every step is padded, so that products have rungs of the ladder as rows.
        """
        self._spec = spec
        self._ladder = ladder

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        """The shapes that have a graph: none."""
        return ()

    @property
    def captures_next(self) -> bool:
        """Whether `after_step` will capture what has run last, before another step may run."""
        return False

    def describe(self) -> str:
        """How many graphs are captured, or why none is."""
        return "none; on a GPU, num_cuda_graphs captures them, except in float64"

    def padded(self, shape: StepShape) -> StepShape:
        """The shape to pad a step of `shape` to."""
        return padded_to_ladder(shape) if self._ladder else shape

    def run(self, model: Model, inputs: StepInputs) -> Tensor:
        """Run the model on a step's inputs. Does not synchronise.

        Returns:
            Logits [inputs.num_logits, vocabulary], without padding; valid until the next `run`.

        Raises:
            ValueError: the model returned something of another shape.
        """
        logits = self._forward(model, inputs)
        expected = (len(inputs.logit_tokens), self._spec.vocab_size)
        shape = getattr(logits, "shape", None)
        if shape != expected:
            raise ValueError(
                f"the model returned a {type(logits).__name__} of shape {shape}; accepted: logits of shape "
                f"{expected}, one row for each of inputs.logit_tokens"
            )
        return logits[: inputs.num_logits]

    def _forward(self, model: Model, inputs: StepInputs) -> Tensor:
        return model(inputs)

    def after_step(self, model: Model) -> None:
        """Called once the step's tokens have been read, when nothing waits for the model."""

    def drop_graphs(self) -> None:
        """Forget all graphs; called where the weights or the pools have changed."""
