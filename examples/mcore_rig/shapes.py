"""The sizes of the models that the rig builds: a tiny one, and Nemotron-H-8B's."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    """A hybrid model, and how it is served.

    Attributes:
        pattern: the layers: M (Mamba), G (gated delta net), * (attention), - (MLP).
        vocabulary: tokens; those below 256 stand for bytes.
        ssd_chunk: tokens of a chunk of the recurrent layers' kernels; cached states lie on multiples of it.
        block: tokens of a KV block, a multiple of `ssd_chunk`.
        max_sequence_length: tokens of a prompt with its answer.
        settings: of megatron-core's TransformerConfig.
        far_reaching: whether weights are made to forget slowly and to be large, so that a wrong state of this
            small model gives other tokens. Otherwise megatron-core initialises them as it does for training.
    """

    pattern: str
    vocabulary: int
    ssd_chunk: int
    block: int
    max_sequence_length: int
    settings: Mapping[str, Any] = field(repr=False)
    far_reaching: bool = False


def squared_relu(hidden: Tensor) -> Tensor:
    """megatron-core's activation of this name, uncompiled: each new batch size would compile it again."""
    return torch.square(F.relu(hidden))


TINY = Shape(
    "M*-",
    vocabulary=256,
    ssd_chunk=16,  # the least that Triton's matrix products take
    block=32,
    max_sequence_length=1024,
    settings={
        "hidden_size": 32, "mamba_num_heads": 2, "mamba_head_dim": 16, "mamba_state_dim": 16,
        "mamba_num_groups": 1, "num_attention_heads": 2, "add_bias_linear": True,
    },
    far_reaching=True,
)  # fmt: skip
TINY_GATED_DELTA_NET = Shape(
    "G*G-",
    vocabulary=256,
    ssd_chunk=64,  # of fla's kernels
    block=64,
    max_sequence_length=1024,
    settings={
        "hidden_size": 32, "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "mamba_num_heads": 2, "mamba_num_groups": 1, "num_attention_heads": 2,
        "normalization": "RMSNorm", "activation_func": F.silu, "add_bias_linear": False,
    },
    far_reaching=True,
)  # fmt: skip
NEMOTRON_8B = Shape(
    "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    vocabulary=131072,
    ssd_chunk=128,
    block=256,
    max_sequence_length=8192,
    settings={
        "hidden_size": 4096, "ffn_hidden_size": 21504, "mamba_num_heads": 128, "mamba_head_dim": 64,
        "mamba_state_dim": 128, "mamba_num_groups": 8, "num_attention_heads": 32, "num_query_groups": 8,
        "kv_channels": 128, "normalization": "RMSNorm", "activation_func": squared_relu,
        "add_bias_linear": False,
    },
)  # fmt: skip
SHAPES = {"tiny": TINY, "tiny gdn": TINY_GATED_DELTA_NET, "8b": NEMOTRON_8B}
