"""The thread that calls the engine of an `AsyncEngine`."""

import asyncio
import atexit
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from time import thread_time
from typing import Any

from ...errors import EngineDeadError, KVBlockCapacityError
from ...parallel_groups import ParallelGroups
from ...params_and_results import EarlyEnd, GeneratedToken
from .dynamic_engine import DynamicInferenceEngine
from .streams import Answer, TokenStream

logger = logging.getLogger(__name__)

_EXIT_TIMEOUT_S = 10.0
_LONGEST_CALLS_S = 0.01  # computing time that calls get between two steps; one call is made in any case
_running_threads: set["EngineThread"] = set()


def thread_over(groups: ParallelGroups) -> Thread | None:
    """The running thread of an AsyncEngine whose engine uses one of these process groups."""
    threads = list(_running_threads)
    return next((t for t in threads if groups.overlaps(t._engine.context.spec.groups)), None)


class EngineThread(Thread):
    """Makes the calls that the event loop posts, and step after step while there are requests.

    It gives up where what was raised is no `Exception` (SystemExit out of a model), or a reset fails.
    """

    def __init__(
        self, engine: DynamicInferenceEngine, loop: asyncio.AbstractEventLoop, max_step_failures: int
    ) -> None:
        super().__init__(name="mambaslots-engine", daemon=True)  # `_stop_all` joins it at exit
        self.num_received = 0  # requests of which `add` was called, failed ones included
        self.failure: BaseException | None = None  # why the thread has given up
        self.stop_future: asyncio.Future[None] = loop.create_future()  # done once no more calls are made
        self._engine = engine
        self._loop = loop
        self._posted: deque[Callable[[], None]] = deque()  # the loop calls them at the next `_wake_loop`
        self._is_wake_posted = False
        self._max_step_failures = max_step_failures
        self._num_step_failures = 0
        # `__del__` posts, too, at any moment and in any thread: a SimpleQueue allows that, a lock does not.
        self._calls: SimpleQueue[tuple[Callable[[], object], asyncio.Future[Any] | None]] = SimpleQueue()
        self._served: dict[int, tuple[Answer, TokenStream[GeneratedToken]]] = {}
        self._is_stopping = False

    # ---- from other threads

    def start(self) -> None:
        """Start the thread; ValueError where another one serves the engine, or one over its groups."""
        is_served = any(thread._engine is self._engine for thread in list(_running_threads))
        if is_served or thread_over(self._engine.context.spec.groups) is not None:
            raise ValueError("engine is served by another AsyncEngine; accepted: an engine that none serves")
        _running_threads.add(self)
        try:
            super().start()
        except BaseException:
            _running_threads.discard(self)
            raise

    async def await_call[T](self, call: Callable[[], T]) -> T:
        """In the loop: post a call, and wait for what it returns or raises."""
        reply: asyncio.Future[T] = self._loop.create_future()
        self._calls.put((call, reply))
        return await reply

    def post_cancel(self, answer: Answer, reason: EarlyEnd = "cancelled") -> None:
        """End an answer's request after the present step, unless the request has ended."""
        self._calls.put((partial(self._cancel, answer, reason), None))

    def post_stop(self) -> None:
        """End the thread after the present step, and cancel the requests that have not ended."""
        self._calls.put((self._stop, None))

    # ---- calls that are posted

    def add(self, answer: Answer, arguments: Mapping[str, Any]) -> None:
        """Queue a request, whose tokens go to `answer`; `arguments` are those of the engine's `stream`."""
        try:
            stream = self._engine.stream(**arguments)
        finally:
            self.num_received += 1
        answer.request_id = stream.request_id
        self._served[stream.request_id] = answer, stream

    def call[T](self, function: Callable[[DynamicInferenceEngine], T]) -> T:
        """Call a function that may do anything with the engine: add and end requests, make steps."""
        try:
            return function(self._engine)
        finally:
            self._collect(list(self._served))

    def _cancel(self, answer: Answer, reason: EarlyEnd) -> None:
        if answer.request_id is not None:
            self._end_request(answer.request_id, reason=reason)

    def _stop(self) -> None:
        self._is_stopping = True

    # ---- the thread

    def run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            if self._loop.is_closed():
                logger.warning("the event loop was closed before its AsyncEngine: all requests are cancelled")
            else:
                logger.critical("the engine's thread gives up", exc_info=error)
            self.failure = error
        try:
            self._end()
        finally:
            _running_threads.discard(self)

    def _serve(self) -> None:
        busy = True  # requests may have been added before
        while True:
            self._make_calls(wait=not busy)
            self._wake_loop()
            if self._is_stopping:
                return
            busy = self._make_step()
            self._wake_loop()

    def _make_calls(self, wait: bool) -> None:
        """Make calls that are posted, until `_LONGEST_CALLS_S` is spent."""
        try:
            call = self._calls.get(block=wait)
            begun_s = thread_time()
            while True:
                self._make_call(*call)
                if self._is_stopping or thread_time() - begun_s >= _LONGEST_CALLS_S:
                    return
                call = self._calls.get_nowait()
        except Empty:
            return

    def _make_call(self, call: Callable[[], object], reply: "asyncio.Future[Any] | None") -> None:
        value: object = None
        error: BaseException | None = None
        try:
            value = call()
        except Exception as raised:
            error = raised
        except BaseException as raised:
            error = _dead_error(raised)
            raise
        finally:
            if reply is not None:
                self._posted.append(partial(_resolve, reply, value, error))

    def _make_step(self) -> bool:
        """Advance all requests; returns False where nothing is to do until a call comes."""
        engine = self._engine
        try:
            engine.settle()
            if not (engine.context.memory.is_allocated and engine.has_unfinished_requests()):
                return False
            report = engine.step(claims_results=False)  # of requests that calls have added
        except KVBlockCapacityError as error:
            if error.request_id is None:
                self._count_failure(error)
            else:
                self._end_request(error.request_id, error)
        except Exception as error:
            self._count_failure(error)
        else:
            self._num_step_failures = 0
            self._collect(report.tokens)
            self._collect(result.request_id for result in report.finished)
        return True

    def _collect(self, request_ids: Iterable[int]) -> None:
        """Hand over what has come of these requests; ids of others are ignored."""
        for request_id in request_ids:
            if request_id in self._served:
                answer, stream = self._served[request_id]
                tokens = stream.take()
                if answer.prompt_figures is None:
                    answer.prompt_figures = stream.prompt_figures
                answer.extend(tokens)
                if stream.result is not None:
                    del self._served[request_id]
                    answer.end(stream.result)
                if tokens or answer.has_ended:
                    self._post_wake(answer)

    def _post_wake(self, answer: Answer) -> None:
        if not answer.is_wake_posted:
            answer.is_wake_posted = True
            self._posted.append(answer.wake)

    def _wake_loop(self) -> None:
        if not self._posted or self._is_wake_posted:
            return
        self._is_wake_posted = True  # before the call: the loop may run at once
        self._loop.call_soon_threadsafe(self._run_posted)

    def _run_posted(self) -> None:
        """In the loop: call what is posted. After Control-C the interrupted function is called again."""
        self._is_wake_posted = False  # before the functions: what is posted from now on wakes the loop again
        try:
            while self._posted:
                self._posted[0]()
                self._posted.popleft()
        except BaseException:
            self._loop.call_soon(self._run_posted)
            raise

    # ---- ends

    def _end_request(
        self, request_id: int, error: BaseException | None = None, reason: EarlyEnd = "cancelled"
    ) -> None:
        """Take a request out of the engine. Its answer ends with `error`, or else with its result."""
        entry = self._served.pop(request_id, None)
        if entry is None:
            if error is not None:  # of a request that a call has added
                self._engine.cancel(request_id)
            return
        answer, stream = entry
        try:
            if reason == "stop":
                stream.finish()
            stream.close()
        except Exception as second:  # the engine's next call tries again
            error = error or second
        answer.end(None if error is not None else stream.result, error)
        self._post_wake(answer)

    def _count_failure(self, error: Exception) -> None:
        """Count a failed step. All requests end with the error where too many steps have failed in a row."""
        num_failures = self._num_step_failures = self._num_step_failures + 1
        limit = self._max_step_failures
        logger.warning("failed step %d of at most %d in a row", num_failures, limit, exc_info=error)
        if num_failures < limit:
            return
        self._num_step_failures = 0
        for request_id in list(self._served):
            self._end_request(request_id, error)
        try:
            self._engine.settle()
            unfinished = self._engine.has_unfinished_requests()  # those that calls have added
        except Exception:
            unfinished = True
        if unfinished:
            self._engine.reset()

    def _end(self) -> None:
        try:
            for request_id in list(self._served):
                self._end_request(request_id, None if self.failure is None else _dead_error(self.failure))
        finally:
            self._posted.append(self._refuse_calls)
            with suppress(RuntimeError):  # of a closed loop
                self._wake_loop()

    def _refuse_calls(self) -> None:
        """In the loop: refuse the calls that were not made."""
        if not self.stop_future.done():
            self.stop_future.set_result(None)
        while not self._calls.empty():
            _, reply = self._calls.get()
            if reply is not None:
                _resolve(reply, None, self.refusal())

    def refusal(self) -> RuntimeError:
        """Why no call is made any more."""
        return (
            RuntimeError("the AsyncEngine is closed") if self.failure is None else _dead_error(self.failure)
        )


def _dead_error(failure: BaseException) -> EngineDeadError:
    error = EngineDeadError(f"the engine's thread has given up: {failure!r}")
    error.__cause__ = failure
    return error


def _resolve(reply: "asyncio.Future[Any]", value: object, error: BaseException | None) -> None:
    """Set a future in its loop's thread, unless the caller has gone."""
    if reply.done():
        return
    if error is None:
        reply.set_result(value)
    elif isinstance(error, StopIteration):  # which no future takes
        reply.set_exception(RuntimeError(f"the call raised {error!r}"))
    else:
        reply.set_exception(error)


@atexit.register
def _stop_all() -> None:
    """At exit: end the threads, so that none is in a step when the interpreter goes."""
    threads = list(_running_threads)
    for thread in threads:
        thread.post_stop()
    for thread in threads:
        thread.join(_EXIT_TIMEOUT_S)
