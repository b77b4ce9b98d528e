"""Attention over the paged KV cache in torch operations whose shapes depend on no value.

It runs on any device, and a CUDA graph can capture it. Queries are cut into tiles, and the cache into
segments with a running softmax (Milakov & Gimelshein 2018, arXiv 1805.02867), so that scratch memory stays
bounded however long the sequences are. Sums and softmax are in float32 or wider; products of 16-bit
queries with a cache of their dtype are in that dtype on a GPU. The reference is `reference.paged_attention`.
"""

import torch
from torch import Tensor

from .attention_rows import AttentionRows
from .reference_attention import score_scale
from .reference_chunks import compute_dtype

_TILE_TOKENS = 128
_SEGMENT_TOKENS = 1024
_SCRATCH_BYTES = 1 << 29
_NARROW = (torch.bfloat16, torch.float16)


def name(dtype: torch.dtype) -> str:
    """The words of `attention.describe`."""
    return f"torch operations in {str(dtype).removeprefix('torch.')}"


def paged_attention(query: Tensor, kv_cache: Tensor, rows: AttentionRows, scale: float | None) -> Tensor:
    """`attention.paged_attention`. Padding rows, and padding tokens of prefills, give zeros.

    Decode rows of several tokens read their KV once.
    """
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
    """Attention of the tokens behind the decode rows.

    Every row is cut into tiles of tokens, at most tokens // tile + rows tiles in all. Each tile reads the
    whole width of the block table.
    """
    block_table, kv_lengths = rows.block_table[rows.num_decodes :], rows.kv_lengths[rows.num_decodes :]
    query_start_loc = rows.query_start_loc[rows.num_decodes :] - rows.num_decode_tokens
    tokens, num_rows = query.shape[0], block_table.shape[0]
    size = max(1, min(_TILE_TOKENS, rows.max_query_tokens))
    new = query_start_loc.diff()
    tile_ends = ((new + size - 1) // size).cumsum(0)
    tiles = torch.arange(tokens // size + num_rows, device=query.device)
    row = torch.searchsorted(tile_ends, tiles, right=True)  # `num_rows` for tiles beyond the last
    behind = row >= num_rows
    row = row.clamp(max=num_rows - 1)
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

    Returns: the shape and dtype of `query`.
    """
    tokens, heads, head_dim = query.shape[1:]
    block_size, kv_heads = kv_cache.shape[2:4]
    segment = max(1, min(block_table.shape[1], _SEGMENT_TOKENS // block_size))
    numbers = segment * block_size * 2 * (tokens * heads + kv_heads * head_dim)
    together = max(1, _SCRATCH_BYTES // (numbers * compute_dtype(query.dtype).itemsize))
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
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
