"""The forwards of transformers' mixers over the states of a step's sequences."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..inference.kernels.mixer_inputs import DeltaNet
from ..layers.mixer_step import Mamba2, convolve, run_delta_net, run_mamba2
from ..layers.over_ranks import gated_norm
from .current_step import CurrentStep
from .fused_modules import scaled
from .joint_linear import JointLinear


class Mamba2Forward:
    """The forward of a Mamba-2 mixer. Decodes clamp time steps, too; transformers clamps in whole texts."""

    def __init__(self, mixer: Any, layer: int, step: CurrentStep) -> None:
        self._mixer = mixer
        self._layer = layer
        self._step = step
        self._limits = tuple(map(float, mixer.time_step_limit or (0.0, "inf")))
        norm: Any = mixer.norm if getattr(mixer, "mamba_rms_norm", True) else None
        self._gates_first = not getattr(norm, "norm_before_gate", False)
        self._num_norm_groups = 0  # of the whole model; 0 without a norm
        if norm is not None:
            width = mixer.intermediate_size * (1 if step.ranks is None else step.ranks.tensor_size)
            self._num_norm_groups = norm.n_groups if hasattr(norm, "n_groups") else width // norm.group_size

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[1, T, hidden] -> [1, T, hidden]; what else transformers passes is for its own cache."""
        mixer = self._mixer
        projected = mixer.in_proj(scaled(hidden_states[0], getattr(mixer, "ssm_in_multiplier", 1)))
        if hasattr(mixer, "mup_vector"):
            projected = projected * mixer.mup_vector[0]
        widths = [mixer.intermediate_size, mixer.conv_dim, mixer.num_heads]
        gate, raw, dt = torch.split(projected, widths, dim=-1)
        heads = (mixer.num_heads, mixer.head_dim)
        groups = (mixer.n_groups, mixer.ssm_state_size)
        conv = mixer.conv1d
        weight = conv.weight.squeeze(1)
        net = Mamba2(weight, conv.bias, mixer.A_log, mixer.dt_bias, mixer.D, heads, groups, *self._limits)
        y = run_mamba2(raw, dt, net, self._layer, self._step.inputs, self._step.kernels)
        out: Tensor = mixer.out_proj(self._gated(y, gate))
        return out[None]

    def _gated(self, y: Tensor, gate: Tensor) -> Tensor:
        """The gated norm of y, both [T, intermediate]; the gate alone where the module has no norm."""
        kernels = self._step.kernels
        if not self._num_norm_groups:
            return kernels.silu_mul(gate, y)
        norm = self._mixer.norm
        return gated_norm(
            y, gate, norm.weight, norm.variance_epsilon, self._num_norm_groups,
            self._step.ranks, kernels, gates_first=self._gates_first,
        )  # fmt: skip


Projections = tuple[Tensor, Tensor, Tensor, Tensor]
"""What is convolved (queries, keys, values) [T, channels], gates [T, Hv, Dv], b [T, Hv] and a [T, Hv]. Hk,
Hv // Hk may stand in the place of Hv."""


_PROJECTIONS = (
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    ("in_proj_qkvz", "in_proj_ba"),
    ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"),
)
"""The modules of a gated delta net that read the hidden states: of Qwen3.5, Qwen3-Next and OLMo-Hybrid."""


class GatedDeltaNetForward:
    """The forward of a gated delta net."""

    def __init__(self, mixer: Any, layer: int, step: CurrentStep) -> None:
        self._mixer = mixer
        self._layer = layer
        self._step = step
        names = next(names for names in _PROJECTIONS if hasattr(mixer, names[0]))
        self._joint = JointLinear(mixer, names)
        self._is_by_key_head = len(names) == 2
        self._norm, self._out = ("o_norm", "o_proj") if hasattr(mixer, "o_norm") else ("norm", "out_proj")
        num_heads = mixer.num_v_heads
        self._widths = [2 * mixer.key_dim + mixer.value_dim, mixer.value_dim, num_heads, num_heads]
        self._key_heads = (mixer.num_k_heads, mixer.head_k_dim)
        self._value_heads = (num_heads, mixer.head_v_dim)

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[1, T, hidden] -> [1, T, hidden]; what else transformers passes is for its own cache."""
        mixer = self._mixer
        kernels = self._step.kernels
        raw, gate, b, a = self._project(hidden_states[0])
        doubles_beta = bool(getattr(mixer, "allow_neg_eigval", False))  # beta may lie between 0 and 2
        net = DeltaNet(
            mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias, mixer.A_log, mixer.dt_bias,
            self._key_heads, self._value_heads, doubles_beta,
        )  # fmt: skip
        out = run_delta_net(raw, a, b, net, self._layer, self._step.inputs, kernels)
        norm = getattr(mixer, self._norm)
        normed = kernels.rms_norm_then_gate(out, gate, norm.weight, norm.variance_epsilon)
        projected: Tensor = getattr(mixer, self._out)(normed.flatten(1))
        return projected[None]

    def _project(self, hidden: Tensor) -> Projections:
        """[T, hidden] -> the projections of all tokens."""
        if self._is_by_key_head:
            return self._project_by_key_head(hidden)
        raw, gate, b, a = torch.split_with_sizes(self._joint(hidden), self._widths, dim=-1)
        return raw, torch.unflatten(gate, -1, self._value_heads), b, a

    def _project_by_key_head(self, hidden: Tensor) -> Projections:
        """Of Qwen3-Next's two projections, whose rows are grouped by key head."""
        mixer = self._mixer
        num_heads = mixer.num_k_heads
        heads_per_key = mixer.num_v_heads // num_heads
        value_width = heads_per_key * mixer.head_v_dim
        widths = [2 * (mixer.key_dim + mixer.value_dim), 2 * mixer.num_v_heads]
        qkvz, ba = torch.split(self._joint(hidden), widths, dim=-1)
        widths = [mixer.head_k_dim, mixer.head_k_dim, value_width, value_width]
        query, key, value, gate = torch.split(torch.unflatten(qkvz, -1, (num_heads, -1)), widths, dim=-1)
        b, a = torch.unflatten(ba, -1, (num_heads, 2, heads_per_key)).unbind(2)
        raw = query.new_empty(len(hidden), 2 * mixer.key_dim + mixer.value_dim)
        parts = torch.split(raw, [mixer.key_dim, mixer.key_dim, mixer.value_dim], dim=-1)
        for part, tensor in zip(parts, (query, key, value), strict=True):
            torch.unflatten(part, -1, (num_heads, -1)).copy_(tensor)
        return raw, torch.unflatten(gate, -1, (heads_per_key, -1)), b, a


def short_conv_forward(mixer: Any, layer: int, step: CurrentStep) -> Callable[..., Tensor]:
    """The forward of LFM2's gated short convolution."""

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        B, C, x = mixer.in_proj(hidden_states[0]).chunk(3, dim=-1)
        y = convolve(
            B * x, mixer.conv.weight.squeeze(1), mixer.conv.bias, "short_conv", layer,
            step.inputs, step.kernels, activation=False,
        )  # fmt: skip
        out: Tensor = mixer.out_proj(C * y)
        return out[None]

    return forward
