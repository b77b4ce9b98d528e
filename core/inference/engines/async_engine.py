"""An engine in a thread of its own, for asyncio."""

import asyncio
import inspect
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from ...errors import QueueFullError
from ...params_and_results import RequestResult, SamplingParams
from ...validation import LONGEST_TIMEOUT_S, instance, integer, real, refused
from ..contexts.cache.checkpoint_plan import CheckpointPlan
from .dynamic_engine import DynamicInferenceEngine
from .engine_thread import EngineThread
from .request_factory import Prompt, Salt
from .streams import Answer, AsyncStream, TokenStream

_LONGEST_STEP_S = 10.0  # how long `drain` waits for the step after which requests are gone that it cancelled


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
        self, engine: DynamicInferenceEngine, *, max_waiting_requests: int = 1024, max_step_failures: int = 3
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
        self._open_answers: set[Answer] = set()  # only the loop's thread touches them
        self._none_are_open = asyncio.Event()
        self._none_are_open.set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: EngineThread | None = None
        self._num_sent = 0
        self._is_draining = False
        self._has_drain_expired = False
        self._is_closed = False

    # ---- its life

    def start(self) -> None:
        """Start the thread, for the event loop that runs now.

        Raises:
            RuntimeError: no event loop runs, or the thread was started before.
            ValueError: another AsyncEngine serves the engine, or one over its process groups.
        """
        loop = asyncio.get_running_loop()
        if self._thread is not None or self._is_closed:
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
        self._is_draining = self._is_closed = True
        if thread is None or loop is None:
            return True
        thread.post_stop()
        if loop.is_closed():
            await asyncio.to_thread(thread.join, timeout_s)
            return not thread.is_alive()
        try:
            await asyncio.wait_for(asyncio.shield(thread.stop_future), timeout_s)
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
        thread = self._usable_thread("drain")
        self._is_draining = True
        in_time = True
        if not self._none_are_open.is_set():
            try:
                await asyncio.wait_for(self._none_are_open.wait(), timeout_s)
            except TimeoutError:
                in_time = False
                self._has_drain_expired = True
                for answer in self._open_answers:
                    thread.post_cancel(answer)
        with suppress(TimeoutError):
            await asyncio.wait_for(
                self._await_none_left(thread), None if timeout_s is None else _LONGEST_STEP_S
            )
        return in_time

    async def _await_none_left(self, thread: EngineThread) -> None:
        """Wait until no answer is open, and the engine has got and cancelled those whose tasks have gone."""
        await self._none_are_open.wait()
        if not thread.stop_future.done():
            with suppress(Exception):  # of an engine that no step is made of any more
                await thread.await_call(self._engine.settle)

    async def __aenter__(self) -> "AsyncEngine":
        self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
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
        core = self._engine.core
        num_running = len(core.scheduler.running)
        num_unfinished = len(core.requests) + self._num_sent - num_received
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
        thread = self._accepting_thread("stream")
        answer = Answer(self._remove, thread.post_cancel)
        self._open_answers.add(answer)
        self._none_are_open.clear()
        arguments = {
            "prompt": prompt, "sampling_params": sampling_params, "cache_salt": cache_salt,
            "checkpoint_plan": checkpoint_plan,
        }  # fmt: skip
        self._num_sent += 1
        try:
            try:
                await self._prepare(arguments)
                self._usable_thread("stream")
                if self._has_drain_expired:
                    raise self._closing_error("stream")
            except BaseException:
                self._num_sent -= 1
                raise
            await thread.await_call(partial(thread.add, answer, arguments))
            return TokenStream(answer)
        except BaseException:
            thread.post_cancel(answer)  # the engine may have the request by now
            self._remove(answer)
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

    async def call[T](self, function: Callable[[DynamicInferenceEngine], T]) -> T:
        """Call `function(engine)` in the engine's thread, between two steps: statistics, pins, weights.

        What the function raises is raised here. Requests that it adds are served with the others; a later
        `call(lambda engine: engine.take_result(request_id))` claims a result.

        Raises:
            EngineDeadError: the engine's thread has given up.
            RuntimeError: `close` was called, or this is another event loop.
        """
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise refused("function", function, "a function of the engine, no coroutine")
        thread = self._usable_thread("call")
        return await thread.await_call(partial(thread.call, function))

    def _remove(self, answer: Answer) -> None:
        """Remove an answer that has ended, if it is known."""
        self._open_answers.discard(answer)
        if not self._open_answers:
            self._none_are_open.set()

    def _accepting_thread(self, call: str) -> EngineThread:
        """The thread; an error where no request is accepted now."""
        thread = self._usable_thread(call)
        if self._is_draining:
            raise self._closing_error(call)
        num_waiting = sum(self._num_unfinished()) - self._engine.config.max_requests
        if num_waiting >= self._max_waiting:
            raise QueueFullError(num_waiting, self._max_waiting)
        return thread

    def _closing_error(self, call: str) -> RuntimeError:
        return RuntimeError(f"{call}: the {type(self).__name__} is closing; it takes no more requests")

    def _usable_thread(self, call: str) -> EngineThread:
        """The thread; an error where `call` cannot be made."""
        if self._thread is None:
            raise RuntimeError(
                f"{call} is called before the AsyncEngine is started: use `async with`, or `start`"
            )
        self._check_loop(call)
        if self._thread.stop_future.done() or self._thread.failure is not None:
            raise self._thread.refusal()
        if self._is_closed:
            raise RuntimeError(f"{call}: the AsyncEngine is closing")
        return self._thread

    def _check_loop(self, call: str) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError(
                f"{call} is called in another event loop than that in which the AsyncEngine was started"
            )
