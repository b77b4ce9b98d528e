"""A model, what it reads in one step, and the sizes of these tensors."""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Annotated, NamedTuple, Protocol

from torch import Tensor

from ...state_spec import HybridStateSpec
from ..kernels.step_rows import AttentionRows, ConvRows, ReplayRows, ScanRows, TailRows
from .request_states import StatePool


class StepShape(NamedTuple):
    """The sizes of a step's tensors, padding included. A captured graph fixes all of them."""

    decodes: int  # decode rows
    prefills: int  # prefill rows
    prefill_tokens: int
    max_query_tokens: int  # at least the tokens of the longest prefill row
    block_columns: int  # of the block table
    kv_writes: int
    chunks: int  # chunks of the prefill rows
    checkpoints: int
    logits: int
    decode_tokens: int = 1  # tokens of each decode row: more than one where any row has drafts
    input_block_columns: int = 0  # of the table of input blocks; the same in all steps

    @property
    def rows(self) -> int:
        return self.decodes + self.prefills

    @property
    def tokens(self) -> int:
        return self.decodes * self.decode_tokens + self.prefill_tokens

    @property
    def state_writes(self) -> int:
        """One state for each decode token and one for each prefill row."""
        return self.decodes * self.decode_tokens + self.prefills


@dataclass(frozen=True)
class PrefillChunks:
    """How the prefill rows are cut into chunks, on the absolute grid of `absolute_chunks`.

    Tokens are counted in the packed prefill stream (token 0 is the first prefill token of the step),
    rows from the first prefill row.
    """

    query_start_loc: Annotated[Tensor, "prefills", None]  # where each row's tokens start; trailing total
    token_rows: Annotated[Tensor, "prefill_tokens", -1]  # the prefill row of each token
    cu_chunk_seqlens: Annotated[Tensor, "chunks", None, "int32"]  # where each chunk starts; trailing total
    seq_idx: Annotated[Tensor, "chunks", 0, "int32"]  # the prefill row of each chunk
    row_chunk_starts: Annotated[Tensor, "prefills", None, "int32"]  # each row's first chunk; trailing total
    destinations: Annotated[Tensor, "chunks", -1]  # pool index for the state after this chunk; -1 = none
    chunk_size: int  # tokens of a whole chunk; chunks end where a sequence's position is a multiple of it


@dataclass(frozen=True)
class Checkpoints:
    """States to store at boundaries strictly inside this step's prefill rows, by the boundary's token.

    There is one entry for each state. `PrefillChunks.destinations` has the same states by chunk, because each
    boundary is the end of a chunk. Convolution windows are stored by token, states of scans by chunk.
    A boundary at the end of a row needs no entry: the row's `state_destinations` is the slot.
    """

    rows: Annotated[Tensor, "checkpoints", -1]  # prefill row
    token_ends: Annotated[Tensor, "checkpoints"]  # packed prefill token after the boundary
    destinations: Annotated[Tensor, "checkpoints", -1]  # pool index


@dataclass(frozen=True)
class Replay:
    """What decodes by replay need: where each request's inputs since its last grid point lie.

    A grid point is a multiple of `PrefillChunks.chunk_size`. Between steps, the state of a request is the
    state at its last grid point: `StepInputs.state_sources` names it. A decode row reads the inputs after
    that point, and appends its tokens' own; it does not go beyond the next grid point. The row that reaches
    the next grid point writes the state there. A prefill row starts on a grid point. It stores the state at
    its last grid point, and the inputs after that point, its tail.

    Inputs lie in rows and in input blocks, as `InputTensor` describes. Beyond a request's tokens they may
    hold anything, NaN included.
    """

    pool: dict[str, Tensor]  # `DeviceMemory.input_pool`
    input_rows: Annotated[Tensor, "rows", -1]  # each row's place in `pool`; -1 = a padding row
    input_blocks: Annotated[Tensor, "rows", 0, "int32", "input_block_columns"]  # each row's, in order
    starts: Annotated[Tensor, "rows", 0, "int32"]  # absolute position of each row's first token
    destinations: Annotated[Tensor, "rows", -1]  # index for the state that a decode row completes
    tail_starts: Annotated[Tensor, "prefills"]  # packed prefill token after the row's last grid point


