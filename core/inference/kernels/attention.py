"""Attention over the paged KV cache on a GPU, by the first backend that takes the cache.

1. FlashAttention-3, `attention_flash`.
2. torch's own variable-length attention, `attention_varlen`.
3. torch operations, `attention_torch`, which take every cache.

The reference is `reference.paged_attention`.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from . import attention_flash, attention_torch, attention_varlen
from .attention_rows import AttentionRows


class Backend(NamedTuple):
    """One way to compute attention.

    Attributes:
        name: the words of `describe`.
        attend: has the arguments of `paged_attention`.
        rejected: why each better backend is not used.
    """

    name: str
    attend: Callable[[Tensor, Tensor, AttentionRows, float | None], Tensor]
    rejected: tuple[str, ...] = ()


def paged_attention(
    query: Tensor, kv_cache: Tensor, rows: AttentionRows, *, scale: float | None = None
) -> Tensor:
    """`reference.paged_attention`. Does not synchronise, and a CUDA graph can capture it.

    A backend that takes 16-bit floats rounds the queries to the dtype of the cache. All rows of a block that
    holds any token must be finite, as `write_kv` leaves them: FlashAttention multiplies rows that nobody has
    written by 0, and 0 * NaN is NaN.

    Args:
        query: [T, heads, head dim].
        kv_cache: [2, blocks, block size, KV heads, head dim].
        rows: the rows of the step.
        scale: of the scores; None is head dim ** -0.5.

    Returns: the shape and dtype of `query`; what padding tokens get is unspecified.
    """
    block_size, _, head_dim = kv_cache.shape[2:]
    attend = backend(query.device, kv_cache.dtype, head_dim, block_size).attend
    return attend(query, kv_cache, rows, scale)


@cache
def backend(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> Backend:
    """The backend for a KV cache of this dtype, head dim and block size. A broken package is rejected."""
    rejected: list[str] = []
    for module in (attention_flash, attention_varlen):
        reason = module.rejection(device, dtype, head_dim, block_size)
        if not reason:
            return Backend(module.name(), module.paged_attention, tuple(rejected))
        rejected.append(reason)
    return Backend(attention_torch.name(dtype), attention_torch.paged_attention, tuple(rejected))


def fixed_splits(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str:
    """How `AttentionRows.one_split` cuts sequences, in words; the arguments are those of `describe`."""
    if backend(device, dtype, head_dim, block_size).attend is attention_flash.paged_attention:
        return attention_flash.fixed_splits(block_size)
    return "one split"


def describe(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str:
    """Which backend computes attention, and why no better one does.

    Args:
        device, dtype: of the KV cache.
        head_dim: numbers of a head.
        block_size: tokens of a KV block.
    """
    if device.type != "cuda" or dtype == torch.float64:  # `kernel_set` takes the reference
        return f"attention: {attention_torch.name(dtype)}"
    chosen = backend(device, dtype, head_dim, block_size)
    return "; ".join([f"attention: {chosen.name}", *chosen.rejected])
