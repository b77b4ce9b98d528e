"""What a model reads in one step."""

from dataclasses import dataclass

from torch import Tensor

from .state_pool import StatePool


@dataclass(frozen=True)
class PrefillChunks:
    """SSD chunk metadata of the prefill rows, on the absolute grid of `mamba_metadata`.

    Tokens are counted in the packed prefill stream (token 0 is the first prefill token of the step),
    rows from the first prefill row.
    """

    cu_chunk_seqlens: Tensor  # [chunks + 1] int32: where each chunk starts; trailing total
    seq_idx: Tensor  # [chunks] int32: the prefill row of each chunk
    last_chunk_indices: Tensor  # [prefills] int32: each row's last chunk
    token_rows: Tensor  # [tokens] int64: the prefill row of each token


@dataclass(frozen=True)
class Checkpoints:
    """States to store at boundaries strictly inside this step's prefill chunks, one entry a state.

    (A boundary on which a row's step ends needs no entry: that row's `state_destinations` is the slot.)
    """

    rows: Tensor  # [n] int64: prefill row
    chunks: Tensor  # [n] int64: the SSD chunk that ends on the boundary
    token_ends: Tensor  # [n] int64: packed prefill token position of the boundary (exclusive end)
    destinations: Tensor  # [n] int64: pool index


@dataclass(frozen=True)
class StepInputs:
    """One step's batch of R rows and T tokens: decode rows first, one token each, then prefill rows.

    Index tensors lie on the model's device. Valid until the context prepares its next step. The model
    writes `kv_cache` at `kv_write_positions` and `state_pool` at the destinations, and nothing else.
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64: absolute position of each token in its sequence
    num_decodes: int
    num_prefills: int
    query_lengths: tuple[int, ...]  # R: tokens of each row
    sequence_lengths: tuple[int, ...]  # R: tokens of each sequence after this step
    query_start_loc: Tensor  # [R + 1] int64
    kv_lengths: Tensor  # [R] int64: sequence_lengths, as a tensor
    block_table: Tensor  # [R, most blocks of any row] int64: KV blocks in order, padded with 0
    kv_write_tokens: Tensor  # [W] int64: the tokens whose keys and values are stored
    kv_write_positions: Tensor  # [W] int64: block * block_size_tokens + offset for each of them
    state_sources: Tensor  # [R] int64: pool index of the state after the tokens before; -1 = zeros
    state_destinations: Tensor  # [R] int64: pool index for the state after this step's tokens
    prefill_has_initial_state: bool  # any prefill row whose source is not -1
    chunks: PrefillChunks
    checkpoints: Checkpoints
    logit_tokens: Tensor  # [L] int64: the tokens whose logits are wanted, in order
    kv_cache: Tensor  # [attention layers, 2 (K, V), blocks, block_size_tokens, kv heads, head dim]
    state_pool: StatePool

    @property
    def num_decode_tokens(self) -> int:
        return self.num_decodes
