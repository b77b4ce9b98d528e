"""Messages between processes: msgspec structs over ZeroMQ, encrypted and authenticated by CURVE."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

SILENCE_S = 10.0  # a peer that answers no heartbeat for so long is lost
MAX_BYTES = 1 << 30  # a peer that sends a larger message is lost
_LINGER_MS = 1000
_LAST_MESSAGES_MS = 50
_SKIP_S = 0.1  # so long beyond its timeout `Listener.receive` passes over invalid messages

Frames = list[zmq.Frame]


class PeerLostError(ConnectionError):
    """The process at the other end has ended, is silent, or sends no valid message."""


class Address(msgspec.Struct, frozen=True):
    """Where a listener is reached."""

    hosts: tuple[str, ...]  # addresses of its machine, the likeliest first
    port: int
    # The listener's public key of CURVE. No connection carries it: it is the secret that a process must know
    # to connect, so the address is published where only such processes read it.
    key: str

    def to_bytes(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Address":
        """ValueError for bytes that are no address."""
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"no address of a process: {error}") from error


class _End:
    """One end of connections; one thread at a time uses it."""

    def __init__(self, kind: int, messages: Any, silence_s: float, max_queued: int) -> None:
        self._kind, self._silence_s = kind, silence_s
        self._max_queued = max_queued
        self._socket = self._new_socket()
        self._async: zmq.asyncio.Socket | None = None
        self._decoder = msgspec.msgpack.Decoder(messages)

    def _new_socket(self) -> "zmq.Socket[bytes]":
        new = _context().socket(self._kind)
        new.setsockopt(zmq.LINGER, _LINGER_MS)
        new.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(self._silence_s * 250)))
        new.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, int(self._silence_s * 1000)))
        new.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
        new.setsockopt(zmq.SNDHWM, self._max_queued)
        new.setsockopt(zmq.RCVHWM, self._max_queued)
        new.curve_publickey, new.curve_secretkey = self._keys = zmq.curve_keypair()
        return new

    def close(self) -> None:
        """End all connections, once messages on their way have left (1 s at most)."""
        if self._async is not None:
            self._async.close()
        self._socket.close()

    def _decoded(self, frames: Frames) -> tuple[Any, memoryview | None]:
        try:
            return self._decoder.decode(frames[0].buffer), frames[1].buffer if len(frames) > 1 else None
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError) as error:
            raise PeerLostError(f"it sent an invalid message: {error}") from error

    def _received(self, timeout_s: float) -> Frames | None:
        """The frames of the next message; None if none comes in time."""
        if not self._socket.poll(round(1000 * max(0.0, timeout_s))):
            return None
        frames: Frames = self._socket.recv_multipart(copy=False)
        return frames

    async def await_message(self, timeout_s: float) -> None:
        """Return once `receive` has something to do, or no message comes in time."""
        if self._async is None:
            self._async = zmq.asyncio.Socket(self._socket)
        await self._async.poll(round(1000 * max(0.0, timeout_s)))


class Listener(_End):
    """Receives messages of any number of peers, and answers each by its name; peers connect to `address`."""

    def __init__(self, messages: Any, *, hosts: tuple[str, ...] = (), max_queued: int = 1000) -> None:
        """Listen on the first of this machine's `hosts`, or on all of its addresses; OSError where it cannot.

        Peers send `messages`, a struct or a union of tagged structs. `send` raises where more than
        `max_queued` wait for one peer; 0 for any number.
        """
        super().__init__(zmq.ROUTER, messages, SILENCE_S, max_queued)
        self._socket.curve_server = True
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            port = self._socket.bind_to_random_port(f"tcp://{hosts[0] if hosts else '*'}")
        except zmq.ZMQError as error:
            self.close()
            raise OSError(f"cannot listen on {hosts[0] if hosts else 'any address'}: {error}") from error
        self.address = Address(hosts or tuple(own_addresses()), port, self._keys[0].decode())
        self._invalid: set[bytes] = set()

    def receive(self, timeout_s: float) -> tuple[bytes, Any, memoryview | None] | None:
        """(Peer, message, payload) of the next valid message; None if none comes in time."""
        deadline = time.monotonic() + timeout_s
        while (frames := self._received(deadline - time.monotonic())) is not None:
            peer = frames[0].bytes
            if peer not in self._invalid and len(frames[1].buffer):
                try:
                    return peer, *self._decoded(frames[1:])
                except PeerLostError:
                    self._invalid.add(peer)
            if time.monotonic() > deadline + _SKIP_S:
                break
        return None

    def send(self, peer: bytes, message: msgspec.Struct, payload: Any = None) -> None:
        """Send a message, and bytes with it; PeerLostError for a peer that is gone, or reads nothing."""
        try:
            self._socket.send_multipart([peer, *_frames_of(message, payload)], zmq.NOBLOCK)
        except zmq.Again as error:
            raise PeerLostError("it does not read what it is sent") from error
        except zmq.ZMQError as error:
            raise PeerLostError("its connection is closed") from error

    def is_connected(self, peer: bytes) -> bool:
        """Whether a peer is there, and has sent valid messages only."""
        try:
            self._socket.send_multipart([peer, b""], zmq.NOBLOCK)
        except zmq.Again:
            pass  # it is there, and reads slowly
        except zmq.ZMQError:
            return False
        return peer not in self._invalid


class Link(_End):
    """Connects to a `Listener`."""

    def __init__(
        self,
        address: Address,
        messages: Any,
        timeout_s: float,
        *,
        silence_s: float = SILENCE_S,
        max_queued: int = 1000,
    ) -> None:
        """Block until connected; PeerLostError where no listener with this key accepts in `timeout_s`.

        The listener sends `messages`, and is lost where it answers no heartbeat for `silence_s`; `max_queued`
        is as for `Listener`.
        """
        super().__init__(zmq.DEALER, messages, silence_s, max_queued)
        failures: list[str] = []
        deadline = time.monotonic() + timeout_s
        for host in dict.fromkeys(address.hosts):
            try:
                self._connect(host, address, deadline)
            except (OSError, ValueError, zmq.ZMQError) as error:
                self.close()
                self._socket = self._new_socket()
                failures.append(f"{host}: {error}")
            else:
                return
        self.close()
        raise PeerLostError(f"it cannot be reached at port {address.port} ({'; '.join(failures)})")

    def _new_socket(self) -> "zmq.Socket[bytes]":
        new = super()._new_socket()
        new.setsockopt(zmq.IDENTITY, os.urandom(16).replace(b"\0", b"\1"))
        new.setsockopt(zmq.RECONNECT_IVL, 1 << 30)  # a lost listener stays lost; -1 would lose its messages
        self._ends = new.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._poller = zmq.Poller()
        for source in (new, self._ends):
            self._poller.register(source, zmq.POLLIN)
        return new

    def _connect(self, host: str, address: Address, deadline: float) -> None:
        self._socket.curve_serverkey = address.key.encode()
        socket.create_connection((host, address.port), max(0.001, deadline - time.monotonic())).close()
        self._socket.connect(f"tcp://{host}:{address.port}")
        is_there = self._ends.poll(max(1, int(1000 * (deadline - time.monotonic()))))
        if not is_there or recv_monitor_message(self._ends)["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED:
            raise ConnectionError("another process listens there")

    def close(self) -> None:
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._ends.close()
        super().close()

    def receive(self, timeout_s: float) -> tuple[Any, memoryview | None] | None:
        """(Message, payload) of the next message, or None; PeerLostError once all of a lost peer are read."""
        deadline = time.monotonic() + timeout_s
        while self._poller.poll(round(1000 * max(0.0, deadline - time.monotonic()))):
            frames = self._received(0.0)
            if frames is None:
                if not self.is_connected() and not self._socket.poll(_LAST_MESSAGES_MS):
                    raise PeerLostError("its connection is closed")
            elif len(frames[0].buffer):
                return self._decoded(frames)
        return None

    def send(self, message: msgspec.Struct, payload: Any = None) -> None:
        """Send a message, and bytes with it; PeerLostError where the listener is gone, or reads nothing."""
        if not self.is_connected():
            raise PeerLostError("its connection is closed")
        try:
            self._socket.send_multipart(_frames_of(message, payload), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise PeerLostError("it does not read what it is sent") from error

    def is_connected(self) -> bool:
        """Whether the listener is there."""
        return not (self._ends.closed or self._ends.poll(0))


def _frames_of(message: msgspec.Struct, payload: Any) -> list[Any]:
    return [msgspec.msgpack.encode(message), *([] if payload is None else [payload])]


@cache
def _context() -> "zmq.Context[zmq.Socket[bytes]]":
    return zmq.Context()


os.register_at_fork(after_in_child=_context.cache_clear)


def host_name() -> str:
    """A text that is equal for two processes that reach each other at 127.0.0.1."""
    network = "/proc/self/ns/net"
    return f"{socket.gethostname()} {os.stat(network).st_ino if os.path.exists(network) else ''}"


def own_addresses() -> Iterator[str]:
    """Addresses at which other processes may reach this one, those of its network first."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect((os.environ.get("MASTER_ADDR", "8.8.8.8"), 9))  # sends nothing; chooses a route
        yield probe.getsockname()[0]
    with suppress(OSError):
        yield from socket.gethostbyname_ex(socket.gethostname())[2]
    yield socket.gethostname()
    yield "127.0.0.1"
