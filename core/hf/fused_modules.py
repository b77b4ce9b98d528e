"""Norms, attention and MLPs of transformers' models in fewer launches; they round less often."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .current_step import CurrentStep
from .joint_linear import JointLinear


def eps_of(norm: Any) -> float:
    """What a norm of transformers adds to the mean square, under either of its names."""
    eps: float = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
    return eps


class NormForward:
    """The forward of an RMS norm: x / rms(x) * (weight + offset), in one launch on a GPU."""

    def __init__(self, norm: nn.Module, step: CurrentStep, offset: float) -> None:
        self._norm: Any = norm
        self._step, self._offset, self._eps, self._original = step, offset, eps_of(norm), norm.forward

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """[..., n] -> [..., n] in the same dtype."""
        weight = self._norm.weight
        if weight.dtype != hidden_states.dtype:  # the dtype of the result is then a matter of the module
            original: Tensor = self._original(hidden_states)
            return original
        return self._step.kernels.rms_norm(hidden_states, weight, self._eps, offset=self._offset)

    def after_waiting(self, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream plus what waits in the step, and the norm of this sum; nothing waits then."""
        added, self._step.waiting = self._step.waiting, None
        if added is None:
            return residual, self(residual)
        weight = self._norm.weight
        if not weight.dtype == residual.dtype == added.dtype:
            residual = residual + added
            return residual, self(residual)
        return self._step.kernels.add_rms_norm(residual, added, weight, self._eps, offset=self._offset)


@dataclass(frozen=True)
class AttentionShape:
    """How an attention module of transformers differs from the plain one.

    Attributes:
        norms: the names of the norms of queries and keys, or None.
        norm_offset: what transformers adds to the weights of these norms.
        out: the name of the last projection.
        is_gated: whether the query's projection also gives a gate for each head's output.
    """

    norms: tuple[str, str] | None = None
    norm_offset: float = 0.0
    out: str = "o_proj"
    is_gated: bool = False


class AttentionForward:
    """The forward of an attention module that rotates the first channels of each head, or none."""

    def __init__(self, attention: Any, step: CurrentStep, shape: AttentionShape) -> None:
        self._attention = attention
        self._step = step
        self._shape = shape
        head_dim, projections = attention.head_dim, (attention.q_proj, attention.k_proj, attention.v_proj)
        self._joint = JointLinear(attention, ("q_proj", "k_proj", "v_proj"))
        self._widths = [projection.out_features for projection in projections]
        self._query_heads = (-1, head_dim * (2 if shape.is_gated else 1))
        self._heads = (-1, head_dim)
        self._eps = eps_of(getattr(attention, shape.norms[0])) if shape.norms is not None else 0.0

    def __call__(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """[1, T, hidden] -> [1, T, hidden]; `position_embeddings` are cosines and sines, [1, T, R]."""
        module, shape, hidden = self._attention, self._shape, hidden_states[0]
        query, key, value = torch.split_with_sizes(self._joint(hidden), self._widths, dim=-1)
        query = torch.unflatten(query, -1, self._query_heads)
        key, value = torch.unflatten(key, -1, self._heads), torch.unflatten(value, -1, self._heads)
        if shape.is_gated:
            query, gate = query.chunk(2, dim=-1)
        if getattr(module, "key_multiplier", 1) != 1:
            key = key * module.key_multiplier
        if position_embeddings is None and shape.norms is not None:
            raise ValueError(
                f"position_embeddings of {type(module).__name__} is None; accepted: cosines and sines"
            )
        if position_embeddings is not None:
            query, key = self._rotated(query, key, *(angles[0] for angles in position_embeddings))
        out: Tensor = module.mambaslots_attention(query, key, value, module.scaling)
        if shape.is_gated:
            out = self._step.kernels.sigmoid_mul(out, gate)
        return getattr(module, shape.out)(out.flatten(1))[None], None

    def _rotated(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        module, shape, kernels = self._attention, self._shape, self._step.kernels
        if shape.norms is None:
            return kernels.qk_norm_rotary(query, key, cos, sin)
        query_norm, key_norm = (getattr(module, name) for name in shape.norms)
        return kernels.qk_norm_rotary(
            query, key, cos, sin, query_norm.weight, key_norm.weight, self._eps, offset=shape.norm_offset
        )


Forward = Callable[[Tensor], Tensor]


def relu_squared_mlp(mlp: Any, step: CurrentStep) -> Forward:
    """Nemotron-H's MLP: down(relu(up(x)) squared)."""

    def forward(x: Tensor) -> Tensor:
        out: Tensor = mlp.down_proj(step.kernels.relu_squared(mlp.up_proj(x)))
        return out

    return forward


def gated_mlp(mlp: Any, step: CurrentStep) -> Forward:
    """SwiGLU: down(silu(gate(x)) * up(x)); Falcon-H1 multiplies the gate and the output by numbers."""
    return _swiglu(mlp, step, JointLinear(mlp, ("gate_proj", "up_proj")), "down_proj")


def lfm2_mlp(mlp: Any, step: CurrentStep) -> Forward:
    """`gated_mlp` under other names."""
    return _swiglu(mlp, step, JointLinear(mlp, ("w1", "w3")), "w2")


def granite_mlp(mlp: Any, step: CurrentStep) -> Forward:
    """`gated_mlp` with one projection for gate and up."""
    return _swiglu(mlp, step, lambda x: mlp.input_linear(x), "output_linear")


def _swiglu(mlp: Any, step: CurrentStep, gate_up: Forward, down: str) -> Forward:
    """The forward of an MLP; `gate_up` gives gate and up side by side, `down` names the last projection."""
    of_gate, of_out = getattr(mlp, "gate_multiplier", 1), getattr(mlp, "down_multiplier", 1)

    def forward(x: Tensor) -> Tensor:
        gate, up = gate_up(x).chunk(2, dim=-1)
        return scaled(getattr(mlp, down)(step.kernels.silu_mul(scaled(gate, of_gate), up)), of_out)

    return forward


def scaled(x: Tensor, multiplier: float) -> Tensor:
    return x if multiplier == 1 else x * multiplier
