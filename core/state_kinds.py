"""The state tensors of the kinds of layer that are served: what to pass as `HybridStateSpec.states`.

`layers`, heads, groups and channels are numbers, or a `Part` of the whole model's where ranks split them.
"""

import torch

from .model_shard import Part
from .state_tensor import StateSegment, StateSplit, StateTensor

Count = int | Part


def mamba2_states(
    layers: Count,
    heads: Count,
    head_dim: int,
    groups: Count,
    state_dim: int,
    conv_kernel: int,
    conv_dtype: torch.dtype,
    ssm_dtype: torch.dtype,
    grid: int,
) -> tuple[StateTensor, StateTensor]:
    """Mamba-2 (arXiv 2405.21060): "conv" [x, B and C, taps - 1] and "ssm" [heads, head dim, state dim].

    `grid`: tokens of an SSD chunk.
    """
    heads, groups = _part(heads), _part(groups)
    channels = (
        StateSegment(heads, head_dim),
        StateSegment(groups, state_dim),
        StateSegment(groups, state_dim),
    )
    return (
        _tensor("conv", layers, channels, (conv_kernel - 1,), conv_dtype, 1),
        _tensor("ssm", layers, (StateSegment(heads),), (head_dim, state_dim), ssm_dtype, grid),
    )


def gated_delta_net_states(
    layers: Count,
    key_heads: Count,
    key_dim: int,
    value_heads: Count,
    value_dim: int,
    conv_kernel: int,
    conv_dtype: torch.dtype,
    state_dtype: torch.dtype,
    grid: int = 64,
) -> tuple[StateTensor, StateTensor]:
    """Gated delta net (arXiv 2412.06464): "gdn_conv" [q, k and v, taps - 1], "delta" [heads, key, value].

    `grid`: tokens of a chunk of the scan.
    """
    key_heads, value_heads = _part(key_heads), _part(value_heads)
    channels = (
        StateSegment(key_heads, key_dim),
        StateSegment(key_heads, key_dim),
        StateSegment(value_heads, value_dim),
    )
    return (
        _tensor("gdn_conv", layers, channels, (conv_kernel - 1,), conv_dtype, 1),
        _tensor("delta", layers, (StateSegment(value_heads),), (key_dim, value_dim), state_dtype, grid),
    )


def short_conv_states(
    layers: Count, channels: Count, conv_kernel: int, dtype: torch.dtype
) -> tuple[StateTensor]:
    """A short convolution (LFM2): "short_conv" [channels, taps - 1], and nothing else."""
    segments = (StateSegment(_part(channels)),)
    return (_tensor("short_conv", layers, segments, (conv_kernel - 1,), dtype, 1),)


def _tensor(
    name: str,
    layers: Count,
    segments: tuple[StateSegment, ...],
    inner: tuple[int, ...],
    dtype: torch.dtype,
    grid: int,
) -> StateTensor:
    split = StateSplit(_part(layers), segments)
    shape = sum(segment.size for segment in segments), *inner
    return StateTensor(name, split.layers.count, shape, dtype, grid, split)


def _part(count: Count) -> Part:
    return count if isinstance(count, Part) else Part(0, count, count)
