"""Gated delta nets of transformers (qwen3_next, qwen3_5, qwen3_5_moe, olmo_hybrid)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...models.layer_steps import convolve, scan_gated_delta_rule
from ..current_step import CurrentStep

Projections = tuple[Tensor, Tensor, Tensor, Tensor]
"""What is convolved (queries, keys, values) [T, channels], gates [T, Hv, Dv], b [T, Hv] and a [T, Hv]."""


class GatedDeltaNetForward:
    """The forward of Qwen3.5's gated delta net, over the states of a step's sequences.

    Args:
        mixer: the module; its weights are used, and not copied.
        layer: its index among the model's mixers.
        step: the step that the model computes now.
    """

    def __init__(self, mixer: nn.Module, layer: int, step: CurrentStep) -> None:
        self._mixer: Any = mixer
        self._layer = layer
        self._step = step

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[1, T, hidden] -> [1, T, hidden]; what transformers passes beside it is for its own cache."""
        mixer, inputs, kernels = self._mixer, self._step.inputs, self._step.kernels
        pool, compute_dtype = inputs.state_pool, kernels.compute_dtype(hidden_states.dtype)
        raw, gate, b, a = self._project(hidden_states)
        qkv = convolve(
            raw,
            mixer.conv1d.weight.squeeze(1),
            mixer.conv1d.bias,
            pool["gdn_conv"][self._layer],
            inputs,
            kernels,
            out_dtype=raw.dtype,  # as transformers rounds; tensor cores multiply in this dtype
        )
        q, k, v = torch.split(qkv, [mixer.key_dim, mixer.key_dim, mixer.value_dim], dim=-1)
        decay = F.softplus(a.to(compute_dtype) + mixer.dt_bias.to(compute_dtype))
        out = scan_gated_delta_rule(
            torch.unflatten(q, -1, (mixer.num_k_heads, mixer.head_k_dim)),
            torch.unflatten(k, -1, (mixer.num_k_heads, mixer.head_k_dim)),
            torch.unflatten(v, -1, (mixer.num_v_heads, mixer.head_v_dim)),
            -mixer.A_log.to(compute_dtype).exp() * decay,
            self._beta(b.to(compute_dtype)),
            pool["delta"][self._layer],
            inputs,
            kernels,
        )
        return self._finish(out.to(hidden_states.dtype), gate)[None]

    def _project(self, hidden: Tensor) -> Projections:
        """[1, T, hidden] -> the projections of all tokens."""
        mixer = self._mixer
        gate = torch.unflatten(mixer.in_proj_z(hidden[0]), -1, (mixer.num_v_heads, mixer.head_v_dim))
        return mixer.in_proj_qkv(hidden[0]), gate, mixer.in_proj_b(hidden[0]), mixer.in_proj_a(hidden[0])

    def _beta(self, b: Tensor) -> Tensor:
        """How much of its value a token writes, [T, Hv]."""
        return b.sigmoid()

    def _finish(self, out: Tensor, gate: Tensor) -> Tensor:
        """The gated norm of each head, out and gate [T, Hv, Dv], and the last projection: [T, hidden]."""
        mixer = self._mixer
        normed = mixer.norm(out.flatten(0, 1), gate.flatten(0, 1))
        projected: Tensor = mixer.out_proj(normed.view(len(out), -1))
        return projected


class Qwen3NextForward(GatedDeltaNetForward):
    """`GatedDeltaNetForward` with Qwen3-Next's two projections, whose rows are grouped by key head."""

    def _project(self, hidden: Tensor) -> Projections:
        mixer = self._mixer
        query, key, value, gate, b, a = mixer.fix_query_key_value_ordering(
            mixer.in_proj_qkvz(hidden), mixer.in_proj_ba(hidden)
        )
        raw = torch.cat([tensor[0].flatten(1) for tensor in (query, key, value)], dim=-1)
        return raw, gate[0], b[0], a[0]


class OlmoHybridForward(GatedDeltaNetForward):
    """`GatedDeltaNetForward` with OLMo-Hybrid's six projections; beta may lie between 0 and 2."""

    def _project(self, hidden: Tensor) -> Projections:
        mixer, hidden = self._mixer, hidden[0]
        raw = torch.cat([mixer.q_proj(hidden), mixer.k_proj(hidden), mixer.v_proj(hidden)], dim=-1)
        gate = torch.unflatten(mixer.g_proj(hidden), -1, (mixer.num_v_heads, mixer.head_v_dim))
        return raw, gate, mixer.b_proj(hidden), mixer.a_proj(hidden)

    def _beta(self, b: Tensor) -> Tensor:
        beta = super()._beta(b)
        return 2.0 * beta if self._mixer.allow_neg_eigval else beta

    def _finish(self, out: Tensor, gate: Tensor) -> Tensor:
        mixer = self._mixer
        normed = mixer.o_norm(out.flatten(0, 1), gate.flatten(0, 1))
        projected: Tensor = mixer.o_proj(normed.view(len(out), -1))
        return projected
