"""The shape of the small model, and the weights that its training starts from."""

import math

import torch
from mambaslots.models import HybridConfig, HybridLM
from torch import Tensor

from .special_tokens import VOCAB_SIZE

CONFIG = HybridConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=256,
    pattern="M-G-*-M-G-*-",
    mamba_num_heads=8,
    mamba_head_dim=64,
    mamba_num_groups=2,
    mamba_state_dim=32,
    conv_kernel=4,
    ssd_chunk_size=32,
    delta_num_key_heads=4,
    delta_key_dim=32,
    delta_num_value_heads=8,
    delta_value_dim=64,
    delta_chunk_size=32,
    num_attention_heads=8,
    num_kv_heads=2,
    head_dim=32,
    mlp_hidden_size=512,
    rotary_base=10000.0,
    norm_eps=1e-5,
)


def starting_model(seed: int, config: HybridConfig = CONFIG) -> HybridLM:
    """A model in float32 on the CPU whose weights can be trained."""
    model = HybridLM(config)
    with torch.no_grad():
        for name, weight in _starting_weights(config, seed).items():
            model.get_parameter(name).copy_(weight)
    return model.requires_grad_()


def _starting_weights(config: HybridConfig, seed: int) -> dict[str, Tensor]:
    """Random weights by `HybridLM`'s names.

    Projections into the residual stream are small, and the head is zero: the first loss is log(vocab_size).
    Decays and time steps are those of the Mamba-2 paper's code: A from 1 to 16, time steps from 0.001 to 0.1.
    """
    random = torch.Generator().manual_seed(seed)
    hidden, num_residuals = config.hidden_size, len(config.pattern)

    def linear(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=random) * gain * columns**-0.5

    def uniform(size: int, low: float, high: float) -> Tensor:
        return torch.rand(size, generator=random) * (high - low) + low

    def out(columns: int) -> Tensor:
        return linear(hidden, columns, gain=num_residuals**-0.5)

    def taps(channels: int, kernel: int) -> Tensor:
        return uniform(channels * kernel, -(kernel**-0.5), kernel**-0.5).view(channels, kernel)

    def decays(heads: int) -> dict[str, Tensor]:
        steps = uniform(heads, math.log(1e-3), math.log(1e-1)).exp()
        return {"dt_bias": steps.expm1().log(), "A_log": uniform(heads, 1.0, 16.0).log()}

    def layer(kind: str) -> dict[str, Tensor]:
        if kind == "M":
            inner, heads = config.mamba_num_heads * config.mamba_head_dim, config.mamba_num_heads
            conv = inner + 2 * config.mamba_num_groups * config.mamba_state_dim
            return {
                "in_proj": linear(inner + conv + heads, hidden),
                "conv_weight": taps(conv, config.conv_kernel),
                "conv_bias": torch.zeros(conv),
                **decays(heads),
                "D": torch.ones(heads),
                "norm": torch.ones(inner),
                "out_proj": out(inner),
            }
        if kind == "G":
            heads, values = (
                config.delta_num_value_heads,
                config.delta_num_value_heads * config.delta_value_dim,
            )
            conv = 2 * config.delta_num_key_heads * config.delta_key_dim + values
            return {
                "in_proj": linear(values + conv + 2 * heads, hidden),
                "conv_weight": taps(conv, config.conv_kernel),
                **decays(heads),
                "norm": torch.ones(config.delta_value_dim),
                "out_proj": out(values),
            }
        if kind == "*":
            query, kv = config.num_attention_heads * config.head_dim, config.num_kv_heads * config.head_dim
            return {
                "q_proj": linear(query, hidden),
                "k_proj": linear(kv, hidden),
                "v_proj": linear(kv, hidden),
                "o_proj": out(query),
            }
        return {
            "up_proj": linear(config.mlp_hidden_size, hidden),
            "down_proj": out(config.mlp_hidden_size),
        }

    weights = {"embedding": torch.randn(config.vocab_size, hidden, generator=random) * 0.5}
    for index, kind in enumerate(config.pattern):
        weights |= {f"layers.{index}.{name}": weight for name, weight in layer(kind).items()}
        weights[f"norms.{index}"] = torch.ones(hidden)
    weights["final_norm"] = torch.ones(hidden)
    weights["lm_head"] = torch.zeros(config.vocab_size, hidden)
    return weights
