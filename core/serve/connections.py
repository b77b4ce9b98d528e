"""Connections of clients, and what happens where no descriptors are left for more."""

import asyncio
import errno
import logging
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

logger = logging.getLogger(__package__)

_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_FAILURE_S = 0.5
"""The loop tries again after a second, and reports a failure once for each place of its backlog."""
_SETTLED_S = 0.05
"""Connections that were accepted at once are known so long afterwards."""


def raise_descriptor_limit() -> None:
    """Let this process open as many files and connections as it may; a shell's 1024 are few clients."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except (ValueError, OSError) as error:  # macOS says "infinity", and does not accept it
        logger.warning("the limit of open files stays as it is: %s", error)


class Connection(H11Protocol):
    """A connection that knows since when its client has asked for nothing."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.silent_since_s = self.loop.time()

    @property
    def is_silent(self) -> bool:
        """Whether no request has begun and no answer is on its way."""
        has_request = self.cycle is not None and not self.cycle.response_complete
        return not (has_request or self.transport.is_closing() or self.transport.get_write_buffer_size())

    def on_response_complete(self) -> None:
        self.silent_since_s = self.loop.time()
        super().on_response_complete()


class FailedAccepts:
    """Closes silent connections where the loop can accept no more, so that others get their places."""

    def __init__(self, loop: asyncio.AbstractEventLoop, state: ServerState) -> None:
        """Handle the failures of the loop's listeners; `state` has the connections."""
        self._state = state
        self._failed_s = 0.0
        loop.set_exception_handler(self._handle)

    def _handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not ("socket" in context and isinstance(error, OSError) and error.errno in _OUT_OF_RESOURCES):
            loop.default_exception_handler(context)
        elif loop.time() - self._failed_s > _FAILURE_S:
            self._failed_s = loop.time()
            loop.call_later(_SETTLED_S, self._make_room, error)

    def _make_room(self, error: OSError) -> None:
        """Close half of the silent connections, first those that never sent a request, by their age."""
        connections = [one for one in self._state.connections if isinstance(one, Connection)]
        silent = [one for one in connections if one.is_silent]
        silent.sort(key=lambda one: (one.cycle is not None, one.silent_since_s))
        closed = silent[: (len(silent) + 1) // 2]
        for one in closed:
            one.shutdown()
        logger.error(
            "no connection can be accepted (%s): of %d that are open %d have no request, and %d of these are "
            "closed",
            error.strerror,
            len(connections),
            len(silent),
            len(closed),
        )
