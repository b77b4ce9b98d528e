"""LFM2's gated short convolution."""

from typing import Any

from torch import Tensor, nn

from ...models.layer_steps import convolve
from ..current_step import CurrentStep


class ShortConvForward:
    """The forward of LFM2's short convolution, over the windows of a step's sequences.

    Args:
        mixer: the module; its weights are used, and not copied.
        layer: its index among the model's short convolutions.
        step: the step that the model computes now.
    """

    def __init__(self, mixer: nn.Module, layer: int, step: CurrentStep) -> None:
        self._mixer: Any = mixer
        self._layer = layer
        self._step = step

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[1, T, hidden] -> [1, T, hidden]; what transformers passes beside it is for its own cache."""
        mixer, inputs = self._mixer, self._step.inputs
        B, C, x = mixer.in_proj(hidden_states[0]).chunk(3, dim=-1)
        convolved = convolve(
            B * x,
            mixer.conv.weight.squeeze(1),
            mixer.conv.bias,
            "short_conv",
            self._layer,
            inputs,
            self._step.kernels,
            activation=False,
        )
        out: Tensor = mixer.out_proj(C * convolved)
        return out[None]
