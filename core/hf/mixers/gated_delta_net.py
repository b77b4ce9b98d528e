"""Gated delta nets of transformers (qwen3_next, qwen3_5, qwen3_5_moe, olmo_hybrid)."""

from typing import Any

import torch
from torch import Tensor

from ...models.layer_steps import convolve, scan_gated_delta_rule
from ..current_step import CurrentStep
from ..fused.joint import JointLinear

Projections = tuple[Tensor, Tensor, Tensor, Tensor]
"""What is convolved (queries, keys, values) [T, channels], gates [T, Hv, Dv], b [T, Hv] and a [T, Hv]. Hk,
Hv // Hk may stand in the place of Hv."""


class GatedDeltaNetForward:
    """The forward of Qwen3.5's gated delta net, over the states of a step's sequences.

    Args:
        mixer: the module; its weights are used, and not copied.
        layer: its index among the model's mixers.
        step: the step that the model computes now.
    """

    projections: tuple[str, ...] = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    """The modules that read the hidden states, in the order in which `_project` takes their outputs."""

    def __init__(self, mixer: Any, layer: int, step: CurrentStep) -> None:
        self._mixer = mixer
        self._layer = layer
        self._step = step
        self._joint = JointLinear(mixer, self.projections)
        key_dim, value_dim, heads = mixer.key_dim, mixer.value_dim, mixer.num_v_heads
        self._parts = [key_dim, key_dim, value_dim]
        self._projected = [2 * key_dim + value_dim, value_dim, heads, heads]
        self._key_heads = (mixer.num_k_heads, mixer.head_k_dim)
        self._value_heads = (heads, mixer.head_v_dim)

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[1, T, hidden] -> [1, T, hidden]; what transformers passes beside it is for its own cache."""
        mixer, inputs, kernels = self._mixer, self._step.inputs, self._step.kernels
        raw, gate, b, a = self._project(hidden_states)
        g, beta = kernels.delta_gates(a, b, mixer.A_log, mixer.dt_bias, doubled=self._doubled())
        conv = mixer.conv1d
        qkv = convolve(
            raw,
            conv.weight.squeeze(1),
            conv.bias,
            "gdn_conv",
            self._layer,
            inputs,
            kernels,
        )
        q, k, v = torch.split_with_sizes(qkv, self._parts, dim=-1)
        out = scan_gated_delta_rule(
            torch.unflatten(q, -1, self._key_heads),
            torch.unflatten(k, -1, self._key_heads),
            torch.unflatten(v, -1, self._value_heads),
            g,
            beta,
            self._layer,
            inputs,
            kernels,
        )
        return self._finish(out, gate)[None]

    def _project(self, hidden: Tensor) -> Projections:
        """[1, T, hidden] -> the projections of all tokens."""
        raw, gate, b, a = torch.split_with_sizes(self._joint(hidden[0]), self._projected, dim=-1)
        return raw, torch.unflatten(gate, -1, self._value_heads), b, a

    def _doubled(self) -> bool:
        """Whether a token may write twice its value."""
        return False

    def _finish(self, out: Tensor, gate: Tensor) -> Tensor:
        """The gated norm of each head, and the last projection: [T, hidden]."""
        mixer = self._mixer
        projected: Tensor = mixer.out_proj(self._gated_norm(mixer.norm, out, gate))
        return projected

    def _gated_norm(self, norm: Any, out: Tensor, gate: Tensor) -> Tensor:
        """[T, Hv * Dv]"""
        normed = self._step.kernels.rms_norm_gated(out, gate, norm.weight, norm.variance_epsilon)
        return normed.flatten(1)


class Qwen3NextForward(GatedDeltaNetForward):
    """`GatedDeltaNetForward` with Qwen3-Next's two projections, whose rows are grouped by key head."""

    projections = ("in_proj_qkvz", "in_proj_ba")

    def _project(self, hidden: Tensor) -> Projections:
        mixer, hidden = self._mixer, hidden[0]
        heads, heads_of_key = mixer.num_k_heads, mixer.num_v_heads // mixer.num_k_heads
        key_dim, values = mixer.head_k_dim, heads_of_key * mixer.head_v_dim
        qkvz, ba = torch.split(
            self._joint(hidden), [2 * (mixer.key_dim + mixer.value_dim), 2 * mixer.num_v_heads], dim=-1
        )
        query, key, value, gate = torch.split(
            torch.unflatten(qkvz, -1, (heads, -1)), [key_dim, key_dim, values, values], dim=-1
        )
        b, a = torch.unflatten(ba, -1, (heads, 2, heads_of_key)).unbind(2)
        raw = query.new_empty(len(hidden), 2 * mixer.key_dim + mixer.value_dim)
        parts = torch.split(raw, [mixer.key_dim, mixer.key_dim, mixer.value_dim], dim=-1)
        for part, tensor in zip(parts, (query, key, value), strict=True):
            torch.unflatten(part, -1, (heads, -1)).copy_(tensor)
        return raw, torch.unflatten(gate, -1, (heads_of_key, -1)), b, a


class OlmoHybridForward(GatedDeltaNetForward):
    """`GatedDeltaNetForward` with OLMo-Hybrid's six projections; beta may lie between 0 and 2."""

    projections = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")

    def _doubled(self) -> bool:
        return bool(self._mixer.allow_neg_eigval)

    def _finish(self, out: Tensor, gate: Tensor) -> Tensor:
        mixer = self._mixer
        projected: Tensor = mixer.o_proj(self._gated_norm(mixer.o_norm, out, gate))
        return projected
