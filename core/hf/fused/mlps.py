"""MLPs of transformers' models, with the activation in one launch."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..current_step import CurrentStep

Forward = Callable[[Tensor], Tensor]


def relu_squared_mlp(mlp: Any, step: CurrentStep) -> Forward:
    """Nemotron-H's MLP: down(relu(up(x)) squared)."""

    def forward(x: Tensor) -> Tensor:
        out: Tensor = mlp.down_proj(step.kernels.relu_squared(mlp.up_proj(x)))
        return out

    return forward


def gated_mlp(mlp: Any, step: CurrentStep) -> Forward:
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def forward(x: Tensor) -> Tensor:
        out: Tensor = mlp.down_proj(step.kernels.silu_mul(mlp.gate_proj(x), mlp.up_proj(x)))
        return out

    return forward


def falcon_h1_mlp(mlp: Any, step: CurrentStep) -> Forward:
    """`gated_mlp` with a multiplier of the gate and one of the output."""

    def forward(x: Tensor) -> Tensor:
        gate = mlp.gate_proj(x) * mlp.gate_multiplier
        out: Tensor = mlp.down_proj(step.kernels.silu_mul(gate, mlp.up_proj(x))) * mlp.down_multiplier
        return out

    return forward


def lfm2_mlp(mlp: Any, step: CurrentStep) -> Forward:
    """`gated_mlp` under other names."""

    def forward(x: Tensor) -> Tensor:
        out: Tensor = mlp.w2(step.kernels.silu_mul(mlp.w1(x), mlp.w3(x)))
        return out

    return forward


def granite_mlp(mlp: Any, step: CurrentStep) -> Forward:
    """`gated_mlp` with one projection for gate and up."""

    def forward(x: Tensor) -> Tensor:
        gate, up = mlp.input_linear(x).chunk(2, dim=-1)
        out: Tensor = mlp.output_linear(step.kernels.silu_mul(gate, up))
        return out

    return forward
