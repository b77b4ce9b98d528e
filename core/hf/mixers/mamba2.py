"""Mamba-2 mixers of transformers (nemotron_h, granitemoehybrid, bamba, falcon_h1, mamba2)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...models.layer_steps import convolve, scan_ssd
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

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[1, T, hidden] -> [1, T, hidden]; what transformers passes beside it is for its own cache."""
        mixer, inputs, kernels = self._mixer, self._step.inputs, self._step.kernels
        pool, compute_dtype = inputs.state_pool, kernels.compute_dtype(hidden_states.dtype)
        gate, raw, dt = torch.split(
            self._project(hidden_states[0]),
            [mixer.intermediate_size, mixer.conv_dim, mixer.num_heads],
            dim=-1,
        )
        xBC = convolve(
            raw, mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias, pool["conv"][self._layer], inputs, kernels
        )
        x, B, C = torch.split(
            xBC, [mixer.intermediate_size, *[mixer.n_groups * mixer.ssm_state_size] * 2], dim=-1
        )
        y = scan_ssd(
            torch.unflatten(x, -1, (mixer.num_heads, mixer.head_dim)),
            self._time_steps(dt.to(compute_dtype)),
            -mixer.A_log.to(compute_dtype).exp(),
            torch.unflatten(B, -1, (mixer.n_groups, mixer.ssm_state_size)),
            torch.unflatten(C, -1, (mixer.n_groups, mixer.ssm_state_size)),
            mixer.D,
            pool["ssm"][self._layer],
            inputs,
            kernels,
        )
        gated = self._gate(y.flatten(1)[None], gate[None])
        out: Tensor = mixer.out_proj(gated.to(hidden_states.dtype))
        return out

    def _project(self, hidden: Tensor) -> Tensor:
        """[T, hidden] -> the gate, what is convolved, and the time steps, [T, all of them]."""
        projected: Tensor = self._mixer.in_proj(hidden)
        return projected

    def _time_steps(self, dt: Tensor) -> Tensor:
        dt = F.softplus(dt + self._mixer.dt_bias.to(dt.dtype))
        if (self._shortest, self._longest) == (0.0, float("inf")):
            return dt
        return dt.clamp(self._shortest, self._longest)

    def _gate(self, y: Tensor, gate: Tensor) -> Tensor:
        """The gated norm of y, both [1, T, intermediate]."""
        gated: Tensor = self._mixer.norm(y, gate)
        return gated


class FalconMamba2Forward(Mamba2Forward):
    """`Mamba2Forward` with Falcon-H1's multipliers, and with a norm only where the module has one."""

    def _project(self, hidden: Tensor) -> Tensor:
        mixer = self._mixer
        projected: Tensor = mixer.in_proj(hidden * mixer.ssm_in_multiplier) * mixer.mup_vector[0]
        return projected

    def _gate(self, y: Tensor, gate: Tensor) -> Tensor:
        return super()._gate(y, gate) if self._mixer.mamba_rms_norm else y * F.silu(gate)
