"""An engine in a thread of its own, for asyncio."""

import asyncio
import atexit
import inspect
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from time import thread_time
from types import TracebackType
from typing import Any, TypeVar

from ...errors import EngineDeadError, KVBlockCapacityError, QueueFullError
from ...parallel_groups import ParallelGroups
from ...request import EarlyEnd, RequestResult, SamplingParams
from ...validation import LONGEST_TIMEOUT_S, instance, integer, real, shown
from ..contexts.cache.checkpoint_plan import CheckpointPlan
from ..contexts.request import GeneratedToken
from .arguments import Prompt, Salt
from .dynamic_engine import DynamicInferenceEngine
from .streams import Answer, AsyncStream, TokenStream

logger = logging.getLogger(__name__)

T = TypeVar("T")
_LONGEST_STEP_S = 10.0
"""How long `drain` waits for the step after which requests are gone that it cancelled."""
_EXIT_TIMEOUT_S = 10.0
_LONGEST_CALLS_S = 0.01
"""Computing time that calls get between two steps; one call is made in any case."""


class AsyncEngine:
    """An engine in a thread of its own, for asyncio.

    The thread makes steps while there are requests, and sleeps without them. All tasks of one event loop may
    use it; a call from another loop is refused. While the thread runs, call the engine through `call` alone.

        async with ms.AsyncEngine(engine) as server:
            async with await server.stream(prompt, params) as stream:
                async for tokens in stream:
                    ...

    A step that fails is made again. After `max_step_failures` in a row every request ends with the error, and
    the thread goes on to later requests. A request for which pinned prefixes leave too few KV blocks ends
    alone.
    """

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        *,
        max_waiting_requests: int = 1024,
        max_step_failures: int = 3,
    ) -> None:
        """
        Args:
            engine: of a model that one process serves, or the `LeadingEngine` of a model that is split over
                ranks. `close` leaves it open.
            max_waiting_requests: requests that may wait, >= 1: `stream` raises once as many and
                `max_requests` are there.
            max_step_failures: after so many failed steps in a row, >= 1, all requests end with the error.

        Raises:
            ValueError: an argument is of another kind, or the model is split and this is no `LeadingEngine`:
                then all ranks must make the same calls in the same order.
        """
        self._engine = instance("engine", engine, DynamicInferenceEngine)
        if not engine.has_one_caller:
            raise ValueError(
                "engine serves a model that is split over ranks; accepted: a model that one process serves, "
                "or a mambaslots.net.LeadingEngine, which makes its calls on all ranks"
            )
        self._max_waiting = integer("max_waiting_requests", max_waiting_requests, 1)
        self._max_step_failures = integer("max_step_failures", max_step_failures, 1)
        self._open: set[Answer] = set()  # only the loop's thread touches them
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: EngineThread | None = None
        self._num_sent = 0
        self._draining = False
        self._drain_expired = False
        self._closed = False

    # ---- its life

    def start(self) -> None:
        """Start the thread, for the event loop that runs now.

        Raises:
            RuntimeError: no event loop runs, or the thread was started before.
            ValueError: another AsyncEngine serves the engine, or one over its process groups.
        """
        loop = asyncio.get_running_loop()
        if self._thread is not None or self._closed:
            raise RuntimeError("the AsyncEngine was started before; make another one")
        thread = EngineThread(self._engine, loop, self._max_step_failures)
        thread.start()
        self._loop, self._thread = loop, thread
        # The thread knows nothing of `self`, so that an AsyncEngine without references ends its thread.
        weakref.finalize(self, thread.post_stop).atexit = False

    async def close(self, timeout_s: float | None = None) -> bool:
        """Cancel all requests and end the thread, which ends after the step under way.

        Args:
            timeout_s: wait so long for the step at most; None waits for it, even if it never ends.

        Returns:
            Whether the thread has ended. A thread that has not holds the engine, and ends after its step.

        Raises:
            RuntimeError: this is another event loop than that of the AsyncEngine, which is not closed.
        """
        if timeout_s is not None:
            timeout_s = real("timeout_s", timeout_s, 0.0, LONGEST_TIMEOUT_S)
        thread, loop = self._thread, self._loop
        if loop is not None and not loop.is_closed():
            self._check_loop("close")
        self._draining = self._closed = True
        if thread is None or loop is None:
            return True
        thread.post_stop()
        if loop.is_closed():
            await asyncio.to_thread(thread.join, timeout_s)
            return not thread.is_alive()
        try:
            await asyncio.wait_for(asyncio.shield(thread.ended), timeout_s)
        except TimeoutError:
            return False
        thread.join()  # it has made its last call
        return True

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Take no more requests, and wait for those that wait or run. `call` still works.

        Afterwards `num_waiting` and `num_running` are 0, unless a step hangs or calls have added requests.

        Args:
            timeout_s: after so many seconds the requests are cancelled, and end after the step under way.

        Returns:
            Whether all requests came to their own end.
        """
        if timeout_s is not None:
            timeout_s = real("timeout_s", timeout_s, 0.0, LONGEST_TIMEOUT_S)
        thread = self._usable("drain")
        self._draining = True
        in_time = True
        if not self._none_open.is_set():
            try:
                await asyncio.wait_for(self._none_open.wait(), timeout_s)
            except TimeoutError:
                in_time, self._drain_expired = False, True
                for answer in self._open:
                    thread.post_cancel(answer)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._none_left(thread), None if timeout_s is None else _LONGEST_STEP_S)
        return in_time

    async def _none_left(self, thread: "EngineThread") -> None:
        """Wait until no answer is open, and the engine has got and cancelled those whose tasks have gone."""
        await self._none_open.wait()
        if not thread.ended.done():
            reply: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            thread.post(self._engine.has_unfinished_requests, reply)
            with suppress(Exception):  # of an engine that no step is made of any more
                await reply

    async def __aenter__(self) -> "AsyncEngine":
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ---- what any thread may read

    @property
    def num_waiting(self) -> int:
        """Requests that do not run yet: they wait for a row, for memory, or for the next step."""
        return self._num_unfinished()[0]

    @property
    def num_running(self) -> int:
        """Requests that have a row."""
        return self._num_unfinished()[1]

    def _num_unfinished(self) -> tuple[int, int]:
        """How many requests wait, and how many run; those that calls have added, too."""
        num_received = self._thread.num_received if self._thread is not None else 0
        state = self._engine.state
        num_running = len(state.scheduler.running)
        num_unfinished = len(state.requests) + self._num_sent - num_received
        return max(0, num_unfinished - num_running), num_running

    @property
    def failure(self) -> BaseException | None:
        """Why the engine's thread has given up; None while it serves."""
        return self._thread.failure if self._thread is not None else None

    # ---- requests

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: Salt = None,
        checkpoint_plan: CheckpointPlan | None = None,
    ) -> AsyncStream:
        """Queue a prompt; the arguments are those of `DynamicInferenceEngine.add_request`.

        Returns once the engine has the request, which takes at most the rest of a step.

        Raises:
            ValueError: the request can never run.
            QueueFullError: `max_waiting_requests` wait, apart from those that have a row or get a free one.
            EngineDeadError: the engine's thread has given up.
            RuntimeError: `drain` or `close` was called, or this is another event loop.
        """
        thread = self._accepting("stream")
        answer = Answer(self._forget, thread.post_cancel)
        self._open.add(answer)
        self._none_open.clear()
        arguments = {
            "prompt": prompt, "sampling_params": sampling_params, "cache_salt": cache_salt,
            "checkpoint_plan": checkpoint_plan,
        }  # fmt: skip
        reply: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_sent += 1
        try:
            try:
                await self._prepare(arguments)
                self._usable("stream")
                if self._drain_expired:
                    raise self._closing("stream")
            except BaseException:
                self._num_sent -= 1
                raise
            thread.post(partial(thread.add, answer, arguments), reply)
            await reply
            return TokenStream(answer)
        except BaseException:
            reply.cancel()
            thread.post_cancel(answer)  # the engine may have the request by now
            self._forget(answer)
            raise

    async def _prepare(self, arguments: dict[str, Any]) -> None:
        """Called for each request before the engine gets it; the request waits meanwhile."""

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: Salt = None,
        checkpoint_plan: CheckpointPlan | None = None,
    ) -> RequestResult:
        """Serve a prompt to its end; the arguments and errors are those of `stream`.

        The request is cancelled where the task is.
        """
        stream = await self.stream(
            prompt, sampling_params, cache_salt=cache_salt, checkpoint_plan=checkpoint_plan
        )
        async with stream:
            async for _ in stream:
                pass
        assert stream.result is not None
        return stream.result

    async def call(self, function: Callable[[DynamicInferenceEngine], T]) -> T:
        """Call `function(engine)` in the engine's thread, between two steps: statistics, pins, weights.

        What the function raises is raised here. Requests that it adds are served with the others; a later
        `call(lambda engine: engine.take_result(request_id))` claims a result.

        Raises:
            EngineDeadError: the engine's thread has given up.
            RuntimeError: `close` was called, or this is another event loop.
        """
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise ValueError(
                f"function is {shown(function)}; accepted: a function of the engine, no coroutine"
            )
        thread = self._usable("call")
        reply: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        thread.post(partial(thread.call, function), reply)
        return await reply

    def _forget(self, answer: Answer) -> None:
        """Forget an answer that has ended, if it is known."""
        self._open.discard(answer)
        if not self._open:
            self._none_open.set()

    def _accepting(self, call: str) -> "EngineThread":
        """The thread; an error where no request is accepted now."""
        thread = self._usable(call)
        if self._draining:
            raise self._closing(call)
        num_waiting = sum(self._num_unfinished()) - self._engine.config.max_requests
        if num_waiting >= self._max_waiting:
            raise QueueFullError(num_waiting, self._max_waiting)
        return thread

    def _closing(self, call: str) -> RuntimeError:
        return RuntimeError(f"{call}: the {type(self).__name__} is closing; it takes no more requests")

    def _usable(self, call: str) -> "EngineThread":
        """The thread; an error where `call` cannot be made."""
        if self._thread is None:
            raise RuntimeError(
                f"{call} is called before the AsyncEngine is started: use `async with`, or `start`"
            )
        self._check_loop(call)
        if self._thread.ended.done() or self._thread.failure is not None:
            raise self._thread.refusal()
        if self._closed:
            raise RuntimeError(f"{call}: the AsyncEngine is closing")
        return self._thread

    def _check_loop(self, call: str) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError(
                f"{call} is called in another event loop than that in which the AsyncEngine was started"
            )


