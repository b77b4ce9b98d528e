"""MLPs of transformers' models, with the activation in one launch."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..current_step import CurrentStep
from .joint import JointLinear

Forward = Callable[[Tensor], Tensor]


def relu_squared_mlp(mlp: Any, step: CurrentStep) -> Forward:
    """Nemotron-H's MLP: down(relu(up(x)) squared)."""

    def forward(x: Tensor) -> Tensor:
        out: Tensor = mlp.down_proj(step.kernels.relu_squared(mlp.up_proj(x)))
        return out

    return forward


def gated_mlp(mlp: Any, step: CurrentStep) -> Forward:
    """SwiGLU: down(silu(gate(x)) * up(x))."""
    return _swiglu(mlp, step, JointLinear(mlp, ("gate_proj", "up_proj")), "down_proj")


def falcon_h1_mlp(mlp: Any, step: CurrentStep) -> Forward:
    """`gated_mlp` with a multiplier of the gate and one of the output."""

    gate_up = JointLinear(mlp, ("gate_proj", "up_proj"))

    def forward(x: Tensor) -> Tensor:
        gate, up = gate_up(x).chunk(2, dim=-1)
        product = step.kernels.silu_mul(gate * mlp.gate_multiplier, up)
        out: Tensor = mlp.down_proj(product) * mlp.down_multiplier
        return out

    return forward


def lfm2_mlp(mlp: Any, step: CurrentStep) -> Forward:
    """`gated_mlp` under other names."""
    return _swiglu(mlp, step, JointLinear(mlp, ("w1", "w3")), "w2")


def granite_mlp(mlp: Any, step: CurrentStep) -> Forward:
    """`gated_mlp` with one projection for gate and up."""
    return _swiglu(mlp, step, lambda x: mlp.input_linear(x), "output_linear")


def _swiglu(mlp: Any, step: CurrentStep, gate_up: Forward, down: str) -> Forward:
    """The forward of an MLP; `gate_up` gives gate and up side by side, `down` names the last projection."""

    def forward(x: Tensor) -> Tensor:
        gate, up = gate_up(x).chunk(2, dim=-1)
        out: Tensor = getattr(mlp, down)(step.kernels.silu_mul(gate, up))
        return out

    return forward
