"""Builds the tensors that a model reads in a step."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
from torch import Tensor

from ...config import InferenceConfig
from .chunk_grid import chunk_grid
from .device_memory import DeviceMemory
from .request import Batch
from .states import RequestStates
from .step_buffer import Array, StepBuffer
from .step_inputs import (
    INDEX_FIELDS,
    Checkpoints,
    IndexField,
    PrefillChunks,
    Replay,
    StepInputs,
    StepShape,
)

Padding = Callable[[StepShape], StepShape]
"""Maps a step's shape to the shape to pad to, which is at least as large in every size."""


class StepBuilder:
    """Fills the step buffer for one step after another, and sends it to the device."""

    def __init__(
        self,
        buffer: StepBuffer,
        config: InferenceConfig,
        chunk_size: int,
        states: RequestStates,
        memory: DeviceMemory,
    ) -> None:
        self._buffer = buffer
        self._block_size = config.block_size_tokens
        self._chunk_size = chunk_size
        self._replays = config.decodes_by_replay
        self._batch_invariant = bool(config.batch_invariant)
        self._states = states
        self._memory = memory

    def build(
        self, batch: Batch, block_table: Array, page_table: Array, padding: Padding,
        sampled_tokens: Tensor | None = None,
    ) -> StepInputs:  # fmt: skip
        """The inputs of `batch`, decodes first; not synchronised. KV of registered blocks is not written."""
        layout = _Layout(batch)
        values = self._token_values(batch, layout, block_table) | self._state_values(batch, layout)
        if self._replays:
            values |= self._replay_values(batch, layout, page_table)
        shape = padding(layout.shape(values))
        values["query_start_loc"] = layout.pad_to(shape)
        for name in ("kv_write_tokens", "logit_tokens"):
            values[name] = layout.token_places[values[name]]
        arrays = self._buffer.arrays(shape)
        for field in INDEX_FIELDS:
            if field.key in values:
                layout.fill(arrays[field.key], values[field.key], field)
        tensors, num_logits = self._buffer.send(shape), len(values["logit_tokens"])
        if sampled_tokens is not None:
            tensors["token_ids"][: len(sampled_tokens)].copy_(sampled_tokens)
        return self._inputs(shape, num_logits, tensors)

    def _token_values(self, batch: Batch, layout: "_Layout", block_table: Array) -> dict[str, Any]:
        size = self._block_size
        num_blocks = -(-max(layout.stops) // size)
        rows = [scheduled.allocation.row for scheduled in batch]
        table = block_table[:, :num_blocks][rows].clip(min=0)  # cut first: whole rows are long
        registered = np.array([scheduled.allocation.path.num_registered * size for scheduled in batch])
        writes = np.flatnonzero(layout.positions >= registered[layout.token_rows])
        written = layout.positions[writes]
        blocks = table[layout.token_rows[writes], written // size].astype(np.int64)
        token_ids = chain.from_iterable(scheduled.tokens for scheduled in batch)
        firsts = layout.query_start_loc[layout.num_decodes : -1].tolist()
        prefills = zip(firsts, batch[layout.num_decodes :], strict=True)
        logits = [*range(layout.num_decode_tokens)]  # of decodes each one
        logits += (
            first + position - scheduled.start
            for first, scheduled in prefills
            for position in scheduled.logit_positions
        )
        return {
            "token_ids": np.fromiter(token_ids, np.int64, len(layout.positions)),
            "positions": layout.positions,
            "logit_tokens": np.array(logits, np.int64),
            "kv_lengths": layout.stops,
            "block_table": table,
            "query_lengths": layout.lengths,
            "kv_write_tokens": writes,
            "kv_write_positions": blocks * size + written % size,
        }

    def _state_values(self, batch: Batch, layout: "_Layout") -> dict[str, Any]:
        # Entries that are no checkpoints come last.
        inner = sorted(
            (
                (row, position, index, position in scheduled.destinations)
                for row, scheduled in enumerate(batch[layout.num_decodes :])
                for position, index in self._states.inner_destinations(scheduled)
            ),
            key=lambda entry: not entry[3],
        )
        rows, positions, slots, are_checkpoints = zip(*inner, strict=True) if inner else ((), (), (), ())
        count, decodes = sum(are_checkpoints), layout.num_decodes
        starts, lengths = layout.starts[decodes:], layout.lengths[decodes:]
        grid = chunk_grid(starts, lengths, self._chunk_size, rows, positions)
        chunk_destinations = np.full(len(grid.seq_idx), -1)
        chunk_destinations[grid.checkpoint_chunks] = slots
        return {
            "state_destinations": [
                index for scheduled in batch for index in self._states.destinations(scheduled)
            ],
            "state_sources": [
                scheduled.allocation.state_index if scheduled.allocation.num_computed else -1
                for scheduled in batch
            ],
            "chunks.query_start_loc": layout.query_start_loc[decodes:] - layout.num_decode_tokens,
            "chunks.token_rows": grid.token_rows,
            "chunks.cu_chunk_seqlens": grid.cu_chunk_seqlens,
            "chunks.seq_idx": grid.seq_idx,
            "chunks.row_chunk_starts": grid.row_chunk_starts,
            "chunks.destinations": chunk_destinations,
            "checkpoints.rows": rows[:count],
            "checkpoints.token_ends": grid.checkpoint_token_ends[:count],
            "checkpoints.destinations": slots[:count],
        }

    def _replay_values(self, batch: Batch, layout: "_Layout", page_table: Array) -> dict[str, Any]:
        rows = [scheduled.allocation.row for scheduled in batch]
        starts, stops = np.array(layout.starts), np.array(layout.stops)
        tails = layout.query_start_loc[:-1] - layout.num_decode_tokens - starts
        tails += stops // self._chunk_size * self._chunk_size
        return {
            "replay.input_rows": rows,
            "replay.pages": page_table[rows],
            "replay.starts": starts,
            "replay.destinations": [self._states.completed_destination(scheduled) for scheduled in batch],
            "replay.tail_starts": tails[layout.num_decodes :],
        }

    def _inputs(self, shape: StepShape, num_logits: int, tensors: dict[str, Tensor]) -> StepInputs:
        owned: dict[str, dict[str, Any]] = {"": {}, "chunks": {}, "checkpoints": {}, "replay": {}}
        for field in INDEX_FIELDS:
            owned[field.owner][field.name] = tensors[field.key]
        return StepInputs(
            shape=shape,
            **owned[""],
            chunks=PrefillChunks(**owned["chunks"], chunk_size=self._chunk_size),
            checkpoints=Checkpoints(**owned["checkpoints"]),
            num_logits=num_logits,
            kv_cache=self._memory.kv_cache,
            state_pool=self._memory.state_pool,
            replay=Replay(self._memory.input_pool, **owned["replay"]) if self._replays else None,
            batch_invariant=self._batch_invariant,
        )


class _Layout:
    """Where each request's tokens lie in the packed step, decode rows first, and in the padded step."""

    def __init__(self, batch: Batch) -> None:
        self.starts = [scheduled.start for scheduled in batch]
        self.stops = [scheduled.stop for scheduled in batch]
        self.lengths = np.subtract(self.stops, self.starts)
        self.query_start_loc = np.zeros(len(batch) + 1, np.int64)  # with a trailing total
        self.lengths.cumsum(out=self.query_start_loc[1:])
        self.token_rows = np.arange(len(batch)).repeat(self.lengths)
        self.token_places = np.arange(len(self.token_rows))  # in the padded step, after `pad_to`
        self.positions = self.token_places + (self.starts - self.query_start_loc[:-1])[self.token_rows]
        self.num_decodes = sum(scheduled.decoding for scheduled in batch)
        self.num_decode_tokens = int(self.query_start_loc[self.num_decodes])
        self.num_prefills = len(batch) - self.num_decodes

    def shape(self, values: dict[str, Any]) -> StepShape:
        """The step's sizes without padding."""
        decodes = self.num_decodes
        drafts = self.num_decode_tokens > decodes
        return StepShape(
            decodes=decodes,
            prefills=self.num_prefills,
            prefill_tokens=len(self.positions) - self.num_decode_tokens,
            max_query_tokens=int(max(self.lengths[decodes:], default=0)),
            table_blocks=values["block_table"].shape[1],
            kv_writes=len(values["kv_write_tokens"]),
            chunks=len(values["chunks.seq_idx"]),
            checkpoints=len(values["checkpoints.rows"]),
            logits=len(values["logit_tokens"]),
            decode_tokens=int(self.lengths[:decodes].max()) if drafts else 1,
            pages=values["replay.pages"].shape[1] if "replay.pages" in values else 0,
        )

    def pad_to(self, shape: StepShape) -> Array:
        """Lay the step out in `shape`; returns the place of each row's first token, for padding rows too."""
        self._shape = shape
        decode_tokens, width, places = self.num_decode_tokens, shape.decode_tokens, self.token_places
        moved = shape.decodes * width - decode_tokens
        places[decode_tokens:] += moved
        if width > 1:
            rows = self.token_rows[:decode_tokens]
            places[:decode_tokens] += rows * width - self.query_start_loc[rows]
        decodes = np.arange(0, shape.decodes * width, width)
        return np.concatenate([decodes, self.query_start_loc[self.num_decodes :] + moved])

    def fill(self, array: Array, values: Sequence[int] | Array, field: IndexField) -> None:
        """Write a field's values into its array, and padding into the rest."""
        if array.shape == np.shape(values):
            array[:] = values
            return
        padding: Any = values[-1] if field.padding is None else field.padding
        array.fill(padding)
        columns = (slice(size) for size in np.shape(values)[1:])
        array[(self._places(field, len(values)), *columns)] = values

    def _places(self, field: IndexField, count: int) -> Array | slice:
        if field.padding is None or field.size not in ("tokens", "rows", "state_writes"):
            return slice(count)
        if field.size == "tokens":
            return self.token_places
        prefills, shape = np.arange(self.num_prefills), self._shape
        if field.size == "rows":
            return np.append(np.arange(self.num_decodes), prefills + shape.decodes)
        decode_tokens = self.token_places[: self.num_decode_tokens]
        return np.append(decode_tokens, prefills + shape.decodes * shape.decode_tokens)