@dataclass(frozen=True)
class StepInputs:
    """One step's batch of R rows and T tokens: decode rows first, then prefill rows.

    Decode rows have `shape.decode_tokens` tokens each: the last token of the sequence, then drafts of what
    may follow, then padding. In a step without drafts each decode row has one token.

    An index tensor is [n] int64, or int32 where noted, with n the size of `shape` that its annotation names:
    R is `rows`, T is `tokens`. The number after it is the padding; None adds one entry, the total. Sources
    and destinations of states are pool indices; the state before a step is with `replay` that at the last
    grid point. Index tensors lie on the model's device, and are valid until the context begins its next step.
    The model writes `kv_cache` at `kv_write_positions` and `state_pool` at the destinations, and nothing
    else; in a KV block whose first row it writes, it may also write zeros after the last token. With `replay`
    it also writes its tokens' inputs.

    All tensors may be padded to `shape`: padding follows the real decode rows and the real prefill
    rows, as `kernels.reference` describes. The logits of padding are ignored. The padding tokens of a real
    decode row have position 0, and -1 as state destination.
    """

    shape: StepShape
    token_ids: Annotated[Tensor, "tokens"]
    positions: Annotated[Tensor, "tokens"]  # absolute position of each token in its sequence
    kv_lengths: Annotated[Tensor, "rows", 0, "int32"]  # tokens of each sequence after this step, with drafts
    block_table: Annotated[Tensor, "rows", 0, "int32", "block_columns"]  # each row's KV blocks, in order
    query_start_loc: Annotated[Tensor, "rows", None, "int32"]  # each row's first token; trailing total
    query_lengths: Annotated[Tensor, "rows", 0, "int32"]  # each row's real tokens; 0 for padding rows
    kv_write_tokens: Annotated[Tensor, "kv_writes"]  # the tokens whose keys and values are stored
    kv_write_positions: Annotated[Tensor, "kv_writes", -1]  # block * block_size_tokens + offset; -1 = none
    state_sources: Annotated[Tensor, "rows", -1]  # of the state before the step; -1 = zeros
    state_destinations: Annotated[Tensor, "state_writes", -1]  # after each decode token and prefill row
    logit_tokens: Annotated[Tensor, "logits"]  # the tokens whose logits are wanted, in order
    chunks: PrefillChunks
    checkpoints: Checkpoints
    num_logits: int  # the first `num_logits` logit tokens are real, the others padding
    kv_cache: Tensor  # [attention layers, 2 (K, V), blocks, block_size_tokens, kv heads, head dim]
    state_pool: StatePool
    replay: Replay | None = None  # None: decodes update states at each token
    batch_invariant: bool = False  # whether no result may depend on other rows

    @property
    def num_decodes(self) -> int:
        return self.shape.decodes

    @property
    def num_prefills(self) -> int:
        return self.shape.prefills

    @property
    def num_decode_tokens(self) -> int:
        return self.shape.decodes * self.shape.decode_tokens

    @cached_property
    def attention_rows(self) -> AttentionRows:
        """The rows, for attention kernels."""
        return AttentionRows(
            block_table=self.block_table,
            kv_lengths=self.kv_lengths,
            query_start_loc=self.query_start_loc,
            query_lengths=self.query_lengths,
            positions=self.positions,
            num_decodes=self.shape.decodes,
            decode_tokens=self.shape.decode_tokens,
            max_query_tokens=self.shape.max_query_tokens,
            batch_invariant=self.batch_invariant,
        )

    @cached_property
    def conv_rows(self) -> ConvRows:
        """The prefill rows, for `causal_conv1d_prefill`."""
        chunks, checkpoints, sources = self.chunks, self.checkpoints, self.state_sources[self.num_decodes :]
        return ConvRows(
            sources, self.prefill_destinations, chunks.query_start_loc, chunks.token_rows,
            checkpoints.rows, checkpoints.token_ends, checkpoints.destinations,
        )  # fmt: skip

    @cached_property
    def scan_rows(self) -> ScanRows:
        """The prefill rows, for `ssd_chunk_scan` and `gated_delta_rule_scan`."""
        chunks, sources = self.chunks, self.state_sources[self.num_decodes :]
        return ScanRows(
            sources, self.prefill_destinations, chunks.chunk_size, chunks.cu_chunk_seqlens, chunks.seq_idx,
            chunks.row_chunk_starts, chunks.destinations,
        )  # fmt: skip

    @cached_property
    def replay_rows(self) -> ReplayRows:
        """The decode rows, for decodes by replay; only with `replay`."""
        assert self.replay is not None
        replay, decodes = self.replay, slice(self.num_decodes)
        return ReplayRows(
            replay.input_rows[decodes], replay.starts[decodes], self.query_lengths[decodes],
            self.state_sources[decodes], replay.destinations[decodes], self.chunks.chunk_size,
            replay.input_blocks[decodes],
        )  # fmt: skip

    @cached_property
    def tail_rows(self) -> TailRows:
        """The prefill rows, for what stores the inputs of their tails; only with `replay`."""
        assert self.replay is not None
        replay, prefills = self.replay, slice(self.num_decodes, None)
        starts, query_start_loc = replay.tail_starts, self.chunks.query_start_loc
        return TailRows(replay.input_rows[prefills], starts, query_start_loc, replay.input_blocks[prefills])

    @property
    def decode_destinations(self) -> Tensor:
        """[decode rows, tokens of a row]: pool index for the state after each token; -1 = none."""
        shape = self.shape
        return self.state_destinations[: self.num_decode_tokens].view(shape.decodes, shape.decode_tokens)

    @property
    def prefill_destinations(self) -> Tensor:
        """[prefill rows]: pool index for the state after each row; -1 = none."""
        return self.state_destinations[self.num_decode_tokens :]


