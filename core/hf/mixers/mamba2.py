"""Mamba-2 mixers of transformers (nemotron_h, granitemoehybrid, bamba, falcon_h1, mamba2)."""

from typing import Any

import torch
from torch import Tensor, nn

from ...models.layer_steps import convolve, gated_rms_norm_over_ranks, scan_ssd
from ..current_step import CurrentStep


class Mamba2Forward:
    """The forward of a Mamba-2 mixer, over the states of a step's sequences.

    The time steps are clamped to the module's `time_step_limit` in prefills and in decodes. transformers
    clamps them wherever it computes a text as a whole, and not where it decodes with its own cache.

    Args:
        mixer: the module; its weights are used, and not copied.
        layer: its index among the model's mixers.
        step: the step that the model computes now.
    """

    def __init__(self, mixer: nn.Module, layer: int, step: CurrentStep) -> None:
        self._mixer: Any = mixer
        self._layer = layer
        self._step = step
        limit: Any = mixer.time_step_limit
        self._shortest, self._longest = map(float, limit or (0.0, "inf"))
        self._group_width = self._norm_width()

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[1, T, hidden] -> [1, T, hidden]; what transformers passes beside it is for its own cache."""
        mixer, inputs, kernels = self._mixer, self._step.inputs, self._step.kernels
        gate, raw, dt = torch.split(
            self._project(hidden_states[0]),
            [mixer.intermediate_size, mixer.conv_dim, mixer.num_heads],
            dim=-1,
        )
        dt, A = kernels.time_steps(dt, mixer.dt_bias, mixer.A_log, self._shortest, self._longest)
        xBC = convolve(
            raw, mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias, "conv", self._layer, inputs, kernels
        )
        x, B, C = torch.split(
            xBC, [mixer.intermediate_size, *[mixer.n_groups * mixer.ssm_state_size] * 2], dim=-1
        )
        y = scan_ssd(
            torch.unflatten(x, -1, (mixer.num_heads, mixer.head_dim)),
            dt,
            A,
            torch.unflatten(B, -1, (mixer.n_groups, mixer.ssm_state_size)),
            torch.unflatten(C, -1, (mixer.n_groups, mixer.ssm_state_size)),
            mixer.D,
            self._layer,
            inputs,
            kernels,
        )
        out: Tensor = mixer.out_proj(self._gate(y.flatten(1), gate))
        return out[None]

    def _project(self, hidden: Tensor) -> Tensor:
        """[T, hidden] -> the gate, what is convolved, and the time steps, [T, all of them]."""
        projected: Tensor = self._mixer.in_proj(hidden)
        return projected

    def _gate(self, y: Tensor, gate: Tensor) -> Tensor:
        """The gated norm of y, both [T, intermediate]."""
        norm = self._mixer.norm
        if self._group_width > y.shape[1]:
            return self._norm_over_ranks(y, gate)
        groups = y.shape[1] // self._group_width
        return self._step.kernels.gated_rms_norm(y, gate, norm.weight, groups, norm.variance_epsilon)

    def _norm_width(self) -> int:
        """Channels of the whole model that are normalised together; 0 without a norm."""
        return int(self._mixer.norm.group_size)

    def _norm_over_ranks(self, y: Tensor, gate: Tensor, *, gates_first: bool = True) -> Tensor:
        groups, norm = self._step.groups, self._mixer.norm
        num_groups = y.shape[1] * groups.tensor_size // self._group_width
        compute_dtype = self._step.kernels.compute_dtype(y.dtype)
        weight, eps = norm.weight, norm.variance_epsilon
        return gated_rms_norm_over_ranks(
            y, gate, weight, eps, num_groups, groups, compute_dtype, gates_first=gates_first
        )


class FalconMamba2Forward(Mamba2Forward):
    """`Mamba2Forward` with Falcon-H1's multipliers, and with a norm only where the module has one."""

    def _project(self, hidden: Tensor) -> Tensor:
        mixer = self._mixer
        projected: Tensor = mixer.in_proj(hidden * mixer.ssm_in_multiplier) * mixer.mup_vector[0]
        return projected

    def _gate(self, y: Tensor, gate: Tensor) -> Tensor:
        if not self._mixer.mamba_rms_norm:
            return self._step.kernels.silu_mul(gate, y)
        kernels, norm = self._step.kernels, self._mixer.norm
        if self._group_width > y.shape[1]:
            return self._norm_over_ranks(y, gate, gates_first=not norm.norm_before_gate)
        weight, groups, eps = norm.weight, y.shape[1] // self._group_width, norm.variance_epsilon
        if not norm.norm_before_gate:
            return kernels.gated_rms_norm(y, gate, weight, groups, eps)
        y, gate, weight = (torch.unflatten(tensor, -1, (groups, -1)) for tensor in (y, gate, weight))
        return kernels.rms_norm_gated(y, gate, weight, eps).flatten(1)

    def _norm_width(self) -> int:
        mixer: Any = self._mixer
        channels: int = mixer.intermediate_size * self._step.groups.tensor_size
        return channels // mixer.norm.n_groups if mixer.mamba_rms_norm else 0
