"""Builds the tensors that a model reads in a step, in the one buffer in which they cross to the device."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...config import InferenceConfig
from ...validation import ceil_div
from ..kernels.chunk_grid import chunk_grid
from .device_memory import DeviceMemory
from .dynamic_request import Batch
from .padding import Padding
from .request_states import RequestStates
from .step_inputs import INDEX_FIELDS, Checkpoints, IndexField, PrefillChunks, Replay, StepInputs, StepShape

_MAX_CACHED_VIEWS = 256
Array = npt.NDArray[np.integer[Any]]


class StepBuffer:
    """Holds the index tensors of one step at offsets that follow from the step's shape.

    On a GPU there are two pinned host buffers, in turn, and one device buffer that never moves. `arrays`
    waits for the buffer's last copy; `send` copies without waiting. On a CPU the tensors are the host buffer
    itself.
    """

    def __init__(self, largest: StepShape, device: torch.device) -> None:
        """`largest`: upper bounds of all sizes."""
        words = _total_words(largest)
        pinned = device.type == "cuda"
        with torch.inference_mode(False):  # others than inference tensors can be written anywhere
            self._hosts = [
                torch.zeros(words, dtype=torch.int64, device="cpu", pin_memory=pinned) for _ in range(2)
            ]
            self._device = torch.zeros(words, dtype=torch.int64, device=device) if pinned else None
        self._copied: list[torch.cuda.Event] = []
        if pinned:
            self._copied = [torch.cuda.Event() for _ in self._hosts]  # type: ignore[no-untyped-call]
        self._turn = 0
        cached = lru_cache(_MAX_CACHED_VIEWS)
        self._arrays = [
            cached(lambda shape, host=host: {name: view.numpy() for name, view in _views(host, shape)})
            for host in self._hosts
        ]
        buffers = self._hosts if self._device is None else [self._device]
        self._tensors = [cached(lambda shape, words=buffer: dict(_views(words, shape))) for buffer in buffers]

    def arrays(self, shape: StepShape) -> dict[str, Array]:
        """The host arrays of the next step, by name, for the caller to fill; their contents are stale."""
        self._turn ^= 1
        if self._copied:
            self._copied[self._turn].synchronize()
        return self._arrays[self._turn](shape)

    def send(self, shape: StepShape) -> dict[str, Tensor]:
        """Copy the arrays filled last to the device, without synchronising; returns the tensors by name."""
        if self._device is not None:
            words = _total_words(shape)
            self._device[:words].copy_(self._hosts[self._turn][:words], non_blocking=True)
            self._copied[self._turn].record(torch.cuda.current_stream(self._device.device))
        return self._tensors[self._turn % len(self._tensors)](shape)


def _words(count: int, int32: bool) -> int:
    """int64 words of `count` numbers, rounded up to even: each field starts at a multiple of 16 bytes."""
    return 2 * ceil_div(count, 4 if int32 else 2)


def _total_words(shape: StepShape) -> int:
    return sum(_words(field.num_entries(shape), field.int32) for field in INDEX_FIELDS)


def _views(buffer: Tensor, shape: StepShape) -> Iterator[tuple[str, Tensor]]:
    num_words = _total_words(shape)
    if num_words > buffer.shape[0]:
        raise ValueError(f"shape is {shape}, {num_words} words; accepted: at most {buffer.shape[0]}")
    start = 0
    int32_buffer = buffer.view(torch.int32)
    for field in INDEX_FIELDS:
        count = field.num_entries(shape)
        view = int32_buffer[2 * start : 2 * start + count] if field.int32 else buffer[start : start + count]
        yield field.key, view.view(shape.rows, getattr(shape, field.columns)) if field.columns else view
        start += _words(count, field.int32)


class StepBuilder:
    """Fills the step buffer for one step after another, and sends it to the device."""

    def __init__(
        self,
        buffer: StepBuffer,
        config: InferenceConfig,
        chunk_size: int,
        request_states: RequestStates,
        memory: DeviceMemory,
    ) -> None:
        self._buffer = buffer
        self._config = config
        self._replays = config.replays
        self._chunk_size = chunk_size
        self._request_states = request_states
        self._memory = memory

    def build(
        self, batch: Batch, block_table: Array, input_table: Array, padding: Padding,
        unread_tokens: Tensor | None = None,
    ) -> StepInputs:  # fmt: skip
        """The inputs of `batch`, decodes first; not synchronised. KV of registered blocks is not written."""
        layout = _Layout(batch)
        values = self._token_values(batch, layout, block_table) | self._state_values(batch, layout)
        if self._replays:
            values |= self._replay_values(batch, layout, input_table)
        shape = padding(layout.shape(values))
        padded = _PaddedLayout(layout, shape)
        values["query_start_loc"] = padded.query_start_loc
        for name in ("kv_write_tokens", "logit_tokens"):
            values[name] = padded.tokens[values[name]]
        arrays = self._buffer.arrays(shape)
        for field in INDEX_FIELDS:
            if field.key in values:
                padded.fill(arrays[field.key], values[field.key], field)
        tensors = self._buffer.send(shape)
        if unread_tokens is not None:
            tensors["token_ids"][: len(unread_tokens)].copy_(unread_tokens)
        return self._inputs(shape, len(values["logit_tokens"]), tensors)

    def _token_values(self, batch: Batch, layout: "_Layout", block_table: Array) -> dict[str, Any]:
        size = self._config.block_size_tokens
        num_blocks = ceil_div(max(layout.stops), size)
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
                for position, index in self._request_states.inner_destinations(scheduled)
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
                index for scheduled in batch for index in self._request_states.destinations(scheduled)
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

    def _replay_values(self, batch: Batch, layout: "_Layout", input_table: Array) -> dict[str, Any]:
        rows = [scheduled.allocation.row for scheduled in batch]
        starts, stops = np.array(layout.starts), np.array(layout.stops)
        tails = layout.query_start_loc[:-1] - layout.num_decode_tokens - starts
        tails += stops // self._chunk_size * self._chunk_size
        return {
            "replay.input_rows": rows,
            "replay.input_blocks": input_table[rows],
            "replay.starts": starts,
            "replay.destinations": [
                self._request_states.completed_destination(scheduled) for scheduled in batch
            ],
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
            batch_invariant=bool(self._config.batch_invariant),
        )


class _Layout:
    """Where each request's tokens lie in the packed step, decode rows first."""

    def __init__(self, batch: Batch) -> None:
        self.starts = [scheduled.start for scheduled in batch]
        self.stops = [scheduled.stop for scheduled in batch]
        self.lengths = np.subtract(self.stops, self.starts)
        self.query_start_loc = np.zeros(len(batch) + 1, np.int64)  # with a trailing total
        self.lengths.cumsum(out=self.query_start_loc[1:])
        self.token_rows = np.arange(len(batch)).repeat(self.lengths)
        self.positions = np.arange(len(self.token_rows))
        self.positions += (self.starts - self.query_start_loc[:-1])[self.token_rows]
        self.num_decodes = sum(scheduled.decoding for scheduled in batch)
        self.num_decode_tokens = int(self.query_start_loc[self.num_decodes])
        self.num_prefills = len(batch) - self.num_decodes

    def shape(self, values: dict[str, Any]) -> StepShape:
        """The step's sizes without padding."""
        decodes = self.num_decodes
        drafts = self.num_decode_tokens > decodes
        input_blocks = values.get("replay.input_blocks", np.empty((0, 0)))
        return StepShape(
            decodes=decodes,
            prefills=self.num_prefills,
            prefill_tokens=len(self.positions) - self.num_decode_tokens,
            max_query_tokens=int(max(self.lengths[decodes:], default=0)),
            block_columns=values["block_table"].shape[1],
            kv_writes=len(values["kv_write_tokens"]),
            chunks=len(values["chunks.seq_idx"]),
            checkpoints=len(values["checkpoints.rows"]),
            logits=len(values["logit_tokens"]),
            decode_tokens=int(self.lengths[:decodes].max()) if drafts else 1,
            input_block_columns=input_blocks.shape[1],
        )


