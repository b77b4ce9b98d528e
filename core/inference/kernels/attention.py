"""Attention over the paged KV cache on a GPU; the reference is `torch_attention`.

FlashAttention-3 (arXiv 2407.08608), of the package tokenspeed-fa3, where it accepts the cache, else torch
operations on segments of the cache with a running softmax (arXiv 1805.02867), whose memory is bounded.
"""

import importlib
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .dtypes_and_strides import compute_dtype, score_scale
from .step_rows import AttentionRows

if TYPE_CHECKING:
    from .attention_segments import SegmentRows

MODULE = "flash_attn_interface"
MAX_HEAD_DIM = 256
"""The package has kernels for heads of 64, 128 and 256 numbers; the next larger one computes others."""
_NARROW = (torch.bfloat16, torch.float16)


def flash_attention(query: Tensor, kv_cache: Tensor, rows: AttentionRows, scale: float | None) -> Tensor:
    """All rows in one call; `attention_segments` cuts longer rows than a segment if `batch_invariant`."""
    if rows.batch_invariant:
        from . import attention_segments

        if attention_segments.num_segments(rows, kv_cache.shape[2]) > 1:
            return attention_segments.segmented_attention(query, kv_cache, rows, scale, _attend_pairs)
    splits = 1 if rows.batch_invariant else 0  # 0: FlashAttention-3 chooses by the rows of the step
    attended = _attend_pairs(query.to(kv_cache.dtype), kv_cache, rows, scale, is_causal=True, splits=splits)
    return attended[0].to(query.dtype)


