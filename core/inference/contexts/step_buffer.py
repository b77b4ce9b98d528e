"""The one buffer in which a step's metadata crosses to the device."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .step_inputs import Checkpoints, PrefillChunks, StepShape

_VIEWS_KEPT = 256
Array = npt.NDArray[np.integer[Any]]


class StepBuffer:
    """Holds the index tensors of one step, side by side, at offsets that follow from the step's shape.

    On a GPU there are two pinned host buffers, in turn, and one device buffer that never moves:

        host 0   | token_ids | positions | ... | checkpoints |      steps 0, 2, 4, ...
        host 1   | token_ids | positions | ... | checkpoints |      steps 1, 3, 5, ...
        device   | token_ids | positions | ... | checkpoints |      what the kernels of every step read

    `arrays` gives out a host buffer once its last copy is over; `send` copies it, without waiting. The device
    buffer is overwritten in stream order: after the kernels of the step before. On a CPU the tensors are the
    host buffer itself, so those of a step live until the next but one is filled.
    """

    def __init__(self, most: StepShape, device: torch.device) -> None:
        """`most`: every size at its largest."""
        words = _total_words(most)
        pinned = device.type == "cuda"
        self._hosts = [torch.zeros(words, dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
        self._device = torch.zeros(words, dtype=torch.int64, device=device) if pinned else None
        self._copied: list[torch.cuda.Event] = []
        if pinned:
            self._copied = [torch.cuda.Event() for _ in self._hosts]  # type: ignore[no-untyped-call]
        self._turn = 0
        self._arrays: dict[tuple[int, StepShape], dict[str, Array]] = {}
        self._tensors: dict[tuple[int, StepShape], dict[str, Tensor]] = {}

    def arrays(self, shape: StepShape) -> dict[str, Array]:
        """The host's arrays of the next step, by name, to be filled; what they hold is stale.

        Waits until the step before the last has crossed, which it has where its tokens were read.
        """
        self._turn ^= 1
        if self._copied:
            self._copied[self._turn].synchronize()
        key = self._turn, shape
        if key not in self._arrays:
            _make_room(self._arrays)
            self._arrays[key] = {name: view.numpy() for name, view in _views(self._hosts[self._turn], shape)}
        return self._arrays[key]

    def send(self, shape: StepShape) -> dict[str, Tensor]:
        """The tensors on the device, by name, of what was filled in last; one copy, no synchronisation."""
        host = self._hosts[self._turn]
        if self._device is None:
            key, tensors = (self._turn, shape), host
        else:
            words = _total_words(shape)
            self._device[:words].copy_(host[:words], non_blocking=True)
            self._copied[self._turn].record(torch.cuda.current_stream(self._device.device))
            key, tensors = (0, shape), self._device
        if key not in self._tensors:
            _make_room(self._tensors)
            self._tensors[key] = dict(_views(tensors, shape))
        return self._tensors[key]


def prefill_chunks(tensors: dict[str, Tensor]) -> PrefillChunks:
    return PrefillChunks(
        query_start_loc=tensors["query_start_loc"],
        token_rows=tensors["token_rows"],
        cu_chunk_seqlens=tensors["cu_chunk_seqlens"],
        seq_idx=tensors["seq_idx"],
        row_chunk_starts=tensors["row_chunk_starts"],
        destinations=tensors["chunk_destinations"],
    )


def checkpoints(tensors: dict[str, Tensor]) -> Checkpoints:
    return Checkpoints(
        rows=tensors["checkpoint_rows"],
        token_ends=tensors["checkpoint_token_ends"],
        destinations=tensors["checkpoint_destinations"],
    )


def _fields(shape: StepShape) -> tuple[tuple[str, int, bool], ...]:
    """(name, numbers, whether they are int32 and not int64), in the order of the buffer."""
    rows, prefills = shape.rows, shape.prefills
    return (
        ("token_ids", shape.tokens, False),
        ("positions", shape.tokens, False),
        ("kv_write_tokens", shape.kv_writes, False),
        ("kv_write_positions", shape.kv_writes, False),
        ("kv_lengths", rows, False),
        ("block_table", rows * shape.table_blocks, False),
        ("state_sources", rows, False),
        ("state_destinations", shape.state_writes, False),
        ("logit_tokens", shape.logits, False),
        ("query_start_loc", prefills + 1, False),
        ("token_rows", shape.prefill_tokens, False),
        ("cu_chunk_seqlens", shape.chunks + 1, True),
        ("seq_idx", shape.chunks, True),
        ("row_chunk_starts", prefills + 1, True),
        ("chunk_destinations", shape.chunks, False),
        ("checkpoint_rows", shape.checkpoints, False),
        ("checkpoint_token_ends", shape.checkpoints, False),
        ("checkpoint_destinations", shape.checkpoints, False),
    )


def _words(numbers: int, narrow: bool) -> int:
    """int64 words that a field takes, an even number: each starts at a multiple of 16 bytes."""
    return 2 * (-(-numbers // 4) if narrow else -(-numbers // 2))


def _total_words(shape: StepShape) -> int:
    return sum(_words(numbers, narrow) for _, numbers, narrow in _fields(shape))


def _views(buffer: Tensor, shape: StepShape) -> Iterator[tuple[str, Tensor]]:
    needed = _total_words(shape)
    if needed > buffer.shape[0]:
        raise ValueError(f"shape is {shape}, {needed} words; accepted: at most {buffer.shape[0]}")
    start = 0
    narrow_buffer = buffer.view(torch.int32)
    for name, numbers, narrow in _fields(shape):
        of, first = (narrow_buffer, 2 * start) if narrow else (buffer, start)
        view = of[first : first + numbers]
        yield name, view.view(shape.rows, shape.table_blocks) if name == "block_table" else view
        start += _words(numbers, narrow)


def _make_room(views: dict[tuple[int, StepShape], Any]) -> None:
    if len(views) >= _VIEWS_KEPT:
        views.clear()
