"""Attention over the paged KV cache in torch operations whose shapes depend on no value.

It runs on any device, and a CUDA graph can capture it. Queries are cut into tiles, and the cache into
segments with a running softmax (Milakov & Gimelshein 2018, arXiv 1805.02867), so that scratch memory stays
bounded however long the sequences are. The references are the functions of the same names in `reference`.
"""

import torch
from torch import Tensor

from .reference import compute_dtype, score_scale

_TILE_TOKENS = 128
_SEGMENT_TOKENS = 1024
_SCRATCH_BYTES = 1 << 29


def paged_attention_decode(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    kv_lengths: Tensor,
    *,
    scale: float | None = None,
) -> Tensor:
    """`reference.paged_attention_decode`; rows of length 0 give zeros. Does not synchronise."""
    return _attend(query[:, None], kv_lengths[:, None] - 1, kv_cache, block_table, kv_lengths, scale)[:, 0]


def paged_attention_verify(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    kv_lengths: Tensor,
    positions: Tensor,
    *,
    scale: float | None = None,
) -> Tensor:
    """`reference.paged_attention_verify`; reads each row's KV once. Does not synchronise."""
    return _attend(query, positions, kv_cache, block_table, kv_lengths, scale)


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
    """`reference.paged_attention_prefill`; padding tokens give zeros. Does not synchronise.

    Every row is cut into tiles of tokens, at most tokens // tile + rows tiles in all. Each tile reads the
    whole width of the block table.
    """
    tokens, rows = query.shape[0], block_table.shape[0]
    size = max(1, min(_TILE_TOKENS, max_query_tokens))
    new = query_start_loc.diff()
    tile_ends = ((new + size - 1) // size).cumsum(0)
    tiles = torch.arange(tokens // size + rows, device=query.device)
    row = torch.searchsorted(tile_ends, tiles, right=True)  # `rows` for tiles beyond the last
    behind = row >= rows
    row = row.clamp(max=rows - 1)
    first = (tiles - torch.where(row > 0, tile_ends[row - 1], 0)) * size
    places = first[:, None] + torch.arange(size, device=query.device)
    inside = (places < new[row, None]) & ~behind[:, None]
    positions = torch.where(inside, places + (kv_lengths - new)[row, None], -1)
    packed = torch.where(inside, places + query_start_loc[row, None], tokens)

    padded = torch.cat([query, query.new_zeros(1, *query.shape[1:])])
    attended = _attend(padded[packed], positions, kv_cache, block_table[row], kv_lengths[row], scale)
    out = attended.new_zeros(tokens + 1, *query.shape[1:])
    return out.index_copy_(0, packed.flatten(), attended.flatten(0, 1))[:tokens]


def _attend(
    query: Tensor,
    positions: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    kv_lengths: Tensor,
    scale: float | None,
) -> Tensor:
    """Attention of tiles of queries.

    Args:
        query: [tiles, T, heads, head dim]. positions: [tiles, T]; a query at -1 sees nothing.
        block_table, kv_lengths: [tiles, blocks], [tiles], of each tile's row.

    Returns: the shape of `query`, in the compute dtype.
    """
    tokens, heads, head_dim = query.shape[1:]
    block_size, kv_heads = kv_cache.shape[2:4]
    segment = max(1, min(block_table.shape[1], _SEGMENT_TOKENS // block_size))
    numbers = segment * block_size * 2 * (tokens * heads + kv_heads * head_dim)
    together = max(1, _SCRATCH_BYTES // (numbers * compute_dtype(query.dtype).itemsize))
    out = torch.empty(query.shape, dtype=compute_dtype(query.dtype), device=query.device)
    scale = score_scale(scale, head_dim)
    for first in range(0, query.shape[0], together):
        part = slice(first, first + together)
        out[part] = _attend_group(
            query[part], positions[part], block_table[part], kv_lengths[part], kv_cache, segment, scale
        )
    return out


def _attend_group(
    query: Tensor,
    positions: Tensor,
    block_table: Tensor,
    kv_lengths: Tensor,
    kv_cache: Tensor,
    segment: int,
    scale: float,
) -> Tensor:
    dtype = compute_dtype(query.dtype)
    tokens = query.shape[1]
    block_size, kv_heads = kv_cache.shape[2:4]
    grouped = torch.unflatten(query.to(dtype), 2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    grouped = grouped * scale  # [tiles, kv heads, heads of one x T, head dim]
    best = grouped.new_full((*grouped.shape[:3], 1), float("-inf"))
    total, out = torch.zeros_like(best), torch.zeros_like(grouped)
    for first in range(0, block_table.shape[1], segment):
        blocks = block_table[:, first : first + segment]
        at = first * block_size + torch.arange(blocks.shape[1] * block_size, device=query.device)
        keys, values = (cache[blocks].flatten(1, 2).to(dtype).movedim(1, 2) for cache in kv_cache)
        # Memory beyond a row's length may hold NaN, and 0 * NaN is NaN.
        values = values.masked_fill((at >= kv_lengths[:, None])[:, None, :, None], 0.0)
        hidden = at > positions[:, :, None]
        scores = torch.unflatten(grouped @ keys.mT, 2, (-1, tokens))
        scores = scores.masked_fill_(hidden[:, None, None], float("-inf")).flatten(2, 3)
        highest = torch.maximum(best, scores.amax(-1, keepdim=True))
        shift = highest.masked_fill(highest == float("-inf"), 0.0)
        weights = scores.sub_(shift).exp_()
        decay = (best - shift).exp()
        total = total * decay + weights.sum(-1, keepdim=True)
        out = out * decay + weights @ values
        best = highest
    out = out / total.masked_fill(total == 0, 1.0)
    return torch.unflatten(out, 2, (-1, tokens)).permute(0, 3, 1, 2, 4).flatten(2, 3)
