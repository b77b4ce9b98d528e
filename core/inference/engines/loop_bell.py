"""Calls from a thread into an event loop, many with one wake-up."""

import asyncio
from collections import deque
from collections.abc import Callable


class LoopClosedError(RuntimeError):
    """The event loop is closed: nobody can be called in it any more."""


class LoopBell:
    """Runs functions in an event loop's thread that another thread posts. One thread posts and rings.

    The functions must be quick, raise nothing, and may run twice: where Control-C interrupts a run, the loop
    runs what is left again, from the interrupted function on.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._posted: deque[Callable[[], None]] = deque()
        self._rung = False

    def post(self, function: Callable[[], None]) -> None:
        """Note a function for the next `ring`."""
        self._posted.append(function)

    def ring(self) -> None:
        """Let the loop run what is posted; does nothing where nothing is, or where the loop will run anyway.

        Raises:
            LoopClosedError: the loop is closed.
        """
        if not self._posted or self._rung:
            return
        self._rung = True  # before the call: the loop may run at once
        try:
            self.loop.call_soon_threadsafe(self._run)
        except RuntimeError as error:
            raise LoopClosedError(str(error)) from error

    def _run(self) -> None:
        self._rung = False  # before the functions: what is posted from now on rings again
        try:
            while self._posted:
                self._posted[0]()
                self._posted.popleft()
        except BaseException:
            self.loop.call_soon(self._run)
            raise
