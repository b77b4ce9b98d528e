"""Messages between two processes: JSON objects, one a line, over a TCP connection."""

import asyncio
import json
from typing import Any

MAX_LINE_BYTES = 64 << 20
"""A longer line ends the connection; a prompt of a million tokens takes 7 MB."""


class PeerLostError(Exception):
    """The other side of a connection has ended, is silent, or sends what is no message."""


class MessageStream:
    """Sends and receives JSON objects; one task at a time receives, any task sends.

    Every failure is a `PeerLostError`.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """
        Args:
            reader, writer: a connection of asyncio, made with `limit=MAX_LINE_BYTES`.
        """
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, host: str, port: int, timeout_s: float) -> "MessageStream":
        """A stream to a listener; PeerLostError where none accepts within `timeout_s`."""
        try:
            connecting = asyncio.open_connection(host, port, limit=MAX_LINE_BYTES)
            return cls(*await asyncio.wait_for(connecting, timeout_s))
        except (OSError, TimeoutError) as error:
            raise PeerLostError(f"{host}:{port} does not accept: {error!r}") from error

    async def send(self, message: dict[str, Any], timeout_s: float) -> None:
        """Send a message. Waits while the peer has much to read, at most `timeout_s`."""
        try:
            self._writer.write(json.dumps(message).encode() + b"\n")
            await asyncio.wait_for(self._writer.drain(), timeout_s)
        except TimeoutError as error:
            raise PeerLostError(f"it read nothing for {timeout_s:g} s") from error
        except (OSError, RuntimeError) as error:
            raise PeerLostError(f"the connection broke: {error!r}") from error

    async def receive(self, timeout_s: float | None = None) -> dict[str, Any]:
        """The next message; PeerLostError after `timeout_s` without one. None: waits for it."""
        try:
            line = await asyncio.wait_for(self._reader.readline(), timeout_s)
            message = json.loads(line) if line.endswith(b"\n") else None
        except TimeoutError as error:
            raise PeerLostError(f"it said nothing for {timeout_s:g} s") from error
        except OSError as error:
            raise PeerLostError(f"the connection broke: {error!r}") from error
        except (ValueError, RecursionError) as error:
            raise PeerLostError(f"it sent what is no message: {error}") from error
        if message is None:
            raise PeerLostError("it has ended")
        if not isinstance(message, dict):
            raise PeerLostError("it sent what is no message: no JSON object")
        return message

    def close(self) -> None:
        """End the connection at once; the peer's next `receive` raises."""
        self._writer.transport.abort()
