"""Builds the tensors that a model reads in a step."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from .chunk_grid import chunk_grid
from .device_memory import DeviceMemory
from .request import RequestStep
from .states import RequestStates
from .step_buffer import STEP_FIELDS, StepBuffer, StepField
from .step_inputs import Checkpoints, PrefillChunks, Replay, StepInputs, StepShape

Array = npt.NDArray[np.integer[Any]]
Padding = Callable[[StepShape], StepShape]
"""Maps a step's shape to the shape to pad to, which is at least as large in every size."""


class StepBuilder:
    """Fills the step buffer for one step after another, and sends it to the device."""

    def __init__(
        self,
        buffer: StepBuffer,
        block_size_tokens: int,
        chunk_size: int,
        replays: bool = False,
        batch_invariant: bool = False,
    ) -> None:
        self._buffer = buffer
        self._replays = replays
        self._batch_invariant = batch_invariant
        self._block_size = block_size_tokens
        self._chunk_size = chunk_size

    def build(
        self,
        steps: Sequence[RequestStep],
        block_table: Array,
        states: RequestStates,
        memory: DeviceMemory,
        padding: Padding,
        sampled_tokens: Tensor | None = None,
    ) -> StepInputs:
        """The inputs of `steps`, decodes first; copied to the device without synchronising.

        KV of tokens in registered blocks is not written again. `block_table`: [rows, blocks] of all rows.
        `sampled_tokens`: [steps] on the device, in place of the steps' tokens.
        """
        packing = _Packing.of(steps)
        values = _token_values(steps, packing)
        values |= self._kv_values(steps, packing, block_table)
        values |= self._state_values(steps, packing, states)
        values |= self._replay_values(steps, packing, states)
        shape = padding(packing.shape(values))
        layout = _Layout(packing, shape)
        values["row_query_start_loc"] = layout.query_start_loc()
        for name in ("kv_write_tokens", "logit_tokens"):
            values[name] = layout.padded_tokens(values[name])
        arrays = self._buffer.arrays(shape)
        for field in STEP_FIELDS:
            layout.fill(arrays[field.name], values[field.name], field)
        tensors, num_logits = self._buffer.send(shape), len(values["logit_tokens"])
        if sampled_tokens is not None:
            tensors["token_ids"][: len(sampled_tokens)].copy_(sampled_tokens)
        return self._inputs(shape, num_logits, tensors, memory)

    def _kv_values(
        self, steps: Sequence[RequestStep], packing: "_Packing", block_table: Array
    ) -> dict[str, Any]:
        size = self._block_size
        num_blocks = -(-max(packing.stops) // size)
        rows = [step.holding.row for step in steps]
        table = block_table[:, :num_blocks][rows].clip(min=0)  # cut first: whole rows are long
        registered = np.array([step.holding.path.num_registered * size for step in steps])
        writes = np.flatnonzero(packing.positions >= registered[packing.token_rows])
        written = packing.positions[writes]
        blocks = table[packing.token_rows[writes], written // size].astype(np.int64)
        return {
            "kv_lengths": packing.stops,
            "block_table": table,
            "query_lengths": packing.lengths,
            "kv_write_tokens": writes,
            "kv_write_positions": blocks * size + written % size,
        }

    def _state_values(
        self, steps: Sequence[RequestStep], packing: "_Packing", states: RequestStates
    ) -> dict[str, Any]:
        # Entries that are no checkpoints come last.
        inner = sorted(
            (
                (row, position, index, position in step.destinations)
                for row, step in enumerate(steps[packing.num_decodes :])
                for position, index in states.inner_destinations(step)
            ),
            key=lambda entry: not entry[3],
        )
        rows, slots = [row for row, *_ in inner], [slot for _, _, slot, _ in inner]
        count = sum(is_checkpoint for *_, is_checkpoint in inner)
        decodes, num_decode_tokens = packing.num_decodes, packing.num_decode_tokens
        grid = chunk_grid(
            packing.starts[decodes:],
            packing.lengths[decodes:],
            self._chunk_size,
            rows,
            [position for _, position, *_ in inner],
        )
        chunk_destinations = np.full(len(grid.seq_idx), -1)
        chunk_destinations[grid.checkpoint_chunks] = slots
        return {
            "state_destinations": [index for step in steps for index in states.destinations(step)],
            "state_sources": [
                step.holding.state_index if step.holding.num_computed else -1 for step in steps
            ],
            "query_start_loc": packing.query_start_loc[decodes:] - num_decode_tokens,
            "token_rows": grid.token_rows,
            "cu_chunk_seqlens": grid.cu_chunk_seqlens,
            "seq_idx": grid.seq_idx,
            "row_chunk_starts": grid.row_chunk_starts,
            "chunk_destinations": chunk_destinations,
            "checkpoint_rows": rows[:count],
            "checkpoint_token_ends": grid.checkpoint_token_ends[:count],
            "checkpoint_destinations": slots[:count],
        }

    def _replay_values(
        self, steps: Sequence[RequestStep], packing: "_Packing", states: RequestStates
    ) -> dict[str, Any]:
        decodes = packing.num_decodes
        if not self._replays:
            nothing = np.full(len(steps), -1)
            return {
                "replay_slots": nothing,
                "replay_starts": nothing,
                "replay_destinations": nothing,
                "tail_starts": nothing[decodes:],
            }
        starts, stops = np.array(packing.starts), np.array(packing.stops)
        tails = packing.query_start_loc[:-1] - packing.num_decode_tokens - starts
        tails += stops // self._chunk_size * self._chunk_size
        return {
            "replay_slots": [step.holding.row for step in steps],
            "replay_starts": starts,
            "replay_destinations": [states.completed_destination(step) for step in steps],
            "tail_starts": tails[decodes:],
        }

    def _inputs(
        self, shape: StepShape, num_logits: int, tensors: dict[str, Tensor], memory: DeviceMemory
    ) -> StepInputs:
        owned: dict[str, dict[str, Any]] = {"": {}, "chunks": {}, "checkpoints": {}, "replay": {}}
        for field in STEP_FIELDS:
            owned[field.owner][field.attribute or field.name] = tensors[field.name]
        return StepInputs(
            shape=shape,
            **owned[""],
            chunks=PrefillChunks(**owned["chunks"], chunk_size=self._chunk_size),
            checkpoints=Checkpoints(**owned["checkpoints"]),
            num_logits=num_logits,
            kv_cache=memory.kv_cache,
            state_pool=memory.state_pool,
            replay=Replay(memory.input_pool, **owned["replay"]) if self._replays else None,
            batch_invariant=self._batch_invariant,
        )


class _Packing(NamedTuple):
    """Where each request's tokens lie in the packed step, decode rows first."""

    starts: list[int]
    stops: list[int]
    lengths: Array
    query_start_loc: Array  # [rows + 1] where each row's tokens start; trailing total
    token_rows: Array  # [tokens] the row of each token
    positions: Array  # [tokens] in the token's sequence
    num_decodes: int
    num_decode_tokens: int

    @classmethod
    def of(cls, steps: Sequence[RequestStep]) -> "_Packing":
        starts, stops = [step.start for step in steps], [step.stop for step in steps]
        lengths = np.subtract(stops, starts)
        query_start_loc = np.zeros(len(steps) + 1, np.int64)
        lengths.cumsum(out=query_start_loc[1:])
        token_rows = np.arange(len(steps)).repeat(lengths)
        positions = np.arange(len(token_rows)) + (starts - query_start_loc[:-1])[token_rows]
        decodes = sum(step.decoding for step in steps)
        decode_tokens = int(query_start_loc[decodes])
        return cls(starts, stops, lengths, query_start_loc, token_rows, positions, decodes, decode_tokens)

    @property
    def num_prefills(self) -> int:
        return len(self.starts) - self.num_decodes

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
            chunks=len(values["seq_idx"]),
            checkpoints=len(values["checkpoint_rows"]),
            logits=len(values["logit_tokens"]),
            decode_tokens=int(self.lengths[:decodes].max()) if drafts else 1,
        )


def _token_values(steps: Sequence[RequestStep], packing: _Packing) -> dict[str, Any]:
    token_ids = chain.from_iterable(step.tokens for step in steps)
    logits = [
        first + position - step.start
        for first, step in zip(packing.query_start_loc[:-1].tolist(), steps, strict=True)
        for position in step.logit_positions
    ]
    return {
        "token_ids": np.fromiter(token_ids, np.int64, len(packing.positions)),
        "positions": packing.positions,
        "logit_tokens": np.array(logits, np.int64),
    }


class _Layout:
    """Where the values of a packed step go in arrays that are padded to a shape."""

    def __init__(self, packing: _Packing, shape: StepShape) -> None:
        self._packing = packing
        self._shape = shape
        self._token_places = self._places_of_tokens()

    def _places_of_tokens(self) -> Array | None:
        """[tokens]: each token's place once all decode rows are equally long; None where no token moves."""
        packing, shape = self._packing, self._shape
        total, decode_tokens = len(packing.token_rows), packing.num_decode_tokens
        if shape.tokens == total:
            return None
        places = np.arange(total)
        places[decode_tokens:] += shape.decodes * shape.decode_tokens - decode_tokens
        if shape.decode_tokens > 1:
            rows = packing.token_rows[:decode_tokens]
            places[:decode_tokens] += rows * shape.decode_tokens - packing.query_start_loc[rows]
        return places

    def padded_tokens(self, tokens: Array) -> Array:
        """The places in the padded step of the packed `tokens`."""
        return tokens if self._token_places is None else self._token_places[tokens]

    def query_start_loc(self) -> Array:
        """The place of each row's first token in the padded step, for padding rows too."""
        packing, shape = self._packing, self._shape
        width = shape.decode_tokens
        moved = shape.decodes * width - packing.num_decode_tokens
        decodes = np.arange(0, shape.decodes * width, width)
        return np.concatenate([decodes, packing.query_start_loc[packing.num_decodes :] + moved])

    def fill(self, array: Array, values: Sequence[int] | Array, field: StepField) -> None:
        """Write a field's values into its array, and padding into the rest."""
        if array.shape == np.shape(values):
            array[:] = values
            return
        padding: Any = values[-1] if field.padding is None else field.padding
        if field.layout == "front":
            array[: len(values)] = values
            array[len(values) :] = padding
            return
        array.fill(padding)
        if field.layout == "rows":
            self._fill_rows(array, values)
        else:
            array[self._places(field, len(values))] = values

    def _fill_rows(self, array: Array, values: Any) -> None:
        """Write decode rows first, then prefill rows after the decode rows and their padding."""
        decodes, first, prefills = self._packing.num_decodes, self._shape.decodes, self._packing.num_prefills
        columns = tuple(slice(size) for size in np.shape(values)[1:])
        array[(slice(decodes), *columns)] = values[:decodes]
        array[(slice(first, first + prefills), *columns)] = values[decodes:]

    def _places(self, field: StepField, count: int) -> Array:
        tokens: Array = np.arange(
            self._packing.num_decode_tokens if field.layout == "state_writes" else count
        )
        if self._token_places is not None:
            tokens = self._token_places[: len(tokens)]
        if field.layout == "tokens":
            return tokens
        first = self._shape.decodes * self._shape.decode_tokens
        return np.append(tokens, np.arange(self._packing.num_prefills) + first)
