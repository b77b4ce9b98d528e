"""Makes the calls of an engine on all ranks of its model, on this rank and on those that follow."""

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from queue import SimpleQueue
from typing import cast

import torch

from ...errors import KVBlockCapacityError, MambaSlotCapacityError
from ...inference.engines.engine_state import EngineState
from ..heartbeat import Heartbeat, RankDiedError
from .followers import Followers
from .messages import CLOSE, Outcome, call_message

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


_CAPACITY = (KVBlockCapacityError, MambaSlotCapacityError)
_DEATH_S = 0.5
"""A process that died ends its connection so soon after its collectives."""
_CLOSING_S = 10.0


class LeaderCalls:
    """The calls of a leading rank: tells the followers of each call, and makes the call here.

    Before a call in which ranks wait for each other, a step, all followers have come to the end of the calls
    before. A follower on which one of them ended otherwise than here would not come to the step: then the
    engine is broken.

    A request that is added from inside a step waits for the step's end: followers hear of it then.
    """

    def __init__(
        self, followers: Followers, state: EngineState, device: torch.device, heartbeat: Heartbeat | None
    ) -> None:
        """
        Args:
            followers: who is told.
            state: of this rank's engine.
            device: of this rank's model.
            heartbeat: names ranks that die during a call; None where nobody watches them.
        """
        self._followers = followers
        self._state = state
        self._heartbeat = heartbeat
        self._thread = OwnThread(device)
        self._lock = threading.Lock()
        self._late: deque[tuple[Callable[[], object], tuple[object, ...]]] = deque()
        self._making_in: int | None = None  # the thread that makes a call now
        self.caller = threading.current_thread()  # of the last call
        self._runs_on_all = False
        self._closed = threading.Event()

    def closer(self) -> Callable[[], None]:
        """A function that ends the followers; it refers to no engine. A second call of it does nothing."""
        return partial(_close, self._closed, self._lock, self._followers, self._thread)

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    @property
    def is_running_on_all(self) -> bool:
        """Whether all ranks are in a function of `run`, and make calls each by itself."""
        return self._runs_on_all

    @property
    def may_end_requests(self) -> bool:
        inside = self._runs_on_all or self._making_in is not None
        return not (inside or self._closed.is_set() or self._followers.lost)

    def check_changes(self) -> None:
        if not self._runs_on_all and self._making_in is None:
            raise RuntimeError(
                "a LeadingEngine is about to change on this rank alone; call the function that changes it "
                "through `call_on_all`"
            )

    def make[T](self, name: str, change: Callable[[], T], *told: object) -> T:
        if self._runs_on_all:
            return change()
        self.caller = threading.current_thread()
        if self._making_in == threading.get_ident():
            if name != "add":
                raise RuntimeError(f"{name} is called from inside a step; call it between steps")
            self._late.append((change, told))
            return cast(T, None)
        return self._thread.run(partial(self._make, name, change, told))

    def run[T](self, change: Callable[[], T], loaded: bytes, ids: tuple[int, int]) -> T:
        """Let all ranks make a call of any function.

        Args:
            change: calls the function here.
            loaded: the pickle of the function and its arguments.
            ids: as for `FollowedCalls.run`.

        Returns:
            What the function returns here.

        Raises:
            ValueError: a follower cannot read `loaded`; nothing was called.
            RuntimeError: the function returned here, and raised on another rank.
            Exception: what the function raised here.
        """
        return self._thread.run(partial(self._run, change, loaded, ids))

    # ---- in the thread that makes the calls

    def _make[T](self, name: str, change: Callable[[], T], told: tuple[object, ...]) -> T:
        with self._lock:
            try:
                if name == "reset":
                    return self._reset(change, told)
                if name == "step":
                    self._await_followers()
                return self._lead(name, change, told)
            finally:
                while self._late:
                    self._lead("add", *self._late.popleft())

    def _reset[T](self, change: Callable[[], T], told: tuple[object, ...]) -> T:
        self._check_open()
        self._await_ends()
        self._followers.forget()
        value = self._lead("reset", change, told)
        self._await_followers()
        return value

    def _run[T](self, change: Callable[[], T], loaded: bytes, ids: tuple[int, int]) -> T:
        with self._lock:
            self._await_followers()
            self._lead("load", lambda: None, (loaded,))
            refusals = self._await_ends()
            if refusals:
                raise ValueError(f"a rank cannot read the function and its arguments: {'; '.join(refusals)}")
            self._followers.tell(call_message("run", (ids,)))
            error: Exception | None = None
            self._runs_on_all = True
            try:
                value = change()
            except Exception as raised:
                error = raised
            except BaseException as raised:
                self._state.note_failure(raised)
                raise
            finally:
                self._runs_on_all = False
                self._followers.note_own(Outcome.of(error, self._state.broken_by is not None))
            self._followers.await_answers(None)
            self._followers.check_lives()
            differences = self._followers.differences()
            if self._followers.any_broken:
                self._state.note_failure(error or RuntimeError("; ".join(differences)))
            if error is not None:
                raise error
            if differences:
                raise RuntimeError(f"a call was not made on all ranks: {'; '.join(differences)}")
            return value

    def _lead[T](self, name: str, change: Callable[[], T], told: tuple[object, ...]) -> T:
        message = call_message(name, told)
        self._check_open()
        try:
            self._followers.tell(message)
            self._making_in = threading.get_ident()
            with self._naming_the_dead():
                value = change()
        except BaseException as error:
            self._followers.note_own(Outcome.of(error))
            if not isinstance(error, _CAPACITY) or isinstance(error, RankDiedError):
                self._state.note_failure(error)
            death = self._death_behind(error)
            if death is not None:
                raise death from error
            raise
        finally:
            self._making_in = None
        self._followers.note_own(Outcome())
        return value

    def _naming_the_dead(self) -> AbstractContextManager[None]:
        return nullcontext() if self._heartbeat is None else self._heartbeat.naming_the_dead()

    def _death_behind(self, error: BaseException) -> RankDiedError | None:
        """The error that names the ranks that were lost in a call that raised `error`."""
        if isinstance(error, _CAPACITY) or not isinstance(error, RuntimeError):
            return None
        if isinstance(error, RankDiedError):
            return None
        self._followers.await_answers(_DEATH_S)
        return RankDiedError(self._followers.lost) if self._followers.lost else None

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise RuntimeError("the LeadingEngine is closed; its followers make no more calls")
        self._followers.check_lives()

    def _await_followers(self) -> None:
        """Wait until all ranks have made all calls, and made them alike."""
        self._check_open()
        differences = self._await_ends()
        if differences:
            error = RuntimeError(
                f"a call was not made alike on all ranks: {'; '.join(differences)}; call reset()"
            )
            self._state.note_failure(error)
            raise error

    def _await_ends(self) -> list[str]:
        try:
            return self._followers.await_all()
        except TimeoutError as late:
            error = RuntimeError(f"{late}; start all ranks again")
            self._state.note_failure(error)
            raise error from None


def _close(closed: threading.Event, lock: threading.Lock, followers: Followers, thread: OwnThread) -> None:
    if closed.is_set():
        return
    closed.set()
    is_free = lock.acquire(timeout=_CLOSING_S)  # after the call under way
    try:
        followers.close(call_message(CLOSE, ()))
    finally:
        thread.close()
        if is_free:
            lock.release()
