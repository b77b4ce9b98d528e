"""Attention whose split points are fixed positions of the sequence.

A backend that cuts a sequence's KV by the free multiprocessors changes the bits of a row with the rows beside
it. A backend that does not cut leaves most multiprocessors idle when few requests have long contexts. Here a
sequence is cut at multiples of `SEGMENT_TOKENS`, wherever the row's queries lie and however many rows a step
has. A query at position p reads p // SEGMENT_TOKENS whole segments, and its own segment up to p. The results
of segments are combined in their order, so that their number and their bits depend on the sequence up to p
alone.

The backend computes the results of many pairs of a row and a segment in one call. It rounds these results to
the dtype of the cache, which adds at most one rounding error to that of the final result.
"""

from typing import Protocol

import torch
from torch import Tensor

from .attention_rows import AttentionRows
from .combine_segments import combine_segments
from .segment_rows import Readers, SegmentRows, segment_rows

SEGMENT_TOKENS = 2048
"""A multiple of every KV block size that is a power of two up to it.

Decodes at 4,096 and 32,767 tokens with 8 KV heads on an H100: 36 and 61 us with it, 62 and 64 us with
4096, 60 and 111 us with 8192, 59 and 406 us with one split, 16 and 59 us with the splits that
FlashAttention-3 chooses. A prefill of 4,096 tokens takes 293 us instead of 217, one behind 28,672 tokens
4.0 ms instead of 3.0.
"""
_SCRATCH_BYTES = 1 << 29
"""Of the results of segments in prefills; where more are needed, KV heads are computed in groups."""