_running_threads: set["EngineThread"] = set()


def thread_over(groups: ParallelGroups) -> Thread | None:
    """The running thread of an AsyncEngine whose engine uses one of these process groups."""
    threads = (one for one in list(_running_threads) if groups.overlap(one._engine.context.spec.groups))
    return next(threads, None)


class EngineThread(Thread):
    """Makes the calls that the event loop posts, and step after step while there are requests.

    Calls are made between two steps, where many wait for `_LONGEST_CALLS_S` a step. Without requests the
    thread sleeps until a call comes. New tokens and results of calls go to the loop with one wake-up after a
    step, and one after the calls before a step.

    The thread ends after `post_stop`, where the loop is closed, and where it gives up: what was raised is no
    `Exception` (SystemExit out of a model), or the engine cannot even be reset.

    Attributes:
        num_received: requests of which `add` has been called, and failed ones.
        failure: why the thread has given up; None while it has not.
        ended: the loop's future that is done once the thread makes no more calls.
    """

    def __init__(
        self, engine: DynamicInferenceEngine, loop: asyncio.AbstractEventLoop, max_step_failures: int
    ) -> None:
        super().__init__(name="mambaslots-engine", daemon=True)  # `_stop_all` joins it at exit
        self.num_received = 0
        self.failure: BaseException | None = None
        self.ended: asyncio.Future[None] = loop.create_future()
        self._engine = engine
        self._loop = loop
        self._posted: deque[Callable[[], None]] = deque()  # for the loop
        self._wake_posted = False
        self._max_step_failures = max_step_failures
        self._num_step_failures = 0
        # `__del__` posts, too, at any moment and in any thread: a SimpleQueue allows that, a lock does not.
        self._calls: SimpleQueue[tuple[Callable[[], object], asyncio.Future[Any] | None]] = SimpleQueue()
        self._streams: dict[int, tuple[Answer, TokenStream[GeneratedToken]]] = {}
        self._stopping = False

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

    def post(self, call: Callable[[], object], reply: "asyncio.Future[Any] | None" = None) -> None:
        """Let the thread make a call after the present step, in the order of the posts. `reply`: the loop's
        future for what the call returns or raises."""
        self._calls.put((call, reply))

    def post_cancel(self, answer: Answer, reason: EarlyEnd = "cancelled") -> None:
        """End an answer's request after the present step, unless the request has ended."""
        self.post(partial(self._cancel, answer, reason))

    def post_stop(self) -> None:
        """End the thread after the present step, and cancel the requests that have not ended."""
        self.post(self._stop)

    # ---- calls that are posted

    def add(self, answer: Answer, arguments: Mapping[str, Any]) -> None:
        """Queue a request, whose tokens go to `answer`; `arguments` are those of the engine's `stream`."""
        try:
            stream = self._engine.stream(**arguments)
        finally:
            self.num_received += 1
        answer.request_id = stream.request_id
        self._streams[stream.request_id] = answer, stream

    def call(self, function: Callable[[DynamicInferenceEngine], object]) -> object:
        """Call a function that may do anything with the engine: add and end requests, make steps."""
        try:
            return function(self._engine)
        finally:
            self._collect(list(self._streams))

    def _cancel(self, answer: Answer, reason: EarlyEnd) -> None:
        if answer.request_id is not None:
            self._end_request(answer.request_id, reason=reason)

    def _stop(self) -> None:
        self._stopping = True

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
            if self._stopping:
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
                if self._stopping or thread_time() - begun_s >= _LONGEST_CALLS_S:
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
            error = _dead(raised)
            raise
        finally:
            if reply is not None:
                self._post(partial(_resolve, reply, value, error))

    def _make_step(self) -> bool:
        """Advance all requests; returns False where nothing is to do until a call comes."""
        engine = self._engine
        try:
            if not (engine.context.memory.allocated and engine.has_unfinished_requests()):
                return False
            report = engine.step(claims_results=False)  # of requests that calls have added
        except KVBlockCapacityError as error:
            if error.request_id is None:
                self._note_failure(error)
            else:
                self._end_request(error.request_id, error)
        except Exception as error:
            self._note_failure(error)
        else:
            self._num_step_failures = 0
            self._collect(report.tokens)
            self._collect(result.request_id for result in report.finished)
        return True

    def _collect(self, request_ids: Iterable[int]) -> None:
        """Hand over what has come of these requests; ids of others are ignored."""
        for request_id in request_ids:
            if request_id in self._streams:
                answer, stream = self._streams[request_id]
                tokens = stream.take()
                if answer.prompt_figures is None:
                    answer.prompt_figures = stream.prompt_figures
                answer.extend(tokens)
                if stream.result is not None:
                    del self._streams[request_id]
                    answer.end(stream.result)
                if tokens or answer.ended:
                    self._announce(answer)

    def _announce(self, answer: Answer) -> None:
        if not answer.wake_posted:
            answer.wake_posted = True
            self._post(answer.wake)

    def _post(self, function: Callable[[], None]) -> None:
        """Let the loop call a quick function that raises nothing, at the next `_wake_loop`."""
        self._posted.append(function)

    def _wake_loop(self) -> None:
        if not self._posted or self._wake_posted:
            return
        self._wake_posted = True  # before the call: the loop may run at once
        self._loop.call_soon_threadsafe(self._run_posted)

    def _run_posted(self) -> None:
        """In the loop: call what is posted. After Control-C the interrupted function is called again."""
        self._wake_posted = False  # before the functions: what is posted from now on wakes the loop again
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
        entry = self._streams.pop(request_id, None)
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
        self._announce(answer)

    def _note_failure(self, error: Exception) -> None:
        """Count a failed step. All requests end with the error where too many steps have failed in a row."""
        self._num_step_failures += 1
        number, limit = self._num_step_failures, self._max_step_failures
        logger.warning("failed step %d of at most %d in a row", number, limit, exc_info=error)
        if number < limit:
            return
        self._num_step_failures = 0
        for request_id in list(self._streams):
            self._end_request(request_id, error)
        try:
            unfinished = self._engine.has_unfinished_requests()  # those that calls have added
        except Exception:
            unfinished = True
        if unfinished:
            self._engine.reset()

    def _end(self) -> None:
        try:
            for request_id in list(self._streams):
                self._end_request(request_id, None if self.failure is None else _dead(self.failure))
        finally:
            self._post(self._note_end)
            with suppress(RuntimeError):  # of a closed loop
                self._wake_loop()

    def _note_end(self) -> None:
        """In the loop: refuse the calls that were not made."""
        if not self.ended.done():
            self.ended.set_result(None)
        while not self._calls.empty():
            _, reply = self._calls.get()
            if reply is not None:
                _resolve(reply, None, self.refusal())

    def refusal(self) -> RuntimeError:
        """Why no call is made any more."""
        return RuntimeError("the AsyncEngine is closed") if self.failure is None else _dead(self.failure)


def _dead(failure: BaseException) -> EngineDeadError:
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
