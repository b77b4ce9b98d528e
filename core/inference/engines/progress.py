"""How far a call of `generate` or `score` is, on one line of stderr."""

import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from ..contexts.request import DynamicInferenceRequest

_EVERY_S = {True: 0.1, False: 10.0}
"""Seconds between two lines: on a terminal, where a line replaces the one before, and elsewhere."""


class ProgressLine:
    """Requests done and tokens so far. A stderr that cannot be written stops the line and nothing else."""

    def __init__(self, call: str, requests: Sequence[DynamicInferenceRequest]) -> None:
        """
        Args:
            call: what the line calls the work, for example "generate".
            requests: what the call serves.
        """
        self._call = call
        self._requests = requests
        self._start_s = time.monotonic()
        self._shown_s = float("-inf")
        self._width = 0

    def show(self) -> None:
        """Write the line if the last one is old enough."""
        on_terminal = _is_terminal()
        if time.monotonic() - self._shown_s >= _EVERY_S[on_terminal]:
            self._shown_s = time.monotonic()
            self._write("\r" if on_terminal else "", "" if on_terminal else "\n")

    def end(self) -> None:
        """Write the last line."""
        self._write("\r" if _is_terminal() else "", "\n")

    def _write(self, before: str, after: str) -> None:
        line = self._line(time.monotonic() - self._start_s)
        padded = line.ljust(self._width) if before else line
        self._width = len(line)
        with suppress(OSError, ValueError, AttributeError):  # closed, a broken pipe, no stderr
            sys.stderr.write(before + padded + after)
            sys.stderr.flush()

    def _line(self, seconds: float) -> str:
        num_done = sum(request.result is not None for request in self._requests)
        num_tokens = sum(request.num_generated for request in self._requests)
        rate = f", {num_tokens / seconds:,.0f} tokens/s" if seconds > 0 and num_tokens else ""
        return (
            f"{self._call}: {num_done:,} of {len(self._requests):,} done, "
            f"{num_tokens:,} tokens generated, {seconds:,.1f} s{rate}"
        )


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):
        return False
