"""Attention over the paged KV cache on a GPU: by flash_attn where it is installed and takes the cache.

Elsewhere `attention_torch` computes. The references are the functions of the same names in `reference`.
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from . import attention_torch

_PAGE_TOKENS = 256
_MAX_HEAD_DIM = 256


def paged_attention_decode(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    kv_lengths: Tensor,
    *,
    scale: float | None = None,
) -> Tensor:
    """`reference.paged_attention_decode`; flash_attn returns the dtype of `kv_cache`."""
    flash = flash_attn_for(kv_cache)
    if flash is None:
        return attention_torch.paged_attention_decode(query, kv_cache, block_table, kv_lengths, scale=scale)
    attended: Tensor = flash.flash_attn_with_kvcache(
        query.to(kv_cache.dtype)[:, None],
        kv_cache[0],
        kv_cache[1],
        cache_seqlens=kv_lengths.int(),
        block_table=block_table.int(),
        softmax_scale=scale,
        causal=True,
    )
    return attended[:, 0]


def paged_attention_verify(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    kv_lengths: Tensor,
    positions: Tensor,
    *,
    scale: float | None = None,
) -> Tensor:
    """`reference.paged_attention_verify`; flash_attn returns the dtype of `kv_cache`.

    flash_attn aligns a row's queries with the row's end, but padding tokens may lie there. Each token is
    therefore a row of its own. A row's KV comes from memory once, and from the GPU's cache for later tokens.
    """
    if flash_attn_for(kv_cache) is None:
        return attention_torch.paged_attention_verify(
            query, kv_cache, block_table, kv_lengths, positions, scale=scale
        )
    seen = torch.minimum(positions + 1, kv_lengths[:, None]).flatten()
    table = block_table.repeat_interleave(positions.shape[1], dim=0)
    attended = paged_attention_decode(query.flatten(0, 1), kv_cache, table, seen, scale=scale)
    return torch.unflatten(attended, 0, positions.shape)


def paged_attention_prefill(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    kv_lengths: Tensor,
    max_query_tokens: int,
    *,
    scale: float | None = None,
) -> Tensor:
    """`reference.paged_attention_prefill`; flash_attn returns the dtype of `kv_cache`."""
    flash = flash_attn_for(kv_cache)
    if flash is None:
        return attention_torch.paged_attention_prefill(
            query, kv_cache, block_table, query_start_loc, kv_lengths, max_query_tokens, scale=scale
        )
    attended: Tensor = flash.flash_attn_varlen_func(
        query.to(kv_cache.dtype),
        kv_cache[0],
        kv_cache[1],
        cu_seqlens_q=query_start_loc.int(),
        cu_seqlens_k=F.pad(kv_lengths.cumsum(0), (1, 0)).int(),
        max_seqlen_q=max_query_tokens,
        max_seqlen_k=block_table.shape[1] * kv_cache.shape[2],
        softmax_scale=scale,
        causal=True,
        block_table=block_table.int(),
    )
    return attended


def flash_attn_for(kv_cache: Tensor) -> ModuleType | None:
    """flash_attn (2.5 or later) where it is installed and takes this cache, else None.

    flash_attn takes 16-bit floats, blocks of whole pages of 256 tokens, and heads whose width is a multiple
    of 8 and at most 256. The callers round queries to the dtype of the cache.
    """
    block_size, _, head_dim = kv_cache.shape[2:]
    fits = (
        kv_cache.dtype in (torch.float16, torch.bfloat16)
        and block_size % _PAGE_TOKENS == 0
        and head_dim % 8 == 0
        and head_dim <= _MAX_HEAD_DIM
    )
    return _installed_flash_attn() if fits else None


@cache
def _installed_flash_attn() -> ModuleType | None:
    if find_spec("flash_attn") is None:
        return None
    return import_module("flash_attn")
