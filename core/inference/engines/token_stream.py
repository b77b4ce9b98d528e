"""The tokens of one request, as they come."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple


class GeneratedToken(NamedTuple):
    """One token of an answer; `log_prob` is None unless asked for."""

    token: int
    log_prob: float | None


class TokenStream(Iterator[GeneratedToken]):
    """An iterator over a request's tokens; asking for one advances the engine until it is there.

    Closed, or let go of, before its end, it cancels the request.
    """

    def __init__(
        self, advance: Callable[[], bool], close: Callable[[], None], close_when_let_go: bool = True
    ) -> None:
        """`advance()` makes a step and says whether the request goes on; `close()` ends the request."""
        self._close_when_let_go = close_when_let_go
        self._advance = advance
        self._close = close
        self._arrived: deque[GeneratedToken] = deque()
        self._goes_on = True

    def put(self, *tokens: GeneratedToken) -> None:
        self._arrived.extend(tokens)

    def __next__(self) -> GeneratedToken:
        while self._goes_on and not self._arrived:
            self._goes_on = self._advance()
        if not self._arrived:
            self.close()
            raise StopIteration
        return self._arrived.popleft()

    def close(self) -> None:
        """End the request if it has not ended, and drop the tokens not taken."""
        self._goes_on = False
        self._arrived.clear()
        self._close()

    def __del__(self) -> None:
        if self._close_when_let_go:
            self.close()
