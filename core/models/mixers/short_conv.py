"""The short convolution's mixer."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...inference.contexts.step_inputs import StepInputs
from ...inference.kernels.kernel_set import KernelSet
from ..hybrid_config import HybridConfig
from ..layer_steps import convolve
from ..model_weights import ModelWeights


class ShortConv(nn.Module):
    """LFM2's block: a causal convolution between two gates. Its window of inputs is all that it remembers."""

    def __init__(self, config: HybridConfig, layer_index: int, weights: ModelWeights) -> None:
        super().__init__()
        self.config = config
        self.layer_index = layer_index
        hidden, kernel = config.hidden_size, config.short_conv_kernel
        own = weights.part_of(hidden)
        # Rows of the projection: the gate before the convolution, the gate behind it, and what is convolved.
        rows = [part * hidden + channel for part in range(3) for channel in own]
        self.in_proj = weights.linear("in_proj", 3 * hidden, hidden, rows=rows)
        self.conv_weight = weights.normal("conv_weight", hidden, kernel, std=kernel**-0.5, rows=own)
        self.out_proj = weights.linear("out_proj", hidden, hidden, columns=own)

    def forward(self, hidden: Tensor, inputs: StepInputs, kernels: KernelSet) -> Tensor:
        before, behind, x = torch.chunk(F.linear(hidden, self.in_proj), 3, dim=-1)
        convolved = convolve(
            before * x,
            self.conv_weight,
            None,
            "short_conv",
            self.layer_index,
            inputs,
            kernels,
            activation=False,
        )
        return F.linear(behind * convolved, self.out_proj)
