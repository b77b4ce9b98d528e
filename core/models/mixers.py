"""The kinds of layer that a `HybridLM` is made of."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..inference.contexts.step_inputs import StepInputs
from ..inference.kernels.kernel_set import KernelSet
from ..inference.kernels.mixer_inputs import DeltaNet
from ..layers.mixer_step import Mamba2, attend, convolve, run_delta_net, run_mamba2
from ..layers.over_ranks import gated_norm
from ..layers.weight_part import delta_net_channels, mamba2_channels, shifted, span
from .hybrid_config import HybridConfig
from .weights import ModelWeights


class MambaMixer(nn.Module):
    """Mamba-2's block (arXiv 2405.21060, section 7.1), with a biased convolution and a norm per group."""

    def __init__(self, config: HybridConfig, layer_index: int, weights: ModelWeights) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.ranks = weights.groups if weights.groups.tensor_size > 1 else None
        self.num_norm_groups = config.mamba_num_groups
        self.norm_eps = config.norm_eps
        heads = config.part_of("mamba_num_heads", weights.groups)
        head_groups = config.part_of("mamba_num_groups", weights.groups)
        self.heads = heads.count, config.mamba_head_dim
        self.head_groups = head_groups.count, config.mamba_state_dim
        x, conv, projected = mamba2_channels(
            heads, config.mamba_head_dim, head_groups, config.mamba_state_dim
        )
        self.sizes = [len(x), sum(map(len, conv)), heads.count]  # of the gate, what is convolved, and dt
        num_inner = heads.total * config.mamba_head_dim
        num_convolved = num_inner + 2 * head_groups.total * config.mamba_state_dim
        num_projected = num_inner + num_convolved + heads.total
        self.in_proj = weights.linear("in_proj", num_projected, config.hidden_size, rows=projected)
        kernel = config.conv_kernel
        self.conv_weight = weights.normal("conv_weight", num_convolved, kernel, std=kernel**-0.5, rows=conv)
        # With this bias SiLU of a standard normal has a mean near zero; slow heads would sum up another one.
        self.conv_bias = weights.full("conv_bias", num_convolved, -0.5, rows=conv)
        # dt falls with the square root of the memory: so all heads' states have one magnitude.
        memory = _memory_of_heads(config.mamba_num_heads)
        dt = 1.5 * memory.rsqrt()
        head_rows = [heads.indices]
        self.dt_bias = weights.constant("dt_bias", dt.expm1().log(), rows=head_rows)
        self.A_log = weights.constant("A_log", -(memory * dt).log(), rows=head_rows)
        self.D = weights.full("D", config.mamba_num_heads, 0.5, rows=head_rows)
        self.norm = weights.full("norm", num_inner, 1.0, rows=[x])
        self.out_proj = weights.linear("out_proj", config.hidden_size, num_inner, columns=[x])

    def forward(self, hidden: Tensor, inputs: StepInputs, kernels: KernelSet) -> Tensor:
        gate, raw, dt = torch.split(F.linear(hidden, self.in_proj), self.sizes, dim=-1)
        net = Mamba2(
            self.conv_weight, self.conv_bias, self.A_log, self.dt_bias, self.D, self.heads, self.head_groups
        )
        y = run_mamba2(raw, dt, net, self.layer_index, inputs, kernels)
        normed = gated_norm(y, gate, self.norm, self.norm_eps, self.num_norm_groups, self.ranks, kernels)
        return F.linear(normed, self.out_proj)


def _memory_of_heads(heads: int) -> Tensor:
    """How many tokens each head remembers: 8 to 512."""
    return torch.logspace(math.log10(8.0), math.log10(512.0), heads, dtype=torch.float64, device="cpu")


class GatedDeltaNet(nn.Module):
    """The gated delta net's block (arXiv 2412.06464), as in Qwen3-Next: a norm per head, then the gate."""

    def __init__(self, config: HybridConfig, layer_index: int, weights: ModelWeights) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.norm_eps = config.norm_eps
        keys = config.part_of("delta_num_key_heads", weights.groups)
        heads = config.part_of("delta_num_value_heads", weights.groups)
        num_heads = heads.total
        num_values = num_heads * config.delta_value_dim
        num_convolved = 2 * keys.total * config.delta_key_dim + num_values
        # Rows of the projection: the gate, then what is convolved (q, k and v), then beta's and the decay's.
        conv = delta_net_channels(keys, config.delta_key_dim, heads, config.delta_value_dim)
        v = span(heads, config.delta_value_dim)
        self.keys = (keys.count, config.delta_key_dim)
        self.values = (heads.count, config.delta_value_dim)
        self.sizes = [len(v), sum(map(len, conv)), heads.count, heads.count]
        head_rows = [heads.indices]
        beta_start = num_values + num_convolved
        decay_start = beta_start + num_heads
        rows = [v, *shifted(conv, num_values)]
        rows += [*shifted(head_rows, beta_start), *shifted(head_rows, decay_start)]
        self.in_proj = weights.linear("in_proj", decay_start + num_heads, config.hidden_size, rows=rows)
        kernel = config.conv_kernel
        self.conv_weight = weights.normal("conv_weight", num_convolved, kernel, std=kernel**-0.5, rows=conv)
        # By their decays alone heads would remember 8 to 512 tokens; later keys overwrite parts of it sooner.
        memory = _memory_of_heads(num_heads)
        one = torch.ones(num_heads, dtype=torch.float64, device="cpu")
        self.dt_bias = weights.constant("dt_bias", one.expm1().log(), rows=head_rows)
        self.A_log = weights.constant("A_log", -memory.log(), rows=head_rows)
        self.norm = weights.full("norm", config.delta_value_dim, 1.0)
        self.out_proj = weights.linear("out_proj", config.hidden_size, num_values, columns=[v])

    def forward(self, hidden: Tensor, inputs: StepInputs, kernels: KernelSet) -> Tensor:
        gate, raw, b, a = torch.split(F.linear(hidden, self.in_proj), self.sizes, dim=-1)
        net = DeltaNet(self.conv_weight, None, self.A_log, self.dt_bias, self.keys, self.values)
        o = run_delta_net(raw, a, b, net, self.layer_index, inputs, kernels)
        gate = torch.unflatten(gate, -1, self.values)
        normed = kernels.rms_norm_then_gate(o, gate, self.norm, self.norm_eps)
        return F.linear(normed.flatten(1), self.out_proj)


