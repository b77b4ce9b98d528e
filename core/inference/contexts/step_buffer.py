"""The one list of a step's index tensors, and the one buffer in which they cross to the device."""

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .step_inputs import StepShape

Layout = Literal["front", "tokens", "rows", "state_writes"]
"""Where the values lie in a tensor that is padded:

front: one after another, then padding.
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


_MAX_CACHED_VIEWS = 256
Array = npt.NDArray[np.integer[Any]]


class StepBuffer:
    """Holds the index tensors of one step at offsets that follow from the step's shape.

    On a GPU there are two pinned host buffers, in turn, and one device buffer that never moves:

        host 0   | token_ids | positions | ... | checkpoints |      steps 0, 2, 4, ...
        host 1   | token_ids | positions | ... | checkpoints |      steps 1, 3, 5, ...
        device   | token_ids | positions | ... | checkpoints |      what the kernels of every step read

    `arrays` waits for the buffer's last copy; `send` copies without waiting, in stream order after the
    kernels of the previous step. On a CPU the tensors are the host buffer itself, overwritten two steps
    later.
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
        self._arrays: dict[tuple[int, StepShape], dict[str, Array]] = {}
        self._tensors: dict[tuple[int, StepShape], dict[str, Tensor]] = {}

    def arrays(self, shape: StepShape) -> dict[str, Array]:
        """The host arrays of the next step, by name, for the caller to fill; their contents are stale."""
        self._turn ^= 1
        if self._copied:
            self._copied[self._turn].synchronize()
        key = self._turn, shape
        if key not in self._arrays:
            _make_room(self._arrays)
            self._arrays[key] = {name: view.numpy() for name, view in _views(self._hosts[self._turn], shape)}
        return self._arrays[key]

    def send(self, shape: StepShape) -> dict[str, Tensor]:
        """Copy the arrays filled last to the device, without synchronising; returns the tensors by name."""
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


def _words(count: int, int32: bool) -> int:
    """int64 words of `count` numbers, rounded up to even: each field starts at a multiple of 16 bytes."""
    return 2 * (-(-count // 4) if int32 else -(-count // 2))


def _total_words(shape: StepShape) -> int:
    return sum(_words(field.size(shape), field.int32) for field in STEP_FIELDS)


def _views(buffer: Tensor, shape: StepShape) -> Iterator[tuple[str, Tensor]]:
    needed = _total_words(shape)
    if needed > buffer.shape[0]:
        raise ValueError(f"shape is {shape}, {needed} words; accepted: at most {buffer.shape[0]}")
    start = 0
    int32_buffer = buffer.view(torch.int32)
    for field in STEP_FIELDS:
        count = field.size(shape)
        view = int32_buffer[2 * start : 2 * start + count] if field.int32 else buffer[start : start + count]
        yield field.name, view.view(shape.rows, shape.table_blocks) if field.name == "block_table" else view
        start += _words(count, field.int32)


def _make_room(views: dict[tuple[int, StepShape], Any]) -> None:
    if len(views) >= _MAX_CACHED_VIEWS:
        views.clear()
