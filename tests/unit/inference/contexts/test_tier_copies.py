"""A copy that fails midway is ordered before whatever uses its memory next."""

from contextlib import contextmanager
from typing import Any

import pytest
import torch
from mambaslots.inference.contexts import tier_copies as host_copies
from mambaslots.inference.contexts.tier_copies import NUM_STAGED, HostCopies

CPU = torch.device("cpu")
BYTES = 64


class Stream:
    """What a CUDA stream would be asked to wait for."""

    def __init__(self) -> None:
        self.waited_for: list[object] = []

    def wait_stream(self, stream: object) -> None:
        self.waited_for.append(stream)

    def wait_event(self, event: object) -> None:
        self.waited_for.append(event)

    def record_event(self) -> tuple[object, object]:
        return self, object()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> tuple[Stream, Stream]:
    """The step's stream, and that of the copies."""
    step, side = Stream(), Stream()

    @contextmanager
    def current(stream: object) -> Any:
        yield

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: step)
    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr(host_copies, "_new_stream", lambda device: side)
    monkeypatch.setattr(host_copies, "_pin", lambda rows: None)
    monkeypatch.setattr(host_copies, "_unpin", lambda rows, stream: None)
    return step, side


def failing(error: BaseException) -> Any:
    def checksum(row: torch.Tensor, seed: int) -> torch.Tensor:
        raise error

    return checksum


ERRORS = [torch.OutOfMemoryError("no room for a checksum"), KeyboardInterrupt()]


@pytest.mark.parametrize("error", ERRORS, ids=["memory", "interrupt"])
def test_a_step_waits_for_the_copy_of_a_fetch_that_failed(
    streams: tuple[Stream, Stream], error: BaseException
) -> None:
    step, side = streams
    memory = torch.zeros(2, BYTES, dtype=torch.uint8)
    copies = HostCopies(2, BYTES, memory.__getitem__, CPU)
    copies.store(0, 0, 1)
    step.waited_for.clear()
    copies._checksum = failing(error)  # type: ignore[assignment]
    with pytest.raises(type(error)):
        copies.fetch(0, 1, 1)
    assert step.waited_for == [side]


@pytest.mark.parametrize("error", ERRORS, ids=["memory", "interrupt"])
def test_the_next_state_waits_for_the_copy_of_a_store_that_failed(
    streams: tuple[Stream, Stream], error: BaseException
) -> None:
    step, side = streams
    memory = torch.zeros(2, BYTES, dtype=torch.uint8)
    copies = HostCopies(4, BYTES, memory.__getitem__, CPU)
    checksum, copies._checksum = copies._checksum, failing(error)  # type: ignore[assignment]
    with pytest.raises(type(error)):
        copies.store(0, 0, 1)
    copies._checksum = checksum
    for number in range(1, NUM_STAGED):
        copies.store(0, number, number + 1)
    assert not step.waited_for
    copies.store(0, 0, 9)  # in the place of the one that failed
    ((stream, _),) = step.waited_for  # type: ignore[misc]
    assert stream is side
