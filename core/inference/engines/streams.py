"""The answer to one request, as a reader sees it: in the thread of the engine, or in an event loop."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType

from ...request import EarlyEnd, FinishReason, PromptFigures, RequestResult
from ..contexts.request import DynamicInferenceRequest, GeneratedToken


class TokenStream(Iterator[GeneratedToken]):
    """An iterator over a request's tokens; asking for a token advances the engine until the token is there.

    Use a stream with `for` or `async for`, and as a context manager. `async for` advances the engine in the
    same thread and lets other tasks run between steps; `AsyncStream` is the stream of an `AsyncEngine`.
    Closing a stream cancels a request that has not ended. Dropping the last reference to a stream (not of a
    split model) does so at the engine's next call, and may happen in any thread.

        with engine.stream(prompt) as stream:
            for token in stream: ...                # a GeneratedToken: token, log_prob, top_log_probs
    """

    _cancels_when_dropped = False  # of a stream whose construction was interrupted

    def __init__(
        self,
        request: DynamicInferenceRequest,
        advance: Callable[[], None],
        settle: Callable[[], None],
        abandoned: deque[int],
        cancels_when_dropped: bool,
    ) -> None:
        """`advance` makes a step; `settle` cancels requests in `abandoned`, where any thread may append."""
        self._request = request
        self._advance = advance
        self._settle = settle
        self._abandoned = abandoned
        self._closed = False
        self._num_read = 0
        self._cancels_when_dropped = cancels_when_dropped

    def __repr__(self) -> str:
        """One line: the request."""
        return f"<TokenStream of {self._request!r}>"

    @property
    def request_id(self) -> int:
        """The id of the request."""
        return self._request.request_id

    @property
    def result(self) -> RequestResult | None:
        """The request's result; None until the request has ended."""
        return self._request.result

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the request ended; None until then."""
        return self._request.result.finish_reason if self._request.result is not None else None

    @property
    def prompt_figures(self) -> PromptFigures | None:
        """What became of the prompt; None until a token, or the end, is there."""
        has_token = self._request.num_generated > len(self._request.given_tokens)
        return self._request.prompt_figures if has_token or self.result is not None else None

    def take(self) -> tuple[GeneratedToken, ...]:
        """The generated tokens that are not read yet; makes no step."""
        new = () if self._closed else tuple(self._request.generated_from(self._num_read))
        self._num_read += len(new)
        return new

    def _next(self) -> GeneratedToken | None:
        """The next generated token, if it is there."""
        request = self._request
        if self._closed or request.num_generated - len(request.given_tokens) <= self._num_read:
            return None
        (token,) = request.generated_from(self._num_read)[:1]
        self._num_read += 1
        return token

    def _needs_step(self) -> bool:
        return not self._closed and self._request.result is None

    def _make_step(self) -> None:
        try:
            self._advance()
        except (StopIteration, StopAsyncIteration) as error:  # which would look like the end of the stream
            raise RuntimeError(f"the step raised {error!r}") from error

    def __next__(self) -> GeneratedToken:
        self._settle()
        while (token := self._next()) is None:
            if not self._needs_step():
                raise StopIteration
            self._make_step()
        return token

    def __aiter__(self) -> "TokenStream":
        return self

    async def __anext__(self) -> GeneratedToken:
        await asyncio.sleep(0)
        self._settle()
        while (token := self._next()) is None:
            if not self._needs_step():
                raise StopAsyncIteration
            self._make_step()
            await asyncio.sleep(0)
        return token

    def close(self) -> None:
        """Cancel a request that has not ended, and drop its unread tokens. `result` stays readable."""
        self._closed = True
        self._abandoned.append(self.request_id)
        self._settle()

    def __del__(self) -> None:
        if self._cancels_when_dropped:
            self._abandoned.append(self._request.request_id)

    def __enter__(self) -> "TokenStream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> "TokenStream":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Answer:
    """The tokens and the end of one request, from a writer to the `AsyncStream` that reads them.

    The writer may be another thread. It writes tokens first, then the end, then lets the loop call `wake`.
    The loop's thread reads in the opposite order, so no lock is needed.

    Attributes:
        request_id: None until the engine has the request.
        result, error: how the answer ended, one of them; both None until then.
        prompt_figures: what became of the prompt; written before the first token.
        ended: whether no token comes any more.
        wake_posted: whether a call of `wake` is posted and has not run yet.
    """

    def __init__(self, on_end: Callable[["Answer"], object]) -> None:
        """`on_end`: called in the loop's thread once the answer has ended; may be called again."""
        self.request_id: int | None = None
        self.result: RequestResult | None = None
        self.prompt_figures: PromptFigures | None = None
        self.error: BaseException | None = None
        self.ended = False
        self.wake_posted = False
        self._arrived: list[GeneratedToken] = []
        self._num_read = 0
        self._reader: asyncio.Future[None] | None = None
        self._on_end = on_end

    # ---- the writer

    def extend(self, tokens: tuple[GeneratedToken, ...]) -> None:
        self._arrived.extend(tokens)

    def end(self, result: RequestResult | None, error: BaseException | None = None) -> None:
        """Set the end. Later calls change nothing."""
        if not self.ended:
            self.result, self.error = result, error
            self.ended = True

    # ---- the event loop's thread

    def wake(self) -> None:
        """Let the reader look; may be called at any time."""
        self.wake_posted = False
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
        if self.ended:
            self._on_end(self)

    def take(self) -> tuple[GeneratedToken, ...]:
        """The tokens that have arrived since the last call."""
        new = tuple(self._arrived[self._num_read :])
        self._num_read += len(new)
        return new

    async def wait(self) -> None:
        """Wait for `wake`."""
        if self._reader is not None:
            raise RuntimeError("two tasks read one AsyncStream; accepted: one reader at a time")
        self._reader = asyncio.get_running_loop().create_future()
        try:
            await self._reader
        finally:
            self._reader = None


