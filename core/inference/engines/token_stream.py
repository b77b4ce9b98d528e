"""An iterator over the tokens of one request, as the engine generates them."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType

from ...request import FinishReason, PromptFigures, RequestResult
from ..contexts.request import DynamicInferenceRequest, GeneratedToken


class Lease:
    """Somebody's interest in requests; where it ends, the engine cancels those that have not ended.

    Ending a lease changes no book of the engine: it only puts ids into a queue, which the engine reads at its
    next call. So a lease may end at any moment and in any thread, also by garbage collection.
    """

    _ends_when_let_go = False  # of a lease whose construction was interrupted

    def __init__(self, abandoned: deque[int], ends_when_let_go: bool = True) -> None:
        """
        Args:
            abandoned: the engine's queue.
            ends_when_let_go: whether garbage collection of the lease ends it.
        """
        self.request_ids: list[int] = []
        self._abandoned = abandoned
        self._ends_when_let_go = ends_when_let_go

    def end(self) -> None:
        self._abandoned.extend(self.request_ids)
        self.request_ids.clear()

    def __del__(self) -> None:
        if self._ends_when_let_go:
            self.end()


class TokenStream(Iterator[GeneratedToken]):
    """An iterator over a request's tokens; asking for a token advances the engine until the token is there.

    Use a stream with `for` or `async for`, and as a context manager. `async for` advances the engine in the
    same thread and lets other tasks run between steps. Closing a stream cancels a request that has not ended.
    Dropping the last reference to a stream (not of a split model) does so at the engine's next call, and may
    happen in any thread. `DynamicInferenceEngine.stream` makes streams.
    """

    def __init__(
        self,
        request: DynamicInferenceRequest,
        lease: Lease,
        advance: Callable[[], None],
        settle: Callable[[], None],
    ) -> None:
        """
        Args:
            request: the request whose tokens are returned.
            lease: keeps the request from being cancelled.
            advance: makes a step of the engine.
            settle: lets the engine repair what an interrupted call left, and cancel the requests whose leases
                have ended; does nothing during a step.
        """
        self._request = request
        self._lease = lease
        self._advance = advance
        self._settle = settle
        self._closed = False
        self._arrived: list[GeneratedToken] = []
        self._num_read = 0

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
        request, ended = self._request, self._request.result is not None
        return request.prompt_figures if self._arrived or ended else None

    def _waits(self) -> bool:
        """Whether the next token needs a step. Reads what has arrived."""
        if self._closed:
            return False
        self._arrived.extend(self._request.generated_from(len(self._arrived)))
        return self._num_read == len(self._arrived) and self._request.result is None

    def _make_step(self) -> None:
        try:
            self._advance()
        except (StopIteration, StopAsyncIteration) as error:  # which would look like the end of the stream
            raise RuntimeError(f"the step raised {error!r}") from error

    def _has_token(self) -> bool:
        return not self._closed and self._num_read < len(self._arrived)

    def __next__(self) -> GeneratedToken:
        self._settle()
        while self._waits():
            self._make_step()
        if not self._has_token():
            raise StopIteration
        # One line: nothing can be raised between the count and the return, which would lose the token.
        self._num_read += 1; return self._arrived[self._num_read - 1]  # fmt: skip  # noqa: E702

    def __aiter__(self) -> "TokenStream":
        return self

    async def __anext__(self) -> GeneratedToken:
        await asyncio.sleep(0)
        self._settle()
        while self._waits():
            self._make_step()
            await asyncio.sleep(0)
        if not self._has_token():
            raise StopAsyncIteration
        self._num_read += 1; return self._arrived[self._num_read - 1]  # fmt: skip  # noqa: E702

    def take(self) -> tuple[GeneratedToken, ...]:
        """The tokens that have come and that nobody has read; makes no step."""
        self._waits()
        new = () if self._closed else tuple(self._arrived[self._num_read :])
        self._num_read += len(new)
        return new

    def close(self) -> None:
        """Cancel a request that has not ended, and drop its unread tokens. `result` stays readable."""
        self._closed = True
        self._lease.end()
        self._settle()

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
