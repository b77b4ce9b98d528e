"""The one buffer in which the index tensors of a step cross to the device."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .step_inputs import INDEX_FIELDS, StepShape

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
        self._tensors = [cached(lambda shape, own=buffer: dict(_views(own, shape))) for buffer in buffers]

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
    return 2 * (-(-count // 4) if int32 else -(-count // 2))


def _total_words(shape: StepShape) -> int:
    return sum(_words(field.num_entries(shape), field.int32) for field in INDEX_FIELDS)


def _views(buffer: Tensor, shape: StepShape) -> Iterator[tuple[str, Tensor]]:
    needed = _total_words(shape)
    if needed > buffer.shape[0]:
        raise ValueError(f"shape is {shape}, {needed} words; accepted: at most {buffer.shape[0]}")
    start = 0
    int32_buffer = buffer.view(torch.int32)
    for field in INDEX_FIELDS:
        count = field.num_entries(shape)
        view = int32_buffer[2 * start : 2 * start + count] if field.int32 else buffer[start : start + count]
        yield field.key, view.view(shape.rows, getattr(shape, field.columns)) if field.columns else view
        start += _words(count, field.int32)
