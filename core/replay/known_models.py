"""The models that need no config."""

import torch

from ..state_spec import HybridStateSpec, StateTensor, gated_delta_net_states, mamba2_states


def _spec(states: tuple[StateTensor, ...], layers: int, heads: int, dim: int) -> HybridStateSpec:
    """With attention layers, KV heads and their dimension."""
    return HybridStateSpec(states, layers, heads, dim, torch.bfloat16, 1 << 17, torch.device("cpu"))


_NEMOTRON_H_8B = mamba2_states(
    layers=24, heads=128, head_dim=64, groups=8, state_dim=128, conv_kernel=4,
    conv_dtype=torch.bfloat16, ssm_dtype=torch.float32, grid=128,
)  # fmt: skip
_QWEN3_5_35B = gated_delta_net_states(
    layers=30, key_heads=16, key_dim=128, value_heads=32, value_dim=128, conv_kernel=4,
    conv_dtype=torch.bfloat16, state_dtype=torch.float32,
)  # fmt: skip
KNOWN_MODELS = {
    "nemotron-h-8b": (_spec(_NEMOTRON_H_8B, 4, 8, 128), 4096, 24),
    "qwen3.5-35b": (_spec(_QWEN3_5_35B, 10, 2, 256), 2048, 40),
}
"""Of each name in `setting.MODELS`: spec, hidden size and number of MLP layers."""
