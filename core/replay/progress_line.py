"""How far a replay is, on one line of stderr."""

import sys
import time
from contextlib import suppress

_EVERY_S = {True: 0.1, False: 10.0}
"""Seconds between two lines: on a terminal, where a line replaces the one before, and elsewhere."""


class ReplayProgress:
    """Cells done, and what is being replayed. A stderr that cannot be written stops the line alone."""

    def __init__(self, num_cells: int) -> None:
        self._num_cells = num_cells
        self._start_s = time.monotonic()
        self._shown_s = float("-inf")
        self._width = 0

    def show(self, num_done: int, doing: str) -> None:
        """Write the line if the last one is old enough."""
        now_s, on_terminal = time.monotonic(), _is_terminal()
        if now_s - self._shown_s >= _EVERY_S[on_terminal]:
            self._shown_s = now_s
            self._write(f"replay: {num_done:,} of {self._num_cells:,} cells; {doing}", on_terminal, False)

    def end(self) -> None:
        """Write the last line."""
        seconds = time.monotonic() - self._start_s
        self._write(f"replay: {self._num_cells:,} cells, {seconds:,.1f} s", _is_terminal(), True)

    def _write(self, line: str, on_terminal: bool, is_last: bool) -> None:
        before = "\r" if on_terminal else ""
        after = "\n" if is_last or not on_terminal else ""
        padded = line.ljust(self._width) if on_terminal else line
        self._width = len(line)
        with suppress(OSError, ValueError, AttributeError):  # closed, a broken pipe, no stderr
            sys.stderr.write(before + padded + after)
            sys.stderr.flush()


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):
        return False
