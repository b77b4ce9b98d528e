"""The answer to one request as its reader sees it: in the thread of the engine, or in an event loop."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from ...params_and_results import EarlyEnd, FinishReason, GeneratedToken, PromptFigures, RequestResult
from ..contexts.dynamic_request import DynamicInferenceRequest


class TokenStream[Item](Iterator[Item], AsyncIterator[Item]):
    """The tokens of one request: of an engine in this thread, of an `AsyncEngine`, or of replicas.

    `DynamicInferenceEngine.stream` makes streams of single tokens. Asking for a token advances the engine
    until the token is there.

        with engine.stream(prompt) as stream:
            for token in stream: ...                # a GeneratedToken: token, log_prob, top_log_probs

    `AsyncEngine.stream` makes streams for `async for` alone, whose items are tuples of all tokens since the
    last item: one token for a quick reader, more for a slow one or where drafts were accepted. Iterating
    raises the error that ended the request: KVBlockCapacityError where pinned prefixes leave it too little
    memory, the model's error where steps fail again and again, EngineDeadError where the thread gave up.

    Leaving `with`, and dropping the last reference to a stream (not of a split model without a
    `LeadingEngine`), in any thread, cancel a request that has not ended, at the engine's next call.
    """

    def __init__(self, source: "RequestSource | Answer") -> None:
        self._source = source

    def __repr__(self) -> str:
        """One line: the request."""
        return f"<TokenStream of {self._source!r}>"

    @property
    def request_id(self) -> int:
        """The engine's id of the request."""
        assert self._source.request_id is not None
        return self._source.request_id

    @property
    def result(self) -> RequestResult | None:
        """The request's result; None until the request has ended, and where an error ended it."""
        return self._source.result

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the request ended; None until then."""
        return self.result.finish_reason if self.result is not None else None

    @property
    def prompt_figures(self) -> PromptFigures | None:
        """What became of the prompt; None until a token, or the result, is there."""
        figures, ended = self._source.prompt_figures, self.result
        if figures is None and ended is not None:
            return PromptFigures(ended.num_resumed_tokens, ended.computed_by_reason, ended.prompt_log_probs)
        return figures

    def take(self) -> tuple[GeneratedToken, ...]:
        """The tokens that are there and not read yet; makes no step."""
        return self._source.take()

    def cancel(self) -> None:
        """Cancel the request, unless it has ended. Iterating goes on to the tokens that are there."""
        self._source.end_early("cancelled")

    def finish(self) -> None:
        """As `cancel`, for an answer that is complete: the finish reason is "stop", not "cancelled"."""
        self._source.end_early("stop")

    def close(self) -> None:
        """As `cancel`; drops tokens that are there and not read, where the engine runs in this thread."""
        self._source.close()

    def __del__(self) -> None:
        if hasattr(self, "_source"):  # else its construction was interrupted
            self._source.drop()

    def __next__(self) -> Item:
        if not isinstance(self._source, RequestSource):
            raise RuntimeError("the tokens of this stream come in an event loop; read them with `async for`")
        return self._source.next_token()  # type: ignore[return-value]

    def __aiter__(self) -> "TokenStream[Item]":
        return self

    async def __anext__(self) -> Item:
        if not isinstance(self._source, Answer):
            raise RuntimeError("the tokens of this stream are those of an engine in this thread; use `for`")
        return await self._source.next_tokens()  # type: ignore[return-value]

    def __enter__(self) -> "TokenStream[Item]":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def __aenter__(self) -> "TokenStream[Item]":
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()


type AsyncStream = TokenStream[tuple[GeneratedToken, ...]]


@dataclass(eq=False)
class RequestSource:
    """A request whose tokens are read in the thread that calls its engine."""

    request: DynamicInferenceRequest
    step: Callable[[], None]
    settle: Callable[[], None]  # ends the requests that `queue_cancel` was called for
    queue_cancel: Callable[[int, EarlyEnd], None]  # in any thread
    has_one_caller: bool  # else `drop` ends nothing: ranks collect garbage at different times
    is_closed: bool = False
    num_read: int = 0

    def __repr__(self) -> str:
        return repr(self.request)

    @property
    def request_id(self) -> int:
        return self.request.request_id

    @property
    def result(self) -> RequestResult | None:
        return self.request.result

    @property
    def prompt_figures(self) -> PromptFigures | None:
        return self.request.prompt_figures if self.request.num_new else None

    def take(self) -> tuple[GeneratedToken, ...]:
        new = () if self.is_closed else tuple(self.request.new_from(self.num_read))
        self.num_read += len(new)
        return new

    def next_token(self) -> GeneratedToken:
        """The next token, after as many steps as it takes; StopIteration at the end."""
        request = self.request
        self.settle()
        while not self.is_closed:
            if request.num_new > self.num_read:
                self.num_read += 1
                return request.new_from(self.num_read - 1)[0]
            if request.result is not None:
                break
            try:
                self.step()
            except (StopIteration, StopAsyncIteration) as error:  # would look like the end of the stream
                raise RuntimeError(f"the step raised {error!r}") from error
        raise StopIteration

    def end_early(self, reason: EarlyEnd) -> None:
        self.queue_cancel(self.request_id, reason)
        self.settle()

    def close(self) -> None:
        self.is_closed = True
        self.end_early("cancelled")

    def drop(self) -> None:
        if self.has_one_caller:
            self.queue_cancel(self.request_id, "cancelled")


class Answer:
    """The tokens and the end of one request, from a writer to the stream that reads them in an event loop.

    The writer, perhaps another thread, writes tokens, then the end, then lets the loop call `wake`. The
    loop's thread reads in the opposite order, so no lock is needed.
    """

    def __init__(
        self, on_end: Callable[["Answer"], object], end_early: Callable[["Answer", EarlyEnd], object]
    ) -> None:
        """`on_end` may be called again; `end_early` asks the writer for an end, in any thread."""
        self.request_id: int | None = None  # until the engine has the request
        self.result: RequestResult | None = None
        self.prompt_figures: PromptFigures | None = None  # written before the first token
        self.error: BaseException | None = None
        self.has_ended = False
        self.is_wake_posted = False
        self._loop = asyncio.get_running_loop()
        self._on_end = on_end
        self._end_early = end_early
        self._is_ending = False
        self._arrived: list[GeneratedToken] = []
        self._num_read = 0
        self._reader: asyncio.Future[None] | None = None

    # ---- the writer

    def extend(self, tokens: tuple[GeneratedToken, ...]) -> None:
        self._arrived.extend(tokens)

    def end(self, result: RequestResult | None, error: BaseException | None = None) -> None:
        """Set the end. Later calls change nothing."""
        if not self.has_ended:
            self.result, self.error = result, error
            self.has_ended = True

    # ---- the event loop's thread

    def wake(self) -> None:
        """Let the reader look; may be called at any time."""
        self.is_wake_posted = False
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
        if self.has_ended:
            self._on_end(self)

    def take(self) -> tuple[GeneratedToken, ...]:
        new = tuple(self._arrived[self._num_read :])
        self._num_read += len(new)
        return new

    async def next_tokens(self) -> tuple[GeneratedToken, ...]:
        """All new tokens, at least one; StopAsyncIteration at the end, or the error that ended the answer."""
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("a stream is read in another event loop than that of its AsyncEngine")
        while True:
            ended = self.has_ended  # read before the tokens, which are written before it
            if tokens := self.take():
                return tokens
            if ended:
                break
            if self._reader is not None:
                raise RuntimeError("two tasks read one stream; accepted: one reader at a time")
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        if self.error is not None:
            raise self.error.with_traceback(None)  # one error may end many streams: no traceback grows
        raise StopAsyncIteration

    def end_early(self, reason: EarlyEnd) -> None:
        if not self.has_ended and not self._is_ending:
            self._is_ending = True
            self._end_early(self, reason)

    def close(self) -> None:
        self.end_early("cancelled")

    drop = close
