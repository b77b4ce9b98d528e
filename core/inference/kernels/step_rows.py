"""The rows of a step as kernels read them: where tokens, states and inputs lie; how tokens are drawn.

`ConvRows`, `ScanRows` and `TailRows` are a step's prefill rows, packed one after another, `ReplayRows` its
decode rows, and `AttentionRows` all of them. `StepInputs` makes one of each kind for all layers.
"""

import math
from typing import NamedTuple

from torch import Tensor

WHOLE = 1 << 53  # how many parts make up probability 1
FEW_ROWS = 8  # a step with at most so many tokens multiplies by `few_rows` where bits are promised


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
        batch_invariant: whether the other rows change no bits of a row: a backend leaves the KV of a sequence
            whole or cuts it at fixed positions, however few thread blocks then have work.
    """

    block_table: Tensor
    kv_lengths: Tensor
    query_start_loc: Tensor
    query_lengths: Tensor
    positions: Tensor
    num_decodes: int
    decode_tokens: int
    max_query_tokens: int
    batch_invariant: bool = False

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
    """Packed rows of a convolution. -1 as a source: zeros; as a destination: nowhere."""

    sources: Tensor  # [rows] slot of the window before each row
    destinations: Tensor  # [rows] slot for the window after it
    query_start_loc: Tensor  # [rows + 1] where each row's tokens start; trailing total
    token_rows: Tensor  # [tokens] the row of each token
    checkpoint_rows: Tensor  # [n] the row of a window that is stored inside a row or at its end
    checkpoint_ends: Tensor  # [n] the packed token after this window
    checkpoint_destinations: Tensor  # [n] slot for it


class ScanRows(NamedTuple):
    """Packed rows of a scan, in chunks. A row without tokens has no chunk, and its state does not change.

    -1 as a source: zeros; as a destination: nowhere. A destination may be the row's own source, no other's.
    """

    sources: Tensor  # [rows] slot of the state before each row
    destinations: Tensor  # [rows] slot for the state after it
    chunk_size: int  # tokens of a whole chunk
    cu_chunk_seqlens: Tensor  # [chunks + 1] where each chunk starts; trailing total
    seq_idx: Tensor  # [chunks] the row of each chunk
    row_chunk_starts: Tensor  # [rows + 1] each row's first chunk; trailing total
    chunk_destinations: Tensor  # [chunks] slot for the state after each chunk


class ReplayRows(NamedTuple):
    """Decode rows of a decode by replay, each with at most T new tokens, all in one chunk.

    Outputs of tokens after `lengths` are unspecified. A convolution reads no source, and stores the window
    after a row in its destination. No destinations: `complete_delta_chunks` follows. No input blocks:
    `input_rows` name whole chunks. The last block may have room for more tokens than the chunk.
    """

    input_rows: Tensor  # [rows] each row's place in pools [requests, ...]; -1: padding
    starts: Tensor  # [rows] position of the first new token
    lengths: Tensor  # [rows] new tokens
    sources: Tensor  # [rows] slot of the state at the last grid point; -1: zeros
    destinations: Tensor | None  # [rows] slot for the state at the next one; -1: not reached
    chunk_size: int  # grid points are its multiples
    input_blocks: Tensor | None = None  # [rows, blocks of a chunk] in order, of pools [blocks, tokens, ...]


class TailRows(NamedTuple):
    """Packed rows whose tails, the tokens after the last grid point, are kept for decodes by replay."""

    input_rows: Tensor  # as in `ReplayRows`
    starts: Tensor  # [rows] the packed token that begins the tail; the row's end where there is none
    query_start_loc: Tensor  # [rows + 1] where each row's tokens start; trailing total
    input_blocks: Tensor | None = None  # as in `ReplayRows`


class TokenDraw(NamedTuple):
    """The draw of one token. Of equally likely tokens those with the lowest ids are kept."""

    row: int  # of the logits
    temperature: float  # divides the logits, > 0; clamped to the normal numbers of the scores' dtype
    top_k: int  # keep the k most likely tokens; 0 keeps all
    top_p: float  # keep the smallest set of most likely tokens that reaches this probability, in (0, 1]
    uniform: float  # a random number in [0, 1)
    min_p: float = 0.0  # keep tokens at least so many times as likely as the most likely one

    @property
    def least_score(self) -> float:
        """What a token's logit is below the largest one at most, after the temperature."""
        return math.log(self.min_p) if self.min_p else -math.inf

    @property
    def needed_parts(self) -> int:
        """`top_p` in parts."""
        return math.ceil(self.top_p * WHOLE)


def input_table(rows: ReplayRows | TailRows) -> Tensor:
    """[rows, input blocks of a chunk], dense. None: `input_rows`, each of which holds a whole chunk."""
    return (rows.input_rows[:, None] if rows.input_blocks is None else rows.input_blocks).contiguous()