class ShortConv(nn.Module):
    """LFM2's block: a causal convolution between two gates. Its window of inputs is all that it remembers."""

    def __init__(self, config: HybridConfig, layer_index: int, weights: ModelWeights) -> None:
        super().__init__()
        self.layer_index = layer_index
        size = config.hidden_size
        channels = [config.part_of("hidden_size", weights.groups).indices]
        # Rows of the projection: the gate before the convolution, the gate after it, and what is convolved.
        rows = [*channels, *shifted(channels, size), *shifted(channels, 2 * size)]
        self.in_proj = weights.linear("in_proj", 3 * size, size, rows=rows)
        kernel = config.short_conv_kernel
        self.conv_weight = weights.normal("conv_weight", size, kernel, std=kernel**-0.5, rows=channels)
        self.out_proj = weights.linear("out_proj", size, size, columns=channels)

    def forward(self, hidden: Tensor, inputs: StepInputs, kernels: KernelSet) -> Tensor:
        gate_before, gate_after, x = torch.chunk(F.linear(hidden, self.in_proj), 3, dim=-1)
        layer = self.layer_index
        weight = self.conv_weight
        y = convolve(gate_before * x, weight, None, "short_conv", layer, inputs, kernels, activation=False)
        return F.linear(gate_after * y, self.out_proj)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions over the paged KV cache."""

    def __init__(self, config: HybridConfig, layer_index: int, weights: ModelWeights) -> None:
        super().__init__()
        self.config = config
        self.layer_index = layer_index
        query_dim = config.num_attention_heads * config.head_dim
        kv_dim = config.num_kv_heads * config.head_dim
        queries = [span(config.part_of("num_attention_heads", weights.groups), config.head_dim)]
        kv = [span(config.part_of("num_kv_heads", weights.groups), config.head_dim)]
        # The gain makes scores sharp. With a gain of 1, random keys would average the context away.
        self.q_proj = weights.linear("q_proj", query_dim, config.hidden_size, gain=3.0, rows=queries)
        self.k_proj = weights.linear("k_proj", kv_dim, config.hidden_size, rows=kv)
        self.v_proj = weights.linear("v_proj", kv_dim, config.hidden_size, rows=kv)
        self.o_proj = weights.linear("o_proj", config.hidden_size, query_dim, columns=queries)

    def forward(self, hidden: Tensor, inputs: StepInputs, kernels: KernelSet) -> Tensor:
        heads = (-1, self.config.head_dim)
        query = torch.unflatten(F.linear(hidden, self.q_proj), 1, heads)
        key = torch.unflatten(F.linear(hidden, self.k_proj), 1, heads)
        value = torch.unflatten(F.linear(hidden, self.v_proj), 1, heads)
        query, key = kernels.qk_norm_rotary(query, key, *rotary_angles(inputs.positions, self.config))
        attended = attend(query, key, value, inputs.kv_cache[self.layer_index], inputs, kernels)
        return F.linear(attended.flatten(1), self.o_proj)


def rotary_angles(positions: Tensor, config: HybridConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions * base ** (-2 i / head dim), [T, head dim] (arXiv 2104.09864)."""
    half = config.head_dim // 2
    dtype = config.compute_dtype
    exponents = torch.arange(half, dtype=torch.float64, device=positions.device) / half
    angles = positions.to(dtype)[:, None] * (config.rotary_base**-exponents).to(dtype)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


class MLP(nn.Module):
    """Two projections around a squared ReLU (arXiv 2109.08668)."""

    def __init__(self, config: HybridConfig, layer_index: int, weights: ModelWeights) -> None:
        super().__init__()
        size = config.hidden_size
        channels = [config.part_of("mlp_hidden_size", weights.groups).indices]
        self.up_proj = weights.linear("up_proj", config.mlp_hidden_size, size, rows=channels)
        self.down_proj = weights.linear("down_proj", size, config.mlp_hidden_size, columns=channels)

    def forward(self, hidden: Tensor, inputs: StepInputs, kernels: KernelSet) -> Tensor:
        return F.linear(kernels.relu_squared(F.linear(hidden, self.up_proj)), self.down_proj)


MIXERS: dict[str, Callable[[HybridConfig, int, ModelWeights], nn.Module]] = {
    "M": MambaMixer,
    "G": GatedDeltaNet,
    "C": ShortConv,
    "*": Attention,
    "-": MLP,
}
"""By the letters of `HybridConfig.pattern`."""