def _attend_pairs(
    query: Tensor, kv_cache: Tensor, pairs: "SegmentRows | AttentionRows", scale: float | None, *,
    is_causal: bool, out: Tensor | None = None, splits: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of pairs of a row and a segment, or of all rows of a step in `splits` parts.

    Where `is_causal`, the last query of a pair sees all its KV, and each one before sees one token less than
    the next; else all see all. Returns the result and the logarithms of the sums of exp(score), float32
    [heads, T]; places that no pair has hold anything.
    """
    attended: Tensor
    log_sums: Tensor
    attended, log_sums, *_ = torch.ops.flash_attn_3.fwd.default(
        query,
        kv_cache[0],
        kv_cache[1],
        out=out,
        cu_seqlens_q=pairs.query_start_loc,
        seqused_q=pairs.query_lengths,
        seqused_k=pairs.kv_lengths,
        max_seqlen_q=pairs.longest_query,
        page_table=pairs.block_table,
        softmax_scale=scale,
        is_causal=is_causal,
        num_splits=splits,
    )
    return attended, log_sums


@cache
def flash_rejection(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Why FlashAttention-3 does not take a cache; empty where it does. It takes every block size."""
    if device.type != "cuda":
        return f"FlashAttention-3 needs a GPU, this is {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        return f"FlashAttention-3 needs compute capability 9.0, this GPU has {major}.{minor}"
    if dtype not in _NARROW:
        name = str(dtype).removeprefix("torch.")
        return f"FlashAttention-3 needs KV in bfloat16 or float16, this is {name}"
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        sizes = f"at most {MAX_HEAD_DIM} numbers, a multiple of 8"
        return f"FlashAttention-3 needs heads of {sizes}, these have {head_dim}"
    try:
        importlib.import_module(MODULE)  # registers its operators
        torch.ops.flash_attn_3.fwd.default  # noqa: B018
    except Exception as error:
        return f"FlashAttention-3 cannot be imported ({error!r}): pip install 'mambaslots[gpu]'"
    return ""


_TILE_TOKENS = 128
_SEGMENT_TOKENS = 1024
_SCRATCH_BYTES = 1 << 29


def torch_attention(query: Tensor, kv_cache: Tensor, rows: AttentionRows, scale: float | None) -> Tensor:
    """Attention in torch, of zeros for padding rows and prefills' padding; a decode row's KV is read once."""
    decodes, decoded = rows.num_decodes, rows.num_decode_tokens
    outputs = []
    if decodes:
        lengths = rows.kv_lengths[:decodes]
        positions = rows.positions[:decoded].view(decodes, rows.decode_tokens)
        positions = torch.minimum(positions, lengths[:, None] - 1)
        tiles = torch.unflatten(query[:decoded], 0, positions.shape)
        table = rows.block_table[:decodes]
        outputs.append(_attend(tiles, positions, kv_cache, table, lengths, scale).flatten(0, 1))
    if decodes < rows.num_rows:
        outputs.append(_attend_prefills(query[decoded:], kv_cache, rows, scale))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_prefills(query: Tensor, kv_cache: Tensor, rows: AttentionRows, scale: float | None) -> Tensor:
    """Attention of the prefill rows, in tiles that each read the whole width of the block table."""
    block_table, kv_lengths = rows.block_table[rows.num_decodes :], rows.kv_lengths[rows.num_decodes :]
    query_start_loc = rows.query_start_loc[rows.num_decodes :] - rows.num_decode_tokens
    tokens, num_rows = query.shape[0], block_table.shape[0]
    size = max(1, min(_TILE_TOKENS, rows.max_query_tokens))
    new = query_start_loc.diff()
    tile_ends = ((new + size - 1) // size).cumsum(0)
    tiles = torch.arange(tokens // size + num_rows, device=query.device)
    row = torch.searchsorted(tile_ends, tiles, right=True)  # `num_rows` for tiles beyond the last
    is_padding = row >= num_rows
    row = row.clamp(max=num_rows - 1)
    first = (tiles - torch.where(row > 0, tile_ends[row - 1], 0)) * size
    places = first[:, None] + torch.arange(size, device=query.device)
    inside = (places < new[row, None]) & ~is_padding[:, None]
    positions = torch.where(inside, places + (kv_lengths - new)[row, None], -1)
    packed = torch.where(inside, places + query_start_loc[row, None], tokens)

    padded = torch.cat([query, query.new_zeros(1, *query.shape[1:])])
    attended = _attend(padded[packed], positions, kv_cache, block_table[row], kv_lengths[row], scale)
    out = attended.new_zeros(tokens + 1, *query.shape[1:])
    return out.index_copy_(0, packed.flatten(), attended.flatten(0, 1))[:tokens]


def _attend(
    query: Tensor, positions: Tensor, kv_cache: Tensor, block_table: Tensor, kv_lengths: Tensor,
    scale: float | None,
) -> Tensor:  # fmt: skip
    """Attention of tiles of queries [tiles, T, heads, head dim]; a query at position -1 sees nothing."""
    tokens, heads, head_dim = query.shape[1:]
    block_size, kv_heads = kv_cache.shape[2:4]
    segment = max(1, min(block_table.shape[1], _SEGMENT_TOKENS // block_size))
    numbers = segment * block_size * 2 * (tokens * heads + kv_heads * head_dim)
    together = max(1, _SCRATCH_BYTES // (numbers * compute_dtype(query.dtype).itemsize))
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    scale = score_scale(scale, head_dim)
    for first in range(0, query.shape[0], together):
        part = slice(first, first + together)
        tiles = query[part], positions[part], block_table[part], kv_lengths[part]
        out[part] = _attend_group(*tiles, kv_cache, segment, scale)
    return out


def _attend_group(
    query: Tensor, positions: Tensor, block_table: Tensor, kv_lengths: Tensor, kv_cache: Tensor,
    segment: int, scale: float,
) -> Tensor:  # fmt: skip
    """`_attend`, in the compute dtype."""
    dtype = compute_dtype(query.dtype)
    # 16-bit products are summed in float32, on tensor cores; torch offers such products on a GPU alone.
    narrow = query.is_cuda and query.dtype == kv_cache.dtype and query.dtype in _NARROW
    product_dtype = query.dtype if narrow else dtype
    tokens = query.shape[1]
    block_size, kv_heads = kv_cache.shape[2:4]
    grouped = torch.unflatten(query.to(dtype), 2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    if not narrow:  # else the scores are scaled, which rounds less
        grouped = grouped * scale  # [tiles, kv heads, heads of one x T, head dim]
    grouped = grouped.to(product_dtype)
    best = grouped.new_full((*grouped.shape[:3], 1), float("-inf"), dtype=dtype)
    total, out = torch.zeros_like(best), torch.zeros_like(grouped, dtype=dtype)
    for first in range(0, block_table.shape[1], segment):
        blocks = block_table[:, first : first + segment]
        at = first * block_size + torch.arange(blocks.shape[1] * block_size, device=query.device)
        keys, values = (cache[blocks].flatten(1, 2).to(product_dtype).movedim(1, 2) for cache in kv_cache)
        # Memory beyond a row's length may hold NaN, and 0 * NaN is NaN.
        values = values.masked_fill((at >= kv_lengths[:, None])[:, None, :, None], 0.0)
        hidden = at > positions[:, :, None]
        scores = _product(grouped, keys.mT, dtype)
        if narrow:
            scores *= scale
        scores = torch.unflatten(scores, 2, (-1, tokens))
        scores = scores.masked_fill_(hidden[:, None, None], float("-inf")).flatten(2, 3)
        highest = torch.maximum(best, scores.amax(-1, keepdim=True))
        shift = highest.masked_fill(highest == float("-inf"), 0.0)
        weights = scores.sub_(shift).exp_()
        decay = (best - shift).exp()
        total = total * decay + weights.sum(-1, keepdim=True)
        out = out * decay + _product(weights.to(product_dtype), values, dtype)
        best = highest
    out = out / total.masked_fill(total == 0, 1.0)
    return torch.unflatten(out, 2, (-1, tokens)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left @ right of batches in two dimensions, summed and returned in `dtype`."""
    if left.dtype == dtype:
        return left @ right
    flat = torch.bmm(left.flatten(0, 1), right.flatten(0, 1), out_dtype=dtype)
    return torch.unflatten(flat, 0, left.shape[:2])


def paged_attention(
    query: Tensor, kv_cache: Tensor, rows: AttentionRows, *, scale: float | None = None
) -> Tensor:
    """As `torch_attention.paged_attention`; FlashAttention-3 rounds queries to the dtype of the cache.

    It multiplies rows of a block that were never written by 0: they must be finite, as `write_kv` makes them.
    """
    rejected = flash_rejection(query.device, kv_cache.dtype, kv_cache.shape[4])
    return (torch_attention if rejected else flash_attention)(query, kv_cache, rows, scale)


def describe(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """What computes attention over a KV cache of this dtype, and why FlashAttention-3 does not."""
    if rejected := flash_rejection(device, dtype, head_dim):
        return f"attention: torch operations in {str(dtype).removeprefix('torch.')}; {rejected}"
    return "attention: FlashAttention-3"