class AsyncStream(AsyncIterator[tuple[GeneratedToken, ...]]):
    """The tokens of one request, in an event loop; `AsyncEngine.stream` makes streams.

    Each item has all tokens since the last one: one token for a quick reader, more for a slow one or where
    drafts were accepted. The answer's length bounds the memory of unread tokens. Use `async with`, or drop
    the stream: both cancel a request that has not ended. Iterating raises the error that ended the request:
    KVBlockCapacityError where pinned prefixes leave it too little memory, the model's error where the
    engine's steps fail again and again, EngineDeadError where the engine's thread has given up. The log has
    their tracebacks.
    """

    _answer: Answer | None = None  # of a stream whose construction was interrupted

    def __init__(
        self, answer: Answer, loop: asyncio.AbstractEventLoop, end: Callable[[Answer, EarlyEnd], None]
    ) -> None:
        """`end` asks the writer to end the request; any thread may call it at any moment."""
        self._loop = loop
        self._end = end
        self._is_ending = False
        self._answer = answer

    @property
    def request_id(self) -> int:
        """The engine's id of the request."""
        assert self._answer is not None
        assert self._answer.request_id is not None
        return self._answer.request_id

    @property
    def result(self) -> RequestResult | None:
        """The request's result; None until the answer has ended, and where an error ended it."""
        return self._answer.result if self._answer is not None else None

    @property
    def prompt_figures(self) -> PromptFigures | None:
        """What became of the prompt; None until a token, or the result, is there."""
        answer, result = self._answer, self.result
        if result is None or (answer is not None and answer.prompt_figures is not None):
            return answer.prompt_figures if answer is not None else None
        return PromptFigures(result.num_resumed_tokens, result.computed_by_reason, result.prompt_log_probs)

    def cancel(self) -> None:
        """Cancel the request, unless it has ended. Returns at once; the request ends within a step.

        Iterating then goes on to the tokens that had arrived, and ends once the request has ended; `result`
        has the finish reason "cancelled".
        """
        self._end_early("cancelled")

    def finish(self) -> None:
        """As `cancel`, for an answer that is complete: `result` has the finish reason "stop"."""
        self._end_early("stop")

    def _end_early(self, reason: EarlyEnd) -> None:
        if self._answer is not None and not self._answer.ended and not self._is_ending:
            self._is_ending = True
            self._end(self._answer, reason)

    def __del__(self) -> None:
        self.cancel()

    def __aiter__(self) -> "AsyncStream":
        return self

    async def __anext__(self) -> tuple[GeneratedToken, ...]:
        answer = self._answer
        assert answer is not None
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("an AsyncStream is read in another event loop than that of its AsyncEngine")
        while True:
            ended = answer.ended  # read before the tokens, which are written before it
            new = answer.take()
            if new:
                return new
            if ended:
                break
            await answer.wait()
        if answer.error is not None:
            raise answer.error.with_traceback(None)  # one error may end many streams: no traceback grows
        raise StopAsyncIteration

    async def __aenter__(self) -> "AsyncStream":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