class IndexField(NamedTuple):
    """An index tensor, of which the step buffer has a part: size, padding and dtype from its annotation.

    Attributes:
        owner, name: the attribute of `StepInputs` that holds the tensor, "" for `StepInputs` itself; the
            tensor's name there.
        size: the number of entries, as an attribute of `StepShape`; it also says where values lie in a tensor
            that is padded. "tokens": each decode row's tokens, padded to `decode_tokens`, then the prefill
            tokens. "rows": decode rows, padding, prefill rows, padding. "state_writes": as "tokens" for
            decodes, then one value for each prefill row. Others: one after another, then padding.
        padding: the number in all other places. None for the starts of ranges, one after another, with a
            trailing total, which also fills the padding.
        columns: of a table with `size` rows, as an attribute of `StepShape`; "" for a tensor [n].
    """

    owner: str
    name: str
    size: str
    padding: int | None = 0
    dtype: str = "int64"
    columns: str = ""

    @property
    def int32(self) -> bool:
        return self.dtype == "int32"

    @property
    def key(self) -> str:
        """The tensor's name in the step buffer: "token_ids", "chunks.seq_idx"."""
        return f"{self.owner}.{self.name}" if self.owner else self.name

    def num_entries(self, shape: StepShape) -> int:
        count: int = getattr(shape, self.size)
        return count * getattr(shape, self.columns) if self.columns else count + (self.padding is None)


_PARTS = {"": StepInputs, "chunks": PrefillChunks, "checkpoints": Checkpoints, "replay": Replay}
INDEX_FIELDS = tuple(
    IndexField(owner, each.name, *each.type.__metadata__)
    for owner, part in _PARTS.items()
    for each in fields(part)
    if hasattr(each.type, "__metadata__")
)
"""All index tensors, in their order in the step buffer."""


class Model(Protocol):
    """A hybrid model that a `DynamicInferenceEngine` can serve.

    `testing.check_model` checks that a model keeps the rules of `StepInputs`.
    """

    def state_spec(self) -> HybridStateSpec:
        """What the context allocates for this model; the same at every call."""

    def __call__(self, inputs: StepInputs) -> Tensor:
        """Compute one step.

        Args:
            inputs: the step. Its `kv_cache` is written at `kv_write_positions`, and its `state_pool` at the
                destinations, before the call returns or, on a GPU, in the order of the current stream.

        Returns:
            Logits of `inputs.logit_tokens`: [len(inputs.logit_tokens), vocab_size], floating point, on the
            device of `state_spec()`.
        """
