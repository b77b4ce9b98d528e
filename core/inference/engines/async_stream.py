"""The answer to one request of an `AsyncEngine`, from the engine's thread to a reader in the event loop."""

import asyncio
from collections.abc import AsyncIterator, Callable
from types import TracebackType

from ...request import EarlyEnd, PromptFigures, RequestResult
from ..contexts.request import GeneratedToken


class OpenAnswers:
    """The answers that have not ended, as the event loop knows them; only the loop's thread touches them."""

    def __init__(self) -> None:
        self.answers: set[Answer] = set()
        self.none_open = asyncio.Event()
        self.none_open.set()

    def add(self, answer: "Answer") -> None:
        self.answers.add(answer)
        self.none_open.clear()

    def remove(self, answer: "Answer") -> None:
        """Forget an answer, if it is known."""
        self.answers.discard(answer)
        if not self.answers:
            self.none_open.set()


class Answer:
    """What has come of one request.

    The engine's thread writes: tokens first, then the end, then it posts `wake` to the loop. The loop's
    thread reads in the opposite order, so that no lock is needed.

    Attributes:
        request_id: None until the engine has the request.
        result, error: how the answer ended, one of them; both None until then.
        prompt_figures: what became of the prompt; written before the first token.
        ended: whether no token comes any more.
        announced: whether `wake` is posted and has not run yet.
    """

    def __init__(self, open_answers: OpenAnswers) -> None:
        self.request_id: int | None = None
        self.result: RequestResult | None = None
        self.prompt_figures: PromptFigures | None = None
        self.error: BaseException | None = None
        self.ended = False
        self.announced = False
        self._arrived: list[GeneratedToken] = []
        self._num_read = 0
        self._reader: asyncio.Future[None] | None = None
        self._open_answers = open_answers
        open_answers.add(self)

    # ---- in the engine's thread

    def extend(self, tokens: tuple[GeneratedToken, ...]) -> None:
        self._arrived.extend(tokens)

    def end(self, result: RequestResult | None, error: BaseException | None = None) -> None:
        """Note the end. Later calls change nothing."""
        if not self.ended:
            self.result = result
            self.error = error
            self.ended = True

    # ---- in the event loop's thread

    def wake(self) -> None:
        """Let the reader look; may be called at any time."""
        self.announced = False
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
        if self.ended:
            self._open_answers.remove(self)

    def take(self) -> tuple[GeneratedToken, ...]:
        """The tokens that have come since the last call."""
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
    """The tokens of one request, as they come; `AsyncEngine.stream` makes streams.

    Each item has all tokens since the last one: one token for a quick reader, more for a slow one or where
    drafts were accepted. The answer's length bounds the memory of tokens that nobody reads. Use `async with`,
    or let go of the stream: both cancel a request that has not ended. Iterating raises the error that ended
    the request: KVBlockCapacityError where pinned prefixes leave it too little memory, the model's error
    where the engine's steps fail again and again, EngineDeadError where the engine's thread has given up. The
    log has their tracebacks.
    """

    _answer: Answer | None = None  # of a stream whose construction was interrupted

    def __init__(
        self, answer: Answer, loop: asyncio.AbstractEventLoop, end: Callable[[Answer, EarlyEnd], None]
    ) -> None:
        """
        Args:
            answer: what has come of the request.
            loop: where the stream is read.
            end: asks the engine's thread to end the request; any thread may call it at any moment.
        """
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
        """Cancel the request, unless it has ended. Returns at once; the request leaves within a step.

        Iterating then goes on to the tokens that had come, and ends once the request has left; `result` has
        the finish reason "cancelled".
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
