"""A thread for calls that no signal may stop half-way."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import cast

import torch

_LOOKING_S = 0.5


class OwnThread:
    """Makes calls for the main thread, in which alone Python handles signals.

    An exception out of a signal handler, such as Control-C, reaches the caller when its call has ended. A
    second one reaches the caller at once, and the call goes on: later calls wait for it. What torch keeps for
    each thread (autocast, the current stream, a default device) does not hold in this thread.
    """

    def __init__(self, device: torch.device) -> None:
        """`device`: the current one of the thread."""
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=_work, args=(self._jobs, device), name="mambaslots-lockstep", daemon=True
        )
        self._thread.start()

    def run[T](self, call: Callable[[], T]) -> T:
        """What the call returns or raises. In another thread than the main one the call is made there."""
        if threading.current_thread() is not threading.main_thread() or not self._thread.is_alive():
            return call()
        job = _Job(call)
        interrupt: BaseException | None = None
        while True:
            try:
                self._jobs.put(job)  # again after an interrupt; the thread makes a call once
                while not job.ended.wait(_LOOKING_S):
                    if not self._thread.is_alive():  # it was closed
                        job.make()
                break
            except BaseException as error:
                if interrupt is not None:
                    raise
                interrupt = error
        if interrupt is not None:
            raise interrupt
        if job.error is not None:
            try:
                raise job.error
            finally:
                del job  # it refers to the error, whose traceback refers to this frame
        return cast(T, job.value)

    def close(self) -> None:
        """End the thread after the call under way."""
        self._jobs.put(None)


class _Job:
    def __init__(self, call: Callable[[], object]) -> None:
        self.call: Callable[[], object] | None = call
        self.value: object = None
        self.error: BaseException | None = None
        self.ended = threading.Event()

    def make(self) -> None:
        call, self.call = self.call, None
        if call is None:
            return
        try:
            self.value = call()
        except BaseException as error:
            self.error = error
        finally:
            self.ended.set()


def _work(jobs: "SimpleQueue[_Job | None]", device: torch.device) -> None:
    """The thread: it refers to no engine between two calls."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    while (job := jobs.get()) is not None:
        job.make()
        del job
