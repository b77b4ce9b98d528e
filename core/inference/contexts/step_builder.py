"""From scheduled chunks to the tensors a model reads."""

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .chunk_grid import chunk_grid
from .scheduled_chunk import ScheduledChunk
from .step_inputs import Checkpoints, PrefillChunks, StepInputs

if TYPE_CHECKING:
    from .dynamic_context import DynamicInferenceContext


class BatchDimensions(NamedTuple):
    """Rows of a step."""

    decode_req_count: int
    prefill_req_count: int


def build_step_inputs(context: "DynamicInferenceContext", chunks: Sequence[ScheduledChunk]) -> StepInputs:
    """The inputs of a step whose chunks are ordered decodes first; mutates nothing.

    Tokens in immutable blocks are computed without writing their KV again. A row whose step ends on a
    reserved boundary has the durable slot as its destination, any other its live slot.
    """
    device = context.spec.device
    size = context.block_size_tokens
    requests = [chunk.request for chunk in chunks]
    prefills = [chunk for chunk in chunks if not chunk.decoding]
    decodes = len(chunks) - len(prefills)
    starts = [chunk.start for chunk in chunks]
    stops = [chunk.stop for chunk in chunks]
    lengths = np.subtract(stops, starts)
    query_start_loc = np.zeros(len(chunks) + 1, np.int64)
    lengths.cumsum(out=query_start_loc[1:])

    token_rows = np.arange(len(chunks)).repeat(lengths)
    positions = np.arange(len(token_rows)) + (starts - query_start_loc[:-1])[token_rows]
    table = context.request_to_kv_block_ids.numpy()[[request.row for request in requests]].astype(np.int64)
    table = table[:, : -(-max(stops) // size)].clip(min=0)
    immutable = np.array([request.immutable_blocks * size for request in requests])
    writes = np.flatnonzero(positions >= immutable[token_rows])
    blocks = table[token_rows[writes], positions[writes] // size]

    inner = [
        (row, position, slot)
        for row, chunk in enumerate(prefills)
        for position, slot in chunk.destinations.items()
        if position != chunk.stop
    ]
    rows = [row for row, _, _ in inner]
    grid = chunk_grid(
        starts[decodes:],
        lengths[decodes:],
        context.mamba_chunk_size,
        rows,
        [position for _, position, _ in inner],
    )
    sources = [request.state_index if request.computed else -1 for request in requests]
    token_ids = chain.from_iterable(chunk.request.tokens[chunk.start : chunk.stop] for chunk in chunks)
    logits = [
        first + position - chunk.start
        for first, chunk in zip(query_start_loc[:-1].tolist(), chunks, strict=True)
        for position in chunk.logit_positions
    ]

    def tensor(values: Sequence[int] | npt.NDArray[np.integer], dtype: type[np.integer] = np.int64) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype)).to(device, non_blocking=True)

    return StepInputs(
        token_ids=tensor(np.fromiter(token_ids, np.int64, len(positions))),
        positions=tensor(positions),
        num_decodes=decodes,
        num_prefills=len(prefills),
        query_lengths=tuple(lengths.tolist()),
        sequence_lengths=tuple(stops),
        query_start_loc=tensor(query_start_loc),
        kv_lengths=tensor(stops),
        block_table=tensor(table),
        kv_write_tokens=tensor(writes),
        kv_write_positions=tensor(blocks * size + positions[writes] % size),
        state_sources=tensor(sources),
        state_destinations=tensor([context.state_destination(chunk) for chunk in chunks]),
        prefill_has_initial_state=any(source >= 0 for source in sources[decodes:]),
        chunks=PrefillChunks(
            cu_chunk_seqlens=tensor(grid.cu_chunk_seqlens, np.int32),
            seq_idx=tensor(grid.seq_idx, np.int32),
            last_chunk_indices=tensor(grid.last_chunk_indices, np.int32),
            token_rows=tensor(grid.token_rows),
        ),
        checkpoints=Checkpoints(
            rows=tensor(rows),
            chunks=tensor(grid.checkpoint_chunks),
            token_ends=tensor(grid.checkpoint_token_ends),
            destinations=tensor([context.state_pool.durable_index(slot) for _, _, slot in inner]),
        ),
        logit_tokens=tensor(logits),
        kv_cache=context.kv_cache,
        state_pool=context.state_pool,
    )
