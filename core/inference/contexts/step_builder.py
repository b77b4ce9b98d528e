"""From scheduled chunks to the tensors a model reads."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .chunk_grid import chunk_grid
from .scheduled_chunk import ScheduledChunk
from .step_buffer import checkpoints, prefill_chunks
from .step_inputs import StepInputs, StepShape

if TYPE_CHECKING:
    from .dynamic_context import DynamicInferenceContext

Array = npt.NDArray[np.integer[Any]]
Padding = Callable[[StepShape], StepShape]
"""The shape to pad a step of some shape to: at least as large in everything."""


class BatchDimensions(NamedTuple):
    """Rows of a step."""

    decode_req_count: int
    prefill_req_count: int


def build_step_inputs(
    context: "DynamicInferenceContext", chunks: Sequence[ScheduledChunk], padding: Padding | None = None
) -> StepInputs:
    """The inputs of a step whose chunks are ordered decodes first; fills `context.step_buffer`, and sends it.

    Tokens in immutable blocks are computed without writing their KV again. A token that ends a block with a
    reserved slot has that as its state's destination, any other a live slot.
    """
    size = context.block_size_tokens
    requests = [chunk.request for chunk in chunks]
    prefills = [chunk for chunk in chunks if not chunk.decoding]
    decodes = len(chunks) - len(prefills)
    starts = [chunk.start for chunk in chunks]
    stops = [chunk.stop for chunk in chunks]
    lengths = np.subtract(stops, starts)
    query_start_loc = np.zeros(len(chunks) + 1, np.int64)
    lengths.cumsum(out=query_start_loc[1:])
    decode_tokens = int(query_start_loc[decodes])

    token_rows = np.arange(len(chunks)).repeat(lengths)
    positions = np.arange(len(token_rows)) + (starts - query_start_loc[:-1])[token_rows]
    table = context.request_to_kv_block_ids.numpy()[[request.row for request in requests]]
    table = table[:, : -(-max(stops) // size)].clip(min=0)
    immutable = np.array([request.immutable_blocks * size for request in requests])
    writes = np.flatnonzero(positions >= immutable[token_rows])
    written = positions[writes]
    blocks = table[token_rows[writes], written // size].astype(np.int64)

    inner = [
        (row, position, slot)
        for row, chunk in enumerate(prefills)
        for position, slot in chunk.destinations.items()
        if position != chunk.stop
    ]
    rows = [row for row, _, _ in inner]
    slots = [context.state_pool.durable_index(slot) for _, _, slot in inner]
    grid = chunk_grid(
        starts[decodes:],
        lengths[decodes:],
        context.mamba_chunk_size,
        rows,
        [position for _, position, _ in inner],
    )
    chunk_destinations = np.full(len(grid.seq_idx), -1)
    chunk_destinations[grid.checkpoint_chunks] = slots
    token_ids = chain.from_iterable(chunk.tokens for chunk in chunks)
    logits = [
        first + position - chunk.start
        for first, chunk in zip(query_start_loc[:-1].tolist(), chunks, strict=True)
        for position in chunk.logit_positions
    ]

    shape = StepShape(
        decodes=decodes,
        prefills=len(prefills),
        prefill_tokens=len(positions) - decode_tokens,
        max_query_tokens=int(max(lengths[decodes:], default=0)),
        table_blocks=table.shape[1],
        kv_writes=len(writes),
        chunks=len(grid.seq_idx),
        checkpoints=len(inner),
        logits=len(logits),
        decode_tokens=1 if decode_tokens == decodes else int(lengths[:decodes].max()),
    )
    if padding is not None:
        shape = padding(shape)
    into = context.step_buffer.arrays(shape)
    gap = decodes, shape.decodes
    places = _padded_places(query_start_loc, token_rows, decodes, shape)
    _fill_at(into["token_ids"], np.fromiter(token_ids, np.int64, len(positions)), places, 0)
    _fill_at(into["positions"], positions, places, 0)
    _fill(into["kv_write_tokens"], writes if places is None else places[writes], 0)
    _fill(into["kv_write_positions"], blocks * size + written % size, -1)
    _fill_around(into["kv_lengths"], stops, gap, 0)
    _fill_table(into["block_table"], table, gap)
    sources = [request.state_index if request.computed else -1 for request in requests]
    _fill_around(into["state_sources"], sources, gap, -1)
    destinations = [index for chunk in chunks for index in context.state_destinations(chunk)]
    state_places = None
    if shape.state_writes != len(destinations):
        decoded = np.arange(decode_tokens) if places is None else places[:decode_tokens]
        behind = np.arange(len(prefills)) + shape.decodes * shape.decode_tokens
        state_places = np.append(decoded, behind)
    _fill_at(into["state_destinations"], destinations, state_places, -1)
    wanted = np.array(logits, np.int64)
    _fill(into["logit_tokens"], wanted if places is None else places[wanted], 0)
    _fill(into["query_start_loc"], query_start_loc[decodes:] - decode_tokens, len(positions) - decode_tokens)
    _fill(into["token_rows"], grid.token_rows, -1)
    _fill(into["cu_chunk_seqlens"], grid.cu_chunk_seqlens, grid.cu_chunk_seqlens[-1])
    _fill(into["seq_idx"], grid.seq_idx, 0)
    _fill(into["row_chunk_starts"], grid.row_chunk_starts, len(grid.seq_idx))
    _fill(into["chunk_destinations"], chunk_destinations, -1)
    _fill(into["checkpoint_rows"], rows, -1)
    _fill(into["checkpoint_token_ends"], grid.checkpoint_token_ends, 0)
    _fill(into["checkpoint_destinations"], slots, -1)

    tensors = context.step_buffer.send(shape)
    return StepInputs(
        shape=shape,
        token_ids=tensors["token_ids"],
        positions=tensors["positions"],
        kv_lengths=tensors["kv_lengths"],
        block_table=tensors["block_table"],
        kv_write_tokens=tensors["kv_write_tokens"],
        kv_write_positions=tensors["kv_write_positions"],
        state_sources=tensors["state_sources"],
        state_destinations=tensors["state_destinations"],
        chunks=prefill_chunks(tensors),
        checkpoints=checkpoints(tensors),
        logit_tokens=tensors["logit_tokens"],
        num_logits=len(logits),
        kv_cache=context.kv_cache,
        state_pool=context.state_pool,
    )


def _fill(array: Array, values: Sequence[int] | Array, padding: int) -> None:
    array[: len(values)] = values
    if len(values) < len(array):
        array[len(values) :] = padding


def _fill_at(array: Array, values: Sequence[int] | Array, places: Array | None, padding: int) -> None:
    """Each value in its place, padding elsewhere; `places` None: one after another, and no padding."""
    if places is None:
        array[:] = values
    else:
        array.fill(padding)
        array[places] = values


def _fill_around(array: Array, values: Sequence[int] | Array, gap: tuple[int, int], padding: int) -> None:
    """As `_fill`, with more padding from the first number of `gap` to the second: behind the decodes."""
    decodes, padded = gap
    if len(array) == len(values):
        array[:] = values
        return
    array.fill(padding)
    array[:decodes] = values[:decodes]
    array[padded : padded + len(values) - decodes] = values[decodes:]


def _fill_table(array: Array, table: Array, gap: tuple[int, int]) -> None:
    decodes, padded = gap
    if array.shape == table.shape:
        array[:] = table
        return
    array.fill(0)
    rows, blocks = table.shape
    array[:decodes, :blocks] = table[:decodes]
    array[padded : padded + rows - decodes, :blocks] = table[decodes:]


def _padded_places(query_start_loc: Array, token_rows: Array, decodes: int, shape: StepShape) -> Array | None:
    """Where each of the tokens is once all decode rows have equally many; None where that changes nothing."""
    total, decode_tokens = len(token_rows), int(query_start_loc[decodes])
    if shape.tokens == total:
        return None
    places = np.arange(total)
    places[decode_tokens:] += shape.decodes * shape.decode_tokens - decode_tokens
    if shape.decode_tokens > 1:
        rows = token_rows[:decode_tokens]
        places[:decode_tokens] += rows * shape.decode_tokens - query_start_loc[rows]
    return places
