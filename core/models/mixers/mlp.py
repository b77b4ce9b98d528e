"""The layer between mixers."""

import torch.nn.functional as F
from torch import Tensor, nn

from ...inference.contexts.step_inputs import StepInputs
from ...inference.kernels.kernel_set import KernelSet
from ..hybrid_config import HybridConfig
from ..model_weights import ModelWeights


class MLP(nn.Module):
    """Two projections around a squared ReLU (arXiv 2109.08668)."""

    def __init__(self, config: HybridConfig, layer_index: int, weights: ModelWeights) -> None:
        super().__init__()
        own = weights.part_of(config.mlp_hidden_size)
        self.up_proj = weights.linear("up_proj", config.mlp_hidden_size, config.hidden_size, rows=own)
        self.down_proj = weights.linear("down_proj", config.hidden_size, config.mlp_hidden_size, columns=own)

    def forward(self, hidden: Tensor, inputs: StepInputs, kernels: KernelSet) -> Tensor:
        return F.linear(kernels.relu_squared(F.linear(hidden, self.up_proj)), self.down_proj)
