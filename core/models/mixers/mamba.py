"""Mamba-2's mixer."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...inference.contexts.step_inputs import StepInputs
from ...inference.kernels.kernel_set import KernelSet
from ...parallel_groups import Part
from ..hybrid_config import HybridConfig
from ..layer_steps import convolve, scan_ssd
from ..model_weights import ModelWeights, channels
from ..norm_over_ranks import gated_rms_norm_over_ranks


class MambaMixer(nn.Module):
    """Mamba-2's block (arXiv 2405.21060, section 7.1), with a biased convolution and a norm per group."""

    def __init__(self, config: HybridConfig, layer_index: int, weights: ModelWeights) -> None:
        super().__init__()
        self.config = config.of_one_rank(weights.groups)
        self.layer_index = layer_index
        self.groups = weights.groups
        self.heads = config.part_of("mamba_num_heads", weights.groups)
        self.head_groups = config.part_of("mamba_num_groups", weights.groups)
        heads, kernel = self.heads.indices, config.conv_kernel
        # `memory` counts tokens. dt falls with the square root of `memory`: so all heads' states have one
        # magnitude.
        shortest, longest = math.log10(8.0), math.log10(512.0)
        memory = torch.logspace(shortest, longest, config.mamba_num_heads, dtype=torch.float64, device="cpu")
        dt = 1.5 * memory.rsqrt()
        # Rows of the projection: the gate, then what is convolved (x, B and C), then dt.
        x, conv = _mixer_channels(config, self.heads, self.head_groups)
        after = config.inner_dim + config.conv_dim
        rows = [*x, *(config.inner_dim + channel for channel in conv), *(after + head for head in heads)]
        self.in_proj = weights.linear(
            "in_proj", after + config.mamba_num_heads, config.hidden_size, rows=rows
        )
        self.conv_weight = weights.normal("conv_weight", config.conv_dim, kernel, std=kernel**-0.5, rows=conv)
        # With this bias SiLU of a standard normal has a mean near zero. Slow heads would sum up any other
        # mean.
        self.conv_bias = weights.full("conv_bias", config.conv_dim, -0.5, rows=conv)
        self.dt_bias = weights.constant("dt_bias", dt.expm1().log(), rows=heads, wide=True)
        self.A_log = weights.constant("A_log", -(memory * dt).log(), rows=heads, wide=True)
        self.D = weights.full("D", config.mamba_num_heads, 0.5, rows=heads, wide=True)
        self.norm = weights.ones("norm", config.inner_dim, rows=x)
        self.out_proj = weights.linear("out_proj", config.hidden_size, config.inner_dim, columns=x)

    def forward(self, hidden: Tensor, inputs: StepInputs, kernels: KernelSet) -> Tensor:
        config = self.config
        gate, raw, dt = torch.split(
            F.linear(hidden, self.in_proj),
            [config.inner_dim, config.conv_dim, config.mamba_num_heads],
            dim=-1,
        )
        dt, A = kernels.time_steps(dt, self.dt_bias, self.A_log)
        layer = self.layer_index
        xBC = convolve(raw, self.conv_weight, self.conv_bias, "conv", layer, inputs, kernels)
        B, C = self._BC(xBC)
        y = scan_ssd(self._x(xBC), dt, A, B, C, self.D, layer, inputs, kernels).flatten(1)
        if self.groups.tensor_size > self.head_groups.total:
            normed = gated_rms_norm_over_ranks(
                y, gate, self.norm, config.norm_eps, self.head_groups.total, self.groups, config.compute_dtype
            )
        else:
            normed = kernels.gated_rms_norm(y, gate, self.norm, config.mamba_num_groups, config.norm_eps)
        return F.linear(normed, self.out_proj)

    def _x(self, xBC: Tensor) -> Tensor:
        """[..., conv_dim] -> x [..., H, P], a view."""
        return torch.unflatten(xBC[..., : self.config.inner_dim], -1, (self.config.mamba_num_heads, -1))

    def _BC(self, xBC: Tensor) -> tuple[Tensor, Tensor]:  # noqa: N802
        """[..., conv_dim] -> B and C [..., G, N], views."""
        both = torch.unflatten(xBC[..., self.config.inner_dim :], -1, (2, self.config.mamba_num_groups, -1))
        return both[..., 0, :, :], both[..., 1, :, :]


def _mixer_channels(config: HybridConfig, heads: Part, head_groups: Part) -> tuple[list[int], list[int]]:
    """One rank's channels of x, and all channels that the rank convolves: x, then its groups' B and C."""
    groups, width = head_groups.indices, config.mamba_state_dim
    x = channels(heads.indices, config.mamba_head_dim)
    B = channels(groups, width, config.inner_dim)
    C = channels(groups, width, config.inner_dim + config.mamba_num_groups * width)
    return x, [*x, *B, *C]
