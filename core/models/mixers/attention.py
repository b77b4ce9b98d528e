"""Attention."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...inference.contexts.step_inputs import StepInputs
from ...inference.kernels.kernel_set import KernelSet
from ..hybrid_config import HybridConfig
from ..layer_steps import attend
from ..model_weights import ModelWeights, channels


class Attention(nn.Module):
    """Grouped-query attention with rotary positions over the paged KV cache."""

    def __init__(self, config: HybridConfig, layer_index: int, weights: ModelWeights) -> None:
        super().__init__()
        self.config = config
        self.layer_index = layer_index
        query_dim = config.num_attention_heads * config.head_dim
        kv_dim = config.num_kv_heads * config.head_dim
        queries = weights.part_of(query_dim)
        kv = channels(weights.shard.kv_heads.indices, config.head_dim)
        # The gain makes scores sharp. With a gain of 1, random keys would average the context away.
        self.q_proj = weights.linear("q_proj", query_dim, config.hidden_size, gain=3.0, rows=queries)
        self.k_proj = weights.linear("k_proj", kv_dim, config.hidden_size, rows=kv)
        self.v_proj = weights.linear("v_proj", kv_dim, config.hidden_size, rows=kv)
        self.o_proj = weights.linear("o_proj", config.hidden_size, query_dim, columns=queries)

    def forward(self, hidden: Tensor, inputs: StepInputs, kernels: KernelSet) -> Tensor:
        config, kv_cache = self.config, inputs.kv_cache[self.layer_index]
        query, key, value = (
            torch.unflatten(F.linear(hidden, weight), 1, (-1, config.head_dim))
            for weight in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = attend(query, key, value, kv_cache, inputs, kernels, rotary_base=config.rotary_base)
        return F.linear(attended.flatten(1), self.o_proj)
