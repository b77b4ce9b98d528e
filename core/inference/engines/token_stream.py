"""An iterator over the tokens of one request, as the engine generates them."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import NamedTuple

from ...request import FinishReason, RequestResult


class GeneratedToken(NamedTuple):
    """One token of an answer; `log_prob` is None unless asked for."""

    token: int
    log_prob: float | None


class StreamFeed:
    """What an engine delivers to one stream.

    Attributes:
        arrived: tokens that the stream has not returned yet.
        result: the request's result, once the request has ended.
        ended: whether nothing more will arrive. Then `result` may still be None: the engine was reset.
    """

    def __init__(self) -> None:
        self.arrived: deque[GeneratedToken] = deque()
        self.result: RequestResult | None = None
        self.ended = False

    def end(self, result: RequestResult | None) -> None:
        """The request has ended."""
        self.result = result
        self.ended = True


class TokenStream(Iterator[GeneratedToken]):
    """An iterator over a request's tokens; asking for a token advances the engine until the token is there.

    Use a stream with `for` or `async for`, and as a context manager. `async for` advances the engine in the
    same thread and lets other tasks run between steps. Closing a stream, or dropping the last reference to
    it (not of a split model), cancels a request that has not ended. `DynamicInferenceEngine.stream` makes
    streams.

    Attributes:
        request_id: the id of the request.
    """

    def __init__(
        self,
        request_id: int,
        feed: StreamFeed,
        advance: Callable[[], None],
        cancel: Callable[[], None],
        cancel_when_let_go: bool = True,
    ) -> None:
        """
        Args:
            request_id: the id of the request.
            feed: what the engine delivers.
            advance: makes a step of the engine.
            cancel: ends the request if it has not ended.
            cancel_when_let_go: whether garbage collection of the stream cancels the request.
        """
        self.request_id = request_id
        self._feed = feed
        self._advance = advance
        self._cancel = cancel
        self._cancel_when_let_go = cancel_when_let_go
        self._closed = False

    @property
    def result(self) -> RequestResult | None:
        """The request's result; None until the request has ended."""
        return self._feed.result

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the request ended; None until then."""
        return self._feed.result.finish_reason if self._feed.result is not None else None

    @property
    def _goes_on(self) -> bool:
        return not (self._closed or self._feed.arrived or self._feed.ended)

    def __next__(self) -> GeneratedToken:
        while self._goes_on:
            self._advance()
        if self._closed or not self._feed.arrived:
            raise StopIteration
        return self._feed.arrived.popleft()

    def __aiter__(self) -> "TokenStream":
        return self

    async def __anext__(self) -> GeneratedToken:
        await asyncio.sleep(0)
        while self._goes_on:
            self._advance()
            await asyncio.sleep(0)
        if self._closed or not self._feed.arrived:
            raise StopAsyncIteration
        return self._feed.arrived.popleft()

    def close(self) -> None:
        """Cancel a request that has not ended, and drop its unread tokens. `result` stays readable."""
        self._closed = True
        self._feed.arrived.clear()
        self._cancel()

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

    def __del__(self) -> None:
        if self._cancel_when_let_go and not self._closed:
            self.close()
