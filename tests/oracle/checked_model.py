"""Small models that the checks of batch invariance run, and the sizes of their engines."""

from dataclasses import replace
from typing import Any

import mambaslots as ms
import torch
from oracle.serving import small_config

CONFIG = ms.InferenceConfig(
    block_size_tokens=16, max_requests=4, max_tokens_per_step=64, max_sequence_length=256, num_kv_blocks=64,
    num_mamba_slots=8,
)  # fmt: skip


def model_of(pattern: str, dtype: torch.dtype = torch.bfloat16) -> ms.models.HybridLM:
    return ms.models.HybridLM(small_config(16, dtype, pattern), seed=3)


def on(device: str, model: ms.models.HybridLM, **changes: Any) -> ms.HybridStateSpec:
    """The model's spec, as if the model were on `device`."""
    spec = replace(model.state_spec(), **changes)
    object.__setattr__(spec, "device", torch.device(device))
    return spec
