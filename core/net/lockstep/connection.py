"""A connection between two ranks of one replica: whole messages, in order, until one of the two is gone."""

import hmac
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

_LENGTH = struct.Struct("!Q")
_RANK = struct.Struct("!I")
_NONCE_BYTES = _PROOF_BYTES = 32
_PIECE_BYTES = 1 << 20
# A machine that is gone answers no probe: its connections end after 5 + 5 x 2 s. A process that died ends
# them at once.
_PROBES = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 5, "TCP_USER_TIMEOUT": 15_000}


class Connection:
    """Sends and receives messages of any length; every error of the other side is a ConnectionError."""

    def __init__(self, sock: socket.socket, send_timeout_s: float | None = None) -> None:
        """
        Args:
            sock: connected; it is closed with the connection.
            send_timeout_s: how long the other side may take to read on; None: for ever.
        """
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _PROBES.items():
            if hasattr(socket, option):  # macOS lacks some
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        if send_timeout_s is not None:
            seconds, rest = divmod(send_timeout_s, 1.0)
            sock.setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), int(rest * 1e6))
            )
        self._sock = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def send(self, message: bytes) -> None:
        """Send a message; blocks while the other side does not read and the buffers are full."""
        try:
            self._sock.sendall(_LENGTH.pack(len(message)) + message)
        except BlockingIOError as error:  # SO_SNDTIMEO
            raise ConnectionError("it does not read what it is sent") from error
        except OSError as error:
            raise _gone(error) from error

    def receive(self) -> bytes:
        """The next message; blocks until it is there."""
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size))
        return self._take(length) if length else b""

    def is_readable(self, timeout_s: float | None = 0.0) -> bool:
        """Whether `receive` would find a message, or the connection's end; waits `timeout_s` for that."""
        return bool(self._poll.poll(None if timeout_s is None else timeout_s * 1000))

    def _take(self, length: int) -> bytes:
        content = bytearray()
        while len(content) < length:
            try:
                piece = self._sock.recv(min(length - len(content), _PIECE_BYTES), socket.MSG_WAITALL)
            except OSError as error:
                raise _gone(error) from error
            if not piece:
                raise ConnectionError("its connection is closed")
            content += piece
        return bytes(content)

    def close(self) -> None:
        """Close the connection; a second call does nothing."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


class MeetingPoint(NamedTuple):
    """Where followers reach the leading rank. Whoever knows `key` is of the same replica.

    Attributes:
        hosts: addresses of the leading rank's machine, the likeliest first.
        port: where the leading rank listens.
        key: 32 secret bytes, which both sides prove that they know, and which no connection carries.
    """

    hosts: tuple[str, ...]
    port: int
    key: bytes


class Listener:
    """Where the leading rank waits for its followers.

    Attributes:
        point: what followers need to know; it travels over the replica's process groups.
    """

    def __init__(self, alone_on_host: bool) -> None:
        """`alone_on_host`: whether all ranks are on this machine, so that no other one can connect."""
        self._sock = socket.create_server(("127.0.0.1" if alone_on_host else "", 0), backlog=128)
        hosts = ("127.0.0.1",) if alone_on_host else (*_own_addresses(), "127.0.0.1")
        self.point = MeetingPoint(hosts, self._sock.getsockname()[1], secrets.token_bytes(32))

    def accept(self, ranks: set[int], timeout_s: float) -> dict[int, Connection]:
        """The connections of these ranks, by rank. Others that connect are turned away.

        Raises:
            TimeoutError: ranks have not come within `timeout_s`; its argument lists them.
        """
        deadline = time.monotonic() + timeout_s
        connections: dict[int, Connection] = {}
        while missing := ranks - connections.keys():
            try:
                self._sock.settimeout(max(0.001, deadline - time.monotonic()))
                sock, _ = self._sock.accept()
            except TimeoutError:
                self.close()
                for connection in connections.values():
                    connection.close()
                raise TimeoutError(sorted(missing)) from None
            rank = self._greeted(sock, min(5.0, timeout_s))
            if rank in missing:
                connections[rank] = Connection(sock, timeout_s)
            else:
                sock.close()
        return connections

    def _greeted(self, sock: socket.socket, timeout_s: float) -> int:
        """The rank at the other end, -1 where that does not know the key."""
        key, nonce = self.point.key, secrets.token_bytes(_NONCE_BYTES)
        try:
            sock.settimeout(timeout_s)
            sock.sendall(nonce)
            answer = _exactly(sock, _RANK.size + _NONCE_BYTES + _PROOF_BYTES)
            asked, proof = answer[:-_PROOF_BYTES], answer[-_PROOF_BYTES:]
            if not hmac.compare_digest(proof, _proof(key, b"follower", nonce + asked)):
                return -1
            sock.sendall(_proof(key, b"leader", asked + nonce))
        except OSError:
            return -1
        return int(_RANK.unpack_from(asked)[0])

    def close(self) -> None:
        self._sock.close()


def connect(point: MeetingPoint, rank: int, timeout_s: float) -> Connection:
    """Connect a follower with the leading rank.

    Raises:
        ConnectionError: none of the addresses leads there within `timeout_s`.
    """
    failures = []
    for host in dict.fromkeys(point.hosts):
        try:
            sock = socket.create_connection((host, point.port), timeout_s)
        except OSError as error:
            failures.append(f"{host}: {error}")
            continue
        try:
            if _knows_key(sock, point.key, rank):
                return Connection(sock)
            failures.append(f"{host}: another process listens there")
        except OSError as error:
            failures.append(f"{host}: {error}")
        sock.close()
    raise ConnectionError(f"the leading rank cannot be reached at port {point.port} ({'; '.join(failures)})")


def _knows_key(sock: socket.socket, key: bytes, rank: int) -> bool:
    """Prove that this side knows the key, and whether the other side does."""
    nonce = _exactly(sock, _NONCE_BYTES)
    asked = _RANK.pack(rank) + secrets.token_bytes(_NONCE_BYTES)
    sock.sendall(asked + _proof(key, b"follower", nonce + asked))
    return hmac.compare_digest(_exactly(sock, _PROOF_BYTES), _proof(key, b"leader", asked + nonce))


def _proof(key: bytes, side: bytes, content: bytes) -> bytes:
    return hmac.digest(key, side + content, "sha256")


def _exactly(sock: socket.socket, length: int) -> bytes:
    content = b""
    while len(content) < length:
        piece = sock.recv(length - len(content))
        if not piece:
            raise ConnectionError("its connection is closed")
        content += piece
    return content


def host_name() -> str:
    """A text that is equal for two processes that reach each other at 127.0.0.1."""
    network = "/proc/self/ns/net"
    return f"{socket.gethostname()} {os.stat(network).st_ino if os.path.exists(network) else ''}"


def _own_addresses() -> Iterator[str]:
    """Addresses at which other machines may reach this one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect((os.environ.get("MASTER_ADDR", "8.8.8.8"), 9))  # sends nothing; chooses a route
        yield probe.getsockname()[0]
    with suppress(OSError):
        yield from socket.gethostbyname_ex(socket.gethostname())[2]
    yield socket.gethostname()


def _gone(error: OSError) -> ConnectionError:
    return ConnectionError(f"its connection is lost: {error}")
