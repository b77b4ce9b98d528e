"""A communicator of NCCL that a thread aborts while another one asks it, without a GPU."""

import threading

import pytest
from mambaslots.net.transfer import pipe
from mambaslots.net.transfer.format import TransferError
from mambaslots.net.transfer.pipe import AbortableCommunicator


class Communicator:
    """Stops in a call until it is let go; notes an abort that came meanwhile."""

    def __init__(self) -> None:
        self.asked, self.go_on = threading.Event(), threading.Event()
        self.is_asked = False
        self.aborts: list[bool] = []

    def get_async_error(self) -> int:
        self.is_asked = True
        self.asked.set()
        self.go_on.wait()
        self.is_asked = False
        return 7

    def abort(self) -> None:
        self.aborts.append(self.is_asked)


def test_an_abort_waits_for_the_call_under_way_and_nothing_is_asked_behind_it() -> None:
    inner = Communicator()
    shared = AbortableCommunicator(inner)
    asking = threading.Thread(target=shared.call, args=[lambda comm: comm.get_async_error()])
    asking.start()
    inner.asked.wait()
    aborting = threading.Thread(target=shared.abort)
    aborting.start()
    inner.go_on.set()
    for thread in (asking, aborting):
        thread.join()
    assert inner.aborts == [False]
    with pytest.raises(TransferError, match="given up"):
        shared.call(lambda comm: comm.get_async_error())
    shared.abort()
    assert inner.aborts == [False]


def test_a_call_that_blocks_prevents_no_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipe, "_CALL_S", 0.01)
    inner = Communicator()
    shared = AbortableCommunicator(inner)
    asking = threading.Thread(target=shared.call, args=[lambda comm: comm.get_async_error()])
    asking.start()
    inner.asked.wait()
    shared.abort()
    assert inner.aborts == [True]
    inner.go_on.set()
    asking.join()
