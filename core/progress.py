"""Bars that show how far something is."""

import sys
from contextlib import suppress
from typing import Any

from tqdm import tqdm


class _Stderr:
    """The standard error; what it cannot take is lost."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)

    def write(self, text: str) -> None:
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.flush()


class ProgressBar(tqdm):  # type: ignore[misc]
    """A bar of tqdm on the standard error, without a thread; a stream that is closed fails nothing."""

    monitor_interval = 0

    def __init__(self, **settings: Any) -> None:
        super().__init__(file=_Stderr(), **settings)

    def is_due(self) -> bool:
        """Whether a change would be shown now: the caller need not count before."""
        return bool(self._time() - self.last_print_t >= self.mininterval)
