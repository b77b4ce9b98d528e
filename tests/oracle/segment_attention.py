"""What stands in for FlashAttention-3 without splits, where segments of sequences are attended to."""

import math
from typing import Any

import torch
from torch import Tensor


class PlainAttention:
    """`attention_segments.Attend` in torch, query by query; checks what FlashAttention-3 demands.

    Places that no pair has are NaN. Computes in float64. A query's bits do not depend on others.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[int, bool]] = []
        """The pairs of each call that have queries, and whether it was causal."""

    def __call__(
        self,
        query: Tensor,
        kv_cache: Tensor,
        pairs: Any,
        scale: float | None,
        *,
        is_causal: bool,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        table, lengths, starts, counts, longest = pairs
        for index in (table, lengths, starts, counts):
            assert index.dtype == torch.int32
            assert index.is_contiguous()
        assert starts.shape == (len(table) + 1,)
        assert lengths.shape == counts.shape == (len(table),)
        assert (counts >= 0).all()
        assert (counts <= starts.diff()).all()
        assert (counts <= longest).all()
        assert starts[-1] == len(query)
        assert (lengths <= table.shape[1] * kv_cache.shape[2]).all()
        assert query.dtype == kv_cache.dtype
        assert query.stride(-1) == kv_cache.stride(-1) == 1
        if out is None:
            out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        assert out.is_contiguous()
        assert out.shape == query.shape
        out.fill_(math.nan)
        log_sums = torch.full(
            (query.shape[1], len(query)), math.nan, dtype=torch.float32, device=query.device
        )
        block_size, kv_heads = kv_cache.shape[2:4]
        for row, (first, count, length) in enumerate(
            zip(starts.tolist(), counts.tolist(), lengths.tolist(), strict=False)
        ):
            if not count:
                continue
            assert length >= (count if is_causal else 1)
            blocks = table[row, : -(-length // block_size)]
            keys, values = (x[blocks].flatten(0, 1)[:length].double().transpose(0, 1) for x in kv_cache)
            for place in range(first, first + count):
                seen = length - (first + count - 1 - place) if is_causal else length
                grouped = query[place].double().unflatten(0, (kv_heads, -1))
                scores = grouped @ keys[:, :seen].mT * (query.shape[2] ** -0.5 if scale is None else scale)
                out[place] = (scores.softmax(-1) @ values[:, :seen]).flatten(0, 1).to(query.dtype)
                log_sums[:, place] = scores.logsumexp(-1).flatten()
        self.calls.append((int((counts > 0).sum()), is_causal))
        return out, log_sums
