"""The rows of a step as kernels read them: where each row's tokens, states and inputs lie.

`ConvRows`, `ScanRows` and `TailRows` are a step's prefill rows, packed one after another, `ReplayRows` its
decode rows, and `AttentionRows` all of them. `StepInputs` makes one of each kind for all layers.
"""

from typing import NamedTuple

from torch import Tensor


class AttentionRows(NamedTuple):
    """The rows of a step, decode rows first, and their places in the paged KV cache.

    A row's queries are the last tokens of the row's sequence. The tokens of decode row r lie at
    r * decode_tokens; padding lies after the row's real tokens. Prefill rows lie one after another, after
    all decode rows and their padding; padding tokens lie after the last prefill row. A padding row has no
    tokens, no KV, and 0 in the block table. Attention of padding tokens is unspecified.

    Attributes:
        block_table: [R, blocks] int32: KV blocks of each row in order, padded with 0.
        kv_lengths: [R] int32: tokens of each row's sequence, the row's real tokens included.
        query_start_loc: [R + 1] int32: the place of each row's first token in `query`; trailing total.
        query_lengths: [R] int32: the real tokens of each row.
        positions: [T] int64: the position of each token in its sequence; 0 for padding tokens.
        num_decodes: the number of decode rows, padding included.
        decode_tokens: the tokens of each decode row, padding included.
        max_query_tokens: at least the tokens of the longest prefill row.
        one_split: whether a backend that cuts a sequence's KV into parts for more thread blocks leaves it
            whole, or cuts it at fixed positions, so that the bits of a row do not depend on the other rows.
    """

    block_table: Tensor
    kv_lengths: Tensor
    query_start_loc: Tensor
    query_lengths: Tensor
    positions: Tensor
    num_decodes: int
    decode_tokens: int
    max_query_tokens: int
    one_split: bool = False

    @property
    def num_rows(self) -> int:
        return self.block_table.shape[0]

    @property
    def num_decode_tokens(self) -> int:
        return self.num_decodes * self.decode_tokens

    @property
    def longest_query(self) -> int:
        """At least the tokens of the longest row, and at least 1."""
        return max(1, self.max_query_tokens, self.decode_tokens if self.num_decodes else 0)


class ConvRows(NamedTuple):
    """Packed rows that a convolution reads.

    Attributes:
        sources, destinations: [rows] slots of the windows before and after each row, -1: zeros, nowhere.
        query_start_loc: [rows + 1] where each row's tokens start; trailing total.
        token_rows: [tokens] the row of each token.
        checkpoint_rows, checkpoint_ends, checkpoint_destinations: [n] the window before token
            `checkpoint_ends` of the stream, which is a token of that row or the row's end, goes to this slot.
    """

    sources: Tensor
    destinations: Tensor
    query_start_loc: Tensor
    token_rows: Tensor
    checkpoint_rows: Tensor
    checkpoint_ends: Tensor
    checkpoint_destinations: Tensor


class ScanRows(NamedTuple):
    """Packed rows in chunks, which a scan reads; a row without tokens passes its state on unchanged.

    Attributes:
        sources, destinations: [rows] slots of the states before and after each row, -1: zeros, nowhere. A
            destination may be the row's own source, no other row's.
        chunk_size: tokens of a whole chunk.
        cu_chunk_seqlens: [chunks + 1] where each chunk's tokens start; trailing total.
        seq_idx: [chunks] the row of each chunk.
        row_chunk_starts: [rows + 1] each row's first chunk; trailing total.
        chunk_destinations: [chunks] slots for the states after chunks, -1: nowhere.
    """

    sources: Tensor
    destinations: Tensor
    chunk_size: int
    cu_chunk_seqlens: Tensor
    seq_idx: Tensor
    row_chunk_starts: Tensor
    chunk_destinations: Tensor


class ReplayRows(NamedTuple):
    """Decode rows of a decode by replay, at most T new tokens each, all of them in one chunk.

    Attributes:
        input_rows: [rows] each row's place in pools [requests, ...]; -1: padding.
        starts: [rows] the position of each row's first new token.
        lengths: [rows] new tokens. Outputs of tokens after them are unspecified.
        sources: [rows] slots of the states at the last grid point. A convolution reads none.
        destinations: [rows] slots for the states after complete chunks, -1 where a row does not complete its
            chunk; of a convolution, for the windows. None where `complete_delta_chunks` follows.
        chunk_size: grid points are its multiples.
        pages: [rows, pages of a chunk] where tokens' inputs lie, in order, in pools [pages, tokens, ...]; the
            last one may have room for more tokens than the chunk. None: `input_rows`, of whole chunks.
    """

    input_rows: Tensor
    starts: Tensor
    lengths: Tensor
    sources: Tensor
    destinations: Tensor | None
    chunk_size: int
    pages: Tensor | None = None


class TailRows(NamedTuple):
    """Packed rows whose tails, the tokens after the last grid point, later decodes by replay read.

    Attributes:
        input_rows, pages: as in `ReplayRows`.
        starts: [rows] the packed token that begins each row's last, incomplete chunk; a tail that begins at
            its row's end has no token.
        query_start_loc: [rows + 1] where each row's tokens start; trailing total.
    """

    input_rows: Tensor
    starts: Tensor
    query_start_loc: Tensor
    pages: Tensor | None = None


def page_table(rows: ReplayRows | TailRows) -> Tensor:
    """[rows, pages of a chunk], dense; without pages `input_rows`, as pages of a whole chunk each."""
    return (rows.input_rows[:, None] if rows.pages is None else rows.pages).contiguous()
