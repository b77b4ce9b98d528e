"""The one list of a step's index tensors: their names, sizes, types and padding."""

from collections.abc import Callable
from typing import Literal, NamedTuple

from .step_inputs import StepShape

Layout = Literal["front", "tokens", "rows", "state_writes"]
"""Where the values lie in a tensor that is padded:

front: one after another, padding behind them.
tokens: each decode row's tokens, padded to `decode_tokens`, then the prefill tokens.
rows: decode rows, padding, prefill rows, padding.
state_writes: as "tokens" for decodes, then one value for each prefill row.
"""


Owner = Literal["", "chunks", "checkpoints", "replay"]


class StepField(NamedTuple):
    """One index tensor.

    Attributes:
        name: the tensor's name in the step buffer and among the builder's values.
        size: maps a step's shape to the number of entries.
        layout: where values lie when the step is padded.
        padding: the number in all other places; None for the last value, which is a total.
        owner: the attribute of `StepInputs` that holds the tensor, "" for `StepInputs` itself.
        attribute: the tensor's name in its owner, where the name differs from `name`.
        int32: whether the tensor is int32; else it is int64.
    """

    name: str
    size: Callable[[StepShape], int]
    layout: Layout = "front"
    padding: int | None = 0
    owner: Owner = ""
    attribute: str = ""
    int32: bool = False


STEP_FIELDS = (
    StepField("token_ids", lambda s: s.tokens, "tokens"),
    StepField("positions", lambda s: s.tokens, "tokens"),
    StepField("kv_write_tokens", lambda s: s.kv_writes),
    StepField("kv_write_positions", lambda s: s.kv_writes, padding=-1),
    StepField("kv_lengths", lambda s: s.rows, "rows", int32=True),
    StepField("block_table", lambda s: s.rows * s.table_blocks, "rows", int32=True),
    StepField(
        "row_query_start_loc", lambda s: s.rows + 1, padding=None, attribute="query_start_loc", int32=True
    ),
    StepField("query_lengths", lambda s: s.rows, "rows", int32=True),
    StepField("state_sources", lambda s: s.rows, "rows", padding=-1),
    StepField("state_destinations", lambda s: s.state_writes, "state_writes", padding=-1),
    StepField("logit_tokens", lambda s: s.logits),
    StepField("query_start_loc", lambda s: s.prefills + 1, padding=None, owner="chunks"),
    StepField("token_rows", lambda s: s.prefill_tokens, padding=-1, owner="chunks"),
    StepField("cu_chunk_seqlens", lambda s: s.chunks + 1, padding=None, owner="chunks", int32=True),
    StepField("seq_idx", lambda s: s.chunks, owner="chunks", int32=True),
    StepField("row_chunk_starts", lambda s: s.prefills + 1, padding=None, owner="chunks", int32=True),
    StepField("chunk_destinations", lambda s: s.chunks, padding=-1, owner="chunks", attribute="destinations"),
    StepField("checkpoint_rows", lambda s: s.checkpoints, padding=-1, owner="checkpoints", attribute="rows"),
    StepField("checkpoint_token_ends", lambda s: s.checkpoints, owner="checkpoints", attribute="token_ends"),
    StepField(
        "checkpoint_destinations", lambda s: s.checkpoints, padding=-1, owner="checkpoints",
        attribute="destinations",
    ),
    StepField("replay_slots", lambda s: s.rows, "rows", padding=-1, owner="replay", attribute="slots"),
    StepField("replay_starts", lambda s: s.rows, "rows", owner="replay", attribute="starts", int32=True),
    StepField(
        "replay_destinations", lambda s: s.rows, "rows", padding=-1, owner="replay", attribute="destinations"
    ),
    StepField("tail_starts", lambda s: s.prefills, owner="replay"),
)  # fmt: skip
"""All fields, in their order in the step buffer. `step_inputs` documents their meanings."""
