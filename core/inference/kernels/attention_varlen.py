"""Attention by torch's variable-length attention, in versions of torch that take a block table."""

import inspect
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention import varlen

from .attention_flash import num_splits
from .attention_rows import AttentionRows

PAGE_TOKENS = 256
MAX_HEAD_DIM = 256


def paged_attention(query: Tensor, kv_cache: Tensor, rows: AttentionRows, scale: float | None) -> Tensor:
    """`attention.paged_attention` of all rows in one call.

    torch aligns a row's queries with the row's end, but padding tokens may lie there in decode rows of
    several tokens. Each token of these rows is therefore a row of its own.
    """
    table, lengths, starts = rows.block_table, rows.kv_lengths, rows.query_start_loc
    longest, width = rows.longest_query, rows.decode_tokens
    if rows.num_decodes and width > 1:
        decodes, decoded = rows.num_decodes, rows.num_decode_tokens
        seen = torch.minimum(
            rows.positions[:decoded].view(decodes, width) + 1, lengths[:decodes, None]
        ).flatten()
        table = torch.cat([table[:decodes].repeat_interleave(width, dim=0), table[decodes:]])
        lengths = torch.cat([seen.int(), lengths[decodes:]])
        ones = torch.arange(decoded, dtype=torch.int32, device=starts.device)
        starts = torch.cat([ones, starts[decodes:]])
        longest = max(1, rows.max_query_tokens)
    out = varlen.varlen_attn(
        query.to(kv_cache.dtype),
        kv_cache[0],
        kv_cache[1],
        starts,
        None,
        longest,
        table.shape[1] * kv_cache.shape[2],
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=query.shape[1] != kv_cache.shape[3],
        seqused_k=lengths,
        block_table=table,
        num_splits=1 if rows.one_split else num_splits() or None,
    )
    assert isinstance(out, Tensor)  # a tuple where log-sums are asked for
    return out.to(query.dtype)


def name() -> str:
    """The words of `attention.describe`."""
    return f"varlen_attn of torch {torch.__version__}"


def rejection(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str:
    """Why torch's attention does not take a cache; empty where it does."""
    if device.type != "cuda":
        return f"varlen_attn needs a GPU, this is {device.type}"
    if not _takes_block_tables():
        return f"varlen_attn needs torch 2.12, this is {torch.__version__}"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"varlen_attn needs compute capability 8.0, this GPU has {major}.{minor}"
    if dtype not in (torch.bfloat16, torch.float16):
        shown = str(dtype).removeprefix("torch.")
        return f"varlen_attn needs KV in bfloat16 or float16, this is {shown}"
    if block_size % PAGE_TOKENS:
        return f"varlen_attn needs KV blocks of multiples of {PAGE_TOKENS} tokens, these have {block_size}"
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        return (
            f"varlen_attn needs heads of at most {MAX_HEAD_DIM} numbers, a multiple of 8, "
            f"these have {head_dim}"
        )
    return ""


@cache
def _takes_block_tables() -> bool:
    return "block_table" in inspect.signature(varlen.varlen_attn).parameters
