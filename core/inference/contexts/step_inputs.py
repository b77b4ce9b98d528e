"""What a model reads in one step, and the chunk grid of its prefills: closed forms in numpy."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Annotated, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ..kernels.step_rows import AttentionRows, ConvRows, ReplayRows, ScanRows, TailRows
from .dynamic_request import Batch
from .request_states import StatePool

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Integers = Sequence[int] | npt.NDArray[np.integer[Any]]


class StepShape(NamedTuple):
    """The sizes of a step's tensors, padding included. A captured graph fixes all of them."""

    decodes: int  # decode rows
    prefills: int  # prefill rows
    prefill_tokens: int
    max_query_tokens: int  # at least the tokens of the longest prefill row
    table_blocks: int  # columns of the block table
    kv_writes: int
    chunks: int  # chunks of the prefill rows
    checkpoints: int
    logits: int
    decode_tokens: int = 1  # tokens of each decode row: more than one where any row has drafts
    pages: int = 0  # columns of the page table of decodes by replay; the same in all steps

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

    Inputs lie in rows and in pages, as `InputTensor` describes. Beyond a request's tokens they may hold
    anything, NaN included.
    """

    pool: dict[str, Tensor]  # `DeviceMemory.input_pool`
    input_rows: Annotated[Tensor, "rows", -1]  # each row's place in `pool`; -1 = a padding row
    pages: Annotated[Tensor, "rows", 0, "int32", "pages"]  # [R, pages of a chunk]: each row's, in order
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
    block_table: Annotated[
        Tensor, "rows", 0, "int32", "table_blocks"
    ]  # [R, table_blocks]: KV blocks in order
    query_start_loc: Annotated[Tensor, "rows", None, "int32"]  # each row's first token; trailing total
    query_lengths: Annotated[Tensor, "rows", 0, "int32"]  # each row's real tokens; 0 for padding rows
    kv_write_tokens: Annotated[Tensor, "kv_writes"]  # the tokens whose keys and values are stored
    kv_write_positions: Annotated[Tensor, "kv_writes", -1]  # block * block_size_tokens + offset; -1 = none
    state_sources: Annotated[Tensor, "rows", -1]  # of the state before the step; -1 = zeros
    state_destinations: Annotated[
        Tensor, "state_writes", -1
    ]  # after each decode token and prefill row; -1 = none
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
            one_split=self.batch_invariant,
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
            replay.pages[decodes],
        )  # fmt: skip

    @cached_property
    def tail_rows(self) -> TailRows:
        """The prefill rows, for what stores the inputs of their tails; only with `replay`."""
        assert self.replay is not None
        replay, prefills = self.replay, slice(self.num_decodes, None)
        starts, query_start_loc = replay.tail_starts, self.chunks.query_start_loc
        return TailRows(replay.input_rows[prefills], starts, query_start_loc, replay.pages[prefills])

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


class StepObserver(Protocol):
    """Is called with each step of a context. An error that an observer raises fails the step."""

    def step_begun(self, batch: Batch, inputs: StepInputs) -> None:
        """All slots are reserved and `inputs` are built for `batch`, in row order; no forward is launched."""

    def step_ended(self, batch: Batch) -> None:
        """Requests are advanced, wrong drafts cut off; states that wait for tokens are committed later."""


# ---- the chunk grid


class Chunks(NamedTuple):
    """The chunks of a packed stream, in order; no chunk is empty and none spans two rows."""

    cu_chunk_seqlens: Int32Array  # [chunks + 1]: where each chunk starts; trailing total
    seq_idx: Int32Array  # [chunks]: the row of each chunk
    last_chunk_indices: Int32Array  # [rows]: each row's last chunk; -1 for a row without tokens


class ChunkGrid(NamedTuple):
    """The chunks of a step's prefill rows, and the chunk that ends on each planned checkpoint.

    The fields are those of `PrefillChunks` and `Checkpoints`, as fresh numpy arrays.
    """

    cu_chunk_seqlens: Int32Array
    seq_idx: Int32Array
    row_chunk_starts: Int32Array
    token_rows: Int64Array
    checkpoint_chunks: Int64Array  # [checkpoints]: the chunk that ends on the boundary
    checkpoint_token_ends: Int64Array  # [checkpoints]: packed position of the boundary (exclusive end)


def chunk_grid(
    computed: Integers,
    lengths: Integers,
    chunk_size: int,
    checkpoint_rows: Integers = (),
    checkpoint_positions: Integers = (),
) -> ChunkGrid:
    """The absolute chunk grid of rows with `computed` tokens and `lengths` new ones, 0 or more.

    Checkpoints lie at multiples of `chunk_size` in (computed, computed + length] of their row.
    """
    before, counts = np.asarray(computed, np.int64), np.asarray(lengths, np.int64)
    rows, positions = np.asarray(checkpoint_rows, np.int64), np.asarray(checkpoint_positions, np.int64)
    starts = np.zeros(counts.size + 1, np.int64)
    counts.cumsum(out=starts[1:])
    chunks = absolute_chunks(before, starts, counts, chunk_size)
    begins = before[rows]
    ends = begins + counts[rows]
    chunks_after = (ends + (chunk_size - 1)) // chunk_size - positions // chunk_size
    return ChunkGrid(
        chunks.cu_chunk_seqlens,
        chunks.seq_idx,
        row_chunk_starts=chunks.seq_idx.searchsorted(np.arange(counts.size + 1)).astype(np.int32),
        token_rows=np.arange(counts.size).repeat(counts),
        checkpoint_chunks=chunks.last_chunk_indices[rows] - chunks_after,
        checkpoint_token_ends=starts[rows] + positions - begins,
    )


def absolute_chunks(computed: Int64Array, starts: Int64Array, lengths: Int64Array, chunk_size: int) -> Chunks:
    """Chunks cut at absolute multiples of `chunk_size`; `starts`: packed, with a trailing total.

    With C the chunk size, a row of c computed and n new tokens, packed from q on, is cut at q + (floor(c / C)
    + j) * C - c for j >= 1, within the row. Example, C = 8, two rows with (c, n) = (0, 5) and (3, 10):

        packed token    0 ... 4 | 5 ... 9 | 10 ... 14       absolute position of a cut in its row
        chunk              0    |    1    |     2           cut at 10 = 5 + 8 - 3: position 8 of row 1
    """
    if lengths.size == 0:
        return Chunks(np.zeros(1, np.int32), np.empty(0, np.int32), np.empty(0, np.int32))
    stops = starts[1:]
    reached = computed + lengths
    cells = (reached + (chunk_size - 1)) // chunk_size
    counts = cells - computed // chunk_size
    empty = None if lengths[lengths.argmin()] else lengths == 0
    if empty is not None:
        counts[empty] = 0
    ends = counts.cumsum()

    # Chunk i starts at i * C plus a constant of its row. A row's first chunk starts where the row starts.
    total = int(ends[-1])
    row_offsets = stops - reached + (cells - ends) * chunk_size
    grid_end = (total + 1) * chunk_size  # beyond the tokens by up to two chunks a row
    grid_dtype: type[np.integer[Any]] = np.int32 if grid_end < 2**31 else np.int64
    cu = np.arange(0, grid_end, chunk_size, dtype=grid_dtype).astype(np.int32, copy=False)
    cu[:-1] += row_offsets.astype(np.int32).repeat(counts)
    cu[0] = 0
    cu[ends] = stops

    last = (ends - 1).astype(np.int32)
    if empty is not None:
        last[empty] = -1
    return Chunks(cu, np.arange(lengths.size, dtype=np.int32).repeat(counts), last)
