"""The gated delta net's mixer."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...inference.contexts.step_inputs import StepInputs
from ...inference.kernels.kernel_set import KernelSet
from ..hybrid_config import HybridConfig
from ..layer_steps import convolve, scan_gated_delta_rule
from ..model_weights import ModelWeights, channels


class GatedDeltaNet(nn.Module):
    """The gated delta net's block (arXiv 2412.06464), as in Qwen3-Next: a norm per head, then the gate.

    Several value heads share a key head: value head h reads key head h // (value heads // key heads). Where
    there are more ranks than key heads, several ranks hold the same key head.
    """

    def __init__(self, config: HybridConfig, layer_index: int, weights: ModelWeights) -> None:
        super().__init__()
        self.config = config.of_one_rank(weights.groups)
        self.layer_index = layer_index
        key_heads = config.part_of("delta_num_key_heads", weights.groups).indices
        heads = config.part_of("delta_num_value_heads", weights.groups).indices
        keys = config.delta_num_key_heads * config.delta_key_dim
        num_heads, values = config.delta_num_value_heads, config.delta_inner_dim
        kernel = config.conv_kernel
        # Rows of the projection: the gate, then what is convolved (q, k and v), then beta's and the decay's.
        own_keys, v = channels(key_heads, config.delta_key_dim), channels(heads, config.delta_value_dim)
        conv = [*own_keys, *(keys + channel for channel in own_keys), *(2 * keys + channel for channel in v)]
        after = values + config.delta_conv_dim
        rows = [*v, *(values + channel for channel in conv)]
        rows += [*(after + head for head in heads), *(after + num_heads + head for head in heads)]
        self.in_proj = weights.linear("in_proj", after + 2 * num_heads, config.hidden_size, rows=rows)
        self.conv_weight = weights.normal(
            "conv_weight", config.delta_conv_dim, kernel, std=kernel**-0.5, rows=conv
        )
        # By their decays alone heads would remember 8 to 512 tokens; later keys overwrite parts of it sooner.
        shortest, longest = math.log10(8.0), math.log10(512.0)
        memory = torch.logspace(shortest, longest, num_heads, dtype=torch.float64, device="cpu")
        one = torch.ones(num_heads, dtype=torch.float64, device="cpu")
        self.dt_bias = weights.constant("dt_bias", one.expm1().log(), rows=heads, wide=True)
        self.A_log = weights.constant("A_log", -memory.log(), rows=heads, wide=True)
        self.norm = weights.ones("norm", config.delta_value_dim)
        self.out_proj = weights.linear("out_proj", config.hidden_size, values, columns=v)

    def forward(self, hidden: Tensor, inputs: StepInputs, kernels: KernelSet) -> Tensor:
        config = self.config
        heads, values = config.delta_num_value_heads, config.delta_inner_dim
        gate, raw, b, a = torch.split(
            F.linear(hidden, self.in_proj), [values, config.delta_conv_dim, heads, heads], dim=-1
        )
        g, beta = kernels.delta_gates(a, b, self.A_log, self.dt_bias)
        qkv = convolve(raw, self.conv_weight, None, "gdn_conv", self.layer_index, inputs, kernels)
        keys = (config.delta_conv_dim - values) // 2
        q, k, v = torch.split(qkv, [keys, keys, values], dim=-1)
        q, k = (torch.unflatten(part, -1, (config.delta_num_key_heads, -1)) for part in (q, k))
        v = torch.unflatten(v, -1, (heads, -1))
        o = scan_gated_delta_rule(q, k, v, g, beta, self.layer_index, inputs, kernels)
        normed = kernels.rms_norm_gated(o, torch.unflatten(gate, -1, (heads, -1)), self.norm, config.norm_eps)
        return F.linear(normed.flatten(1), self.out_proj)
