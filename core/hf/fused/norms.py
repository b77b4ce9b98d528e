"""RMS norms of transformers' models, and the residual stream between them."""

from typing import Any

from torch import Tensor, nn

from ..current_step import CurrentStep


def eps_of(norm: Any) -> float:
    """What a norm of transformers adds to the mean square, under either of its names."""
    eps: float = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
    return eps


class NormForward:
    """The forward of an RMS norm: x / rms(x) * (weight + offset), in one launch on a GPU.

    Args:
        norm: the module; its weight is used, and not copied.
        step: the step that the model computes now.
        offset: what transformers adds to the weight: 1 in Qwen's models, else 0.
    """

    def __init__(self, norm: nn.Module, step: CurrentStep, offset: float) -> None:
        self._norm: Any = norm
        self._step = step
        self._offset = offset
        self._eps = eps_of(norm)
        self._original = norm.forward

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """[..., n] -> [..., n] in the same dtype."""
        weight = self._norm.weight
        if weight.dtype != hidden_states.dtype:  # the dtype of the result is then a matter of the module
            original: Tensor = self._original(hidden_states)
            return original
        return self._step.kernels.rms_norm(hidden_states, weight, self._eps, offset=self._offset)

    def after_waiting(self, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Add what waits in the step to the residual stream, and normalise the sum.

        Returns: the residual stream, and its norm. Nothing waits afterwards.
        """
        added, self._step.waiting = self._step.waiting, None
        if added is None:
            return residual, self(residual)
        weight = self._norm.weight
        if not weight.dtype == residual.dtype == added.dtype:
            residual = residual + added
            return residual, self(residual)
        return self._step.kernels.add_rms_norm(residual, added, weight, self._eps, offset=self._offset)


class FinalNormForward:
    """The forward of the norm behind the last layer, which adds the output of that layer first.

    Args:
        norm: of the module.
    """

    def __init__(self, norm: NormForward) -> None:
        self._norm = norm

    def __call__(self, hidden_states: Tensor) -> Tensor:
        return self._norm.after_waiting(hidden_states)[1]
