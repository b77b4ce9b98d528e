"""The state tensors of the kinds of layer that are served: what to pass as `HybridStateSpec.states`.

`layers`, heads, groups and channels are numbers, or a `Part` of the whole model's where ranks split them.
"""

import torch

from .input_tensor import InputTensor
from .model_shard import Part
from .state_tensor import Coarsest, StateSegment, StateSplit, StateTensor

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
    inputs = (
        InputTensor("ssm_x", (heads.count, head_dim), conv_dtype),
        InputTensor("ssm_B", (groups.count, state_dim), conv_dtype),
        InputTensor("ssm_gates", (2, heads.count), _gate_dtype(conv_dtype), "by_head"),
    )
    return (
        _window("conv", layers, channels, conv_kernel, conv_dtype),
        _tensor(
            "ssm", layers, (StateSegment(heads),), (head_dim, state_dim), ssm_dtype, grid, inputs,
            "int8", 1,
        ),
    )  # fmt: skip


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
    gates = _gate_dtype(conv_dtype)
    inputs = (
        InputTensor("delta_k", (key_heads.count, key_dim), conv_dtype),
        InputTensor("delta_v", (value_heads.count, value_dim), conv_dtype),
        InputTensor("delta_g", (value_heads.count,), gates),
        InputTensor("delta_beta", (value_heads.count,), gates),
    )
    return (
        _window("gdn_conv", layers, channels, conv_kernel, conv_dtype),
        _tensor(
            "delta", layers, (StateSegment(value_heads),), (key_dim, value_dim), state_dtype, grid, inputs,
            "int8", 2,
        ),
    )  # fmt: skip


def short_conv_states(
    layers: Count, channels: Count, conv_kernel: int, dtype: torch.dtype
) -> tuple[StateTensor]:
    """A short convolution (LFM2): "short_conv" [channels, taps - 1], and nothing else."""
    segments = (StateSegment(_part(channels)),)
    return (_window("short_conv", layers, segments, conv_kernel, dtype),)


def _window(
    name: str, layers: Count, segments: tuple[StateSegment, ...], conv_kernel: int, dtype: torch.dtype
) -> StateTensor:
    """The last inputs of a convolution."""
    channels = sum(segment.size for segment in segments)
    ring = InputTensor(f"{name}_in", (channels,), dtype, "ring", taps=conv_kernel)
    return _tensor(name, layers, segments, (conv_kernel - 1,), dtype, 1, (ring,), "bfloat16")


def _gate_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _tensor(
    name: str,
    layers: Count,
    segments: tuple[StateSegment, ...],
    inner: tuple[int, ...],
    dtype: torch.dtype,
    grid: int,
    inputs: tuple[InputTensor, ...],
    coarsest: Coarsest,
    scale_axis: int | None = None,
) -> StateTensor:
    split = StateSplit(_part(layers), segments)
    shape = sum(segment.size for segment in segments), *inner
    return StateTensor(name, split.layers.count, shape, dtype, grid, split, inputs, coarsest, scale_axis)


def _part(count: Count) -> Part:
    return count if isinstance(count, Part) else Part(0, count, count)
