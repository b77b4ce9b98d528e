"""What attention reads of a step's rows."""

from typing import NamedTuple

from torch import Tensor


class AttentionRows(NamedTuple):
    """The rows of a step, decode rows first, and their places in the paged KV cache.

    A row's queries are the last tokens of the row's sequence. The tokens of decode row r lie at
    r * decode_tokens; padding lies behind the row's real tokens. Prefill rows lie one after another, behind
    all decode rows and their padding; padding tokens lie behind the last prefill row. A padding row has no
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
