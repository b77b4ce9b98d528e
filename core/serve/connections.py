"""Connections of clients: those that send nothing more, and those for which no descriptors are left."""

import asyncio
import errno
import logging
import resource
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

logger = logging.getLogger(__name__)

_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_FAILURE_S = 0.5
"""The loop tries again after a second, and reports a failure once for each place of its backlog."""
_FIRST_PROBE_S = 0.004
_LONGEST_PROBE_S = 0.5


def raise_descriptor_limit() -> None:
    """Let this process open as many files and connections as it may; a shell's 1024 are few clients."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    except (ValueError, OSError) as error:  # macOS says "infinity", and does not accept it
        logger.warning("the limit of open files stays as it is: %s", error)


class Connection(H11Protocol):
    """A connection whose client may end its sending side: the requests that it has sent are answered."""

    has_ended = False  # whether the client sends nothing more

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.silent_since_s = self.loop.time()

    @property
    def is_silent(self) -> bool:
        """Whether no request has begun and no answer is on its way."""
        has_request = self.cycle is not None and not self.cycle.response_complete
        return not (has_request or self.transport.is_closing() or self.transport.get_write_buffer_size())

    def eof_received(self) -> bool:  # type: ignore[override]
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            return False
        if cycle.scope["http_version"] == "1.0":
            return False
        if not self.has_ended:
            self.has_ended = True
            self._probe(_FIRST_PROBE_S)
        return True

    def _probe(self, seconds: float) -> None:
        """Send something until the answer begins: where nobody reads, the connection is lost."""
        if self.transport.is_closing() or self.cycle.response_started:
            return
        response = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
        self.transport.write(self.conn.send(response))
        self.loop.call_later(seconds, self._probe, min(2 * seconds, _LONGEST_PROBE_S))

    def on_response_complete(self) -> None:
        self.silent_since_s = self.loop.time()
        answered_cycle = self.cycle
        super().on_response_complete()  # begins with the next request, where it has come
        if self.has_ended and self.cycle is answered_cycle:
            self.transport.close()
        elif self.has_ended:
            self._probe(_FIRST_PROBE_S)


class FailedAccepts:
    """Makes room where connections cannot be accepted: closes silent ones; `num_failed` counts failures."""

    def __init__(self) -> None:
        self.num_failed = 0
        self._failed_s = 0.0

    def watch(self, loop: asyncio.AbstractEventLoop, state: ServerState) -> None:
        """Handle the failures of a loop's listeners; `state` has the connections."""

        def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            error = context.get("exception")
            if not ("socket" in context and isinstance(error, OSError) and error.errno in _OUT_OF_RESOURCES):
                loop.default_exception_handler(context)
            elif loop.time() - self._failed_s > _FAILURE_S:
                self._failed_s = loop.time()
                # The loop's third iteration from here knows all connections that this one has accepted.
                loop.call_soon(loop.call_soon, loop.call_soon, self._close_silent, error, state)

        loop.set_exception_handler(handle)

    def _close_silent(self, error: OSError, state: ServerState) -> None:
        """Close half of the silent connections, first those that never sent a request, by their age."""
        self.num_failed += 1
        connections = [connection for connection in state.connections if isinstance(connection, Connection)]
        silent = [connection for connection in connections if connection.is_silent]
        silent.sort(key=lambda connection: (connection.cycle is not None, connection.silent_since_s))
        closed = silent[: (len(silent) + 1) // 2]
        for connection in closed:
            connection.shutdown()
        counts = (
            f"of {len(connections)} that are open {len(silent)} have no request, and {len(closed)} of these"
        )
        logger.error("no connection can be accepted (%s): %s are closed", error.strerror, counts)
