"""A stream of copies on a CPU that does its work as late as it may: when it is waited for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any
from unittest.mock import patch

import torch
from mambaslots.inference.contexts import tier_copies as host_copies
from mambaslots.inference.contexts.tier_copies import HostCopies


class LateEvent:
    """What a stream had to do when the event was recorded."""

    def __init__(self, stream: "LateStream | None", position: int) -> None:
        self.stream, self.position = stream, position

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.advance(self.position)


class LateStream:
    """The stream beside a step's.

    Attributes:
        waiting: what is still to be done, the first one first.
        num_late: copies that were made when they were waited for.
    """

    def __init__(self) -> None:
        self.waiting: list[Callable[[], object]] = []
        self.num_done = 0
        self.num_late = 0
        self._lock = RLock()  # the thread that writes files waits, too

    def launch(self, work: Callable[[], object]) -> None:
        with self._lock:
            self.waiting.append(work)

    def advance(self, position: int) -> None:
        with self._lock:
            while self.num_done < position:
                self.num_done += 1
                self.num_late += 1
                self.waiting.pop(0)()

    def record_event(self) -> LateEvent:
        with self._lock:
            return LateEvent(self, self.num_done + len(self.waiting))

    def wait_event(self, event: LateEvent) -> None:
        """For the step's stream, which is never late."""

    def wait_stream(self, stream: object) -> None:
        """For the step's stream, which is never late."""

    def synchronize(self) -> None:
        with self._lock:
            self.advance(self.num_done + len(self.waiting))


class StepStream:
    """The stream of steps: each launch is done at once, after what it was made to wait for."""

    def wait_event(self, event: LateEvent) -> None:
        event.synchronize()

    def wait_stream(self, stream: LateStream) -> None:
        stream.synchronize()

    def record_event(self) -> LateEvent:
        return LateEvent(None, 0)


@contextmanager
def late_copies() -> Iterator[list[LateStream]]:
    """Engines that are built within it copy states to host memory on a late stream; yields these."""
    streams: list[LateStream] = []

    def new_stream(device: torch.device) -> Any:
        streams.append(LateStream())
        return streams[-1]

    @contextmanager
    def current(stream: object) -> Iterator[None]:
        yield

    keep, bring, step = HostCopies._copy_to_host, HostCopies._copy_back, StepStream()

    def late_keep(self: Any, row: torch.Tensor, host_slot: int, serial: int) -> None:
        self._stream.launch(lambda: keep(self, row, host_slot, serial))

    def late_bring(self: Any, row: torch.Tensor, host_slot: int, serial: int) -> bool:
        self._stream.synchronize()  # the answer is read: everything before it is done
        return bring(self, row, host_slot, serial)

    with (
        patch.object(host_copies, "_new_stream", new_stream),
        patch.object(host_copies, "_pin", lambda rows: None),
        patch.object(host_copies, "_unpin", lambda rows, stream: None),
        patch.object(HostCopies, "_copy_to_host", late_keep),
        patch.object(HostCopies, "_copy_back", late_bring),
        patch.object(torch.cuda, "current_stream", lambda device: step),
        patch.object(torch.cuda, "stream", current),
        patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor),
    ):
        yield streams