class _PaddedLayout:
    """Where the rows and tokens of a layout lie in a step of `shape`, which is at least as large."""

    def __init__(self, layout: _Layout, shape: StepShape) -> None:
        decodes, num_decode_tokens = layout.num_decodes, shape.decodes * shape.decode_tokens
        decode_starts = np.arange(0, num_decode_tokens, shape.decode_tokens)
        moved = num_decode_tokens - layout.num_decode_tokens
        self.query_start_loc = np.append(decode_starts, layout.query_start_loc[decodes:] + moved)
        prefills = np.arange(layout.num_prefills)
        rows = np.append(np.arange(decodes), shape.decodes + prefills)
        self.tokens = np.arange(len(layout.token_rows))
        self.tokens += (self.query_start_loc[rows] - layout.query_start_loc[:-1])[layout.token_rows]
        writes = np.append(self.tokens[: layout.num_decode_tokens], num_decode_tokens + prefills)
        self._places = {"tokens": self.tokens, "rows": rows, "state_writes": writes}

    def fill(self, array: Array, values: Sequence[int] | Array, field: IndexField) -> None:
        """Write a field's values into its array, and padding into the rest."""
        if array.shape == np.shape(values):
            array[:] = values
            return
        padding: Any = values[-1] if field.padding is None else field.padding
        array.fill(padding)
        in_order = slice(len(values))
        places = in_order if field.padding is None else self._places.get(field.size, in_order)
        columns = (slice(size) for size in np.shape(values)[1:])
        array[(places, *columns)] = values