class Attend(Protocol):
    """A backend's call that leaves the KV of each pair whole."""

    def __call__(
        self,
        query: Tensor,
        kv_cache: Tensor,
        pairs: SegmentRows,
        scale: float | None,
        *,
        is_causal: bool,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention of the pairs.

        Args:
            query: [T, heads, head dim] of the dtype of the cache. Heads may be a slice of more.
            kv_cache: [2, blocks, block size, KV heads, head dim]. Heads may be a slice of more.
            is_causal: whether the last query of a pair sees all its KV, and each one before sees one token
                less than the next; else all queries see all KV.
            out: where the result goes, contiguous; None allocates it.

        Returns: the result in the shape of `query`, and the logarithms of the sums of exp(score), float32
            [heads, T]. Places that no pair has hold anything.
        """


def num_segments(rows: AttentionRows, block_size: int) -> int:
    """How many segments the longest sequence may have, by the width of the block table.

    It is 1 where the block size does not divide `SEGMENT_TOKENS`: no sequence is cut.
    """
    if SEGMENT_TOKENS % block_size:
        return 1
    return max(1, -(-rows.block_table.shape[1] * block_size // SEGMENT_TOKENS))


def paged_attention(
    query: Tensor, kv_cache: Tensor, rows: AttentionRows, scale: float | None, attend: Attend
) -> Tensor:
    """`attention.paged_attention`, combined from the results of segments, of which there are at least two.

    The number of calls of `attend` depends on shapes alone. Does not synchronise, if `attend` does not.

    Args:
        query, kv_cache, rows, scale: as for `attention.paged_attention`.
        attend: computes the results of segments.
    """
    step = _Step(kv_cache, rows, scale, attend)
    dtype, decoded = query.dtype, rows.num_decode_tokens
    query = query.to(kv_cache.dtype)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if rows.num_decodes:
        attend_decodes = step.single_tokens if rows.decode_tokens == 1 else step.drafts
        attend_decodes(query[:decoded], out[:decoded])
    if rows.num_decodes < rows.num_rows:
        step.prefills(query[decoded:], out[decoded:])
    return out.to(dtype)


class _Step:
    """The rows of a step. Each method attends queries of some rows and writes `out`."""

    def __init__(self, kv_cache: Tensor, rows: AttentionRows, scale: float | None, attend: Attend) -> None:
        self._kv_cache, self._rows, self._scale, self._attend = kv_cache, rows, scale, attend
        self._num_segments = num_segments(rows, kv_cache.shape[2])

    def single_tokens(self, query: Tensor, out: Tensor) -> None:
        """Decode rows of one token: one call for all segments, because few rows leave most of a GPU idle.

        A query alone sees all KV of its pair even in a causal call.
        """
        rows = self._rows
        found, log_sums = self._attend_copies(query, Readers.WITHIN_AND_BEHIND, self._num_segments)
        combine_segments(found, log_sums, found, log_sums, rows.positions[: len(query)], SEGMENT_TOKENS, out)

    def drafts(self, query: Tensor, out: Tensor) -> None:
        """Decode rows of several tokens: two calls, in which the tokens of a row read each segment once."""
        rows = self._rows
        own, own_log_sums = self._attend_own(query, 0, rows.num_decodes, rows.decode_tokens)
        earlier, log_sums = self._attend_copies(query, Readers.BEHIND, self._num_segments - 1)
        combine_segments(
            earlier, log_sums, own, own_log_sums, rows.positions[: len(query)], SEGMENT_TOKENS, out
        )

    def prefills(self, query: Tensor, out: Tensor) -> None:
        """One call for the segments in which queries lie, and one for each segment behind which some lie."""
        rows, parts = self._rows, self._num_segments - 1
        num_rows, longest = rows.num_rows - rows.num_decodes, max(1, rows.max_query_tokens)
        own, own_log_sums = self._attend_own(query, rows.num_decodes, num_rows, longest)
        pairs = self._pairs(query, rows.num_decodes, num_rows, Readers.BEHIND, parts, longest)
        by_segment = [
            SegmentRows(table, lengths, starts, counts, longest)
            for table, lengths, starts, counts in zip(*(tensor.unbind() for tensor in pairs[:4]), strict=True)
        ]
        kv_heads = self._kv_cache.shape[3]
        sharing = query.shape[1] // kv_heads
        head_bytes = parts * query[:, :sharing].numel() * query.element_size()
        together = max(1, _SCRATCH_BYTES // max(1, head_bytes))
        for first in range(0, kv_heads, together):
            cache = self._kv_cache[:, :, :, first : first + together]
            heads = slice(first * sharing, (first + cache.shape[3]) * sharing)
            some = query[:, heads]
            earlier = torch.empty(parts, *some.shape, dtype=query.dtype, device=query.device)
            log_sums = [
                self._attend(some, cache, pair, self._scale, is_causal=False, out=part)[1]
                for pair, part in zip(by_segment, earlier, strict=True)
            ]
            combine_segments(
                earlier, torch.stack(log_sums), own[:, :, heads], own_log_sums[:, heads],
                rows.positions[rows.num_decode_tokens :], SEGMENT_TOKENS, out[:, heads],
            )  # fmt: skip

    def _attend_own(
        self, query: Tensor, first_row: int, num_rows: int, longest: int
    ) -> tuple[Tensor, Tensor]:
        """What queries find in their own segments, with a first dimension of stride 0 for the segment."""
        touched = 1 + -(-(longest - 1) // SEGMENT_TOKENS)  # at most, by the longest row
        touched, longest = min(self._num_segments, touched), min(longest, SEGMENT_TOKENS)
        pairs = self._pairs(query, first_row, num_rows, Readers.WITHIN, touched, longest)
        found, log_sums = self._attend(query, self._kv_cache, pairs, self._scale, is_causal=True)
        count = self._num_segments
        return found.expand(count, *found.shape), log_sums.expand(count, *log_sums.shape)

    def _attend_copies(self, query: Tensor, readers: Readers, parts: int) -> tuple[Tensor, Tensor]:
        """What the queries of decode rows find in each of the first `parts` segments, by one call."""
        rows = self._rows
        pairs = self._pairs(query, 0, rows.num_decodes, readers, parts, rows.decode_tokens, copies=True)
        copies = query.expand(parts, *query.shape).flatten(0, 1)
        is_causal = readers == Readers.WITHIN_AND_BEHIND
        found, log_sums = self._attend(copies, self._kv_cache, pairs, self._scale, is_causal=is_causal)
        by_part = found.view(parts, *query.shape)
        return by_part, log_sums.view(-1, parts, len(query)).transpose(0, 1)

    def _pairs(
        self,
        query: Tensor,
        first_row: int,
        num_rows: int,
        readers: Readers,
        parts: int,
        longest: int,
        copies: bool = False,
    ) -> SegmentRows:
        return segment_rows(
            self._rows, first_row, num_rows, readers, parts, SEGMENT_TOKENS, self._kv_cache.shape[2],
            len(query), longest_query=longest, copies=copies,
        )  # fmt: skip
