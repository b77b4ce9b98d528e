"""The paged KV cache and attention in plain torch.

A KV cache is that of one layer: [2 (K, V), blocks, block size, KV heads, head dim].
"""

import torch
from torch import Tensor

from ....validation import ceil_div
from ..dtypes_and_strides import compute_dtype, score_scale
from ..step_rows import AttentionRows


def write_kv(kv_cache: Tensor, keys: Tensor, values: Tensor, tokens: Tensor, positions: Tensor) -> None:
    """Store `keys[tokens[i]]` and `values[tokens[i]]` at `positions[i]`, block * block size + offset.

    A block whose first row is stored is new: its rows that the call does not store become zeros. All rows of
    a block that holds any token are therefore finite, whatever the memory held before. A position of -1
    writes nothing; entries of one block stand side by side, in the order of their offsets and without gaps.
    """
    if (positions < 0).any():
        tokens, positions = tokens[positions >= 0], positions[positions >= 0]
    last_row = kv_cache.shape[2] - 1  # of a block; new blocks that the call does not fill become zeros
    begins = (positions % kv_cache.shape[2] == 0).nonzero().flatten()
    if len(begins):
        ends = positions[(begins + last_row).clamp(max=len(positions) - 1)]
        begins = positions[begins][ends != positions[begins] + last_row]
        kv_cache[:, begins // kv_cache.shape[2]] = 0.0
    blocks, offsets = positions // kv_cache.shape[2], positions % kv_cache.shape[2]
    for cache, new in zip(kv_cache, (keys, values), strict=True):
        cache[blocks, offsets] = new[tokens].to(cache.dtype)


def paged_attention(
    query: Tensor, kv_cache: Tensor, rows: AttentionRows, *, scale: float | None = None
) -> Tensor:
    """Attention of each row's tokens to its sequence, up to each token; `scale` None is head dim ** -0.5."""
    dtype, scale = compute_dtype(query.dtype), score_scale(scale, query.shape[-1])
    block_size, kv_heads = kv_cache.shape[2:4]
    out = torch.zeros_like(query)
    lengths = rows.query_start_loc[:-1].tolist(), rows.query_lengths.tolist(), rows.kv_lengths.tolist()
    for row, (first, new, length) in enumerate(zip(*lengths, strict=True)):
        if new:
            part = slice(first, first + new)
            grouped = torch.unflatten(query[part].to(dtype), 1, (kv_heads, -1)) * scale
            blocks = rows.block_table[row, : ceil_div(length, block_size)]
            keys, values = kv_cache[:, blocks].flatten(1, 2)[:, :length].to(dtype).movedim(1, 2)[:, :, None]
            scores = grouped.permute(1, 2, 0, 3) @ keys.mT
            if new > 1:
                future = torch.ones(new, length, dtype=torch.bool, device=query.device)
                scores = scores.masked_fill_(future.triu_(length - new + 1), float("-inf"))
            attended = scores.softmax(-1) @ values
            out[part] = attended.permute(2, 0, 1, 3).flatten(1, 2).to(query.dtype)
    return out
