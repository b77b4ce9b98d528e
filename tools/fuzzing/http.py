"""Requests over HTTP to a server on loopback: any method, path, query, header and body.

Malformed bodies are those of `malformed_bodies.py`. Each request goes over a connection of its own, as bytes.
What the server of HTTP, not the application, refuses is answered with 400 and a line of text.
"""

import errno
import json
import socket
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from fuzzing.engines import quiet
from fuzzing.malformed_bodies import GOOD, MAX_BODY_BYTES, Malformed
from fuzzing.target import ACCEPTED, NUMBERS, REFUSED, TEXTS, damaged_bytes, damaged_json

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from oracle.served import serving, small_config, tiny_loaded

_PATHS = (
    "/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/tiny", "/health", "/metrics",
    "/status.json",
    "/", "/page/page.js", "/page/index.html", "/page/../app.py", "/page/%2e%2e%2fapp.py", "/v1/models/",
    "/v1//completions",
    "/v1/completions/", "/%00", "/page/%ff", "/v1/models/%ed%a0%80", "//", "/..", "*",
    "http://other/health", "/docs",
    "/openapi.json", "/v1/models/" + "x" * 3000, "/é",
)  # fmt: skip
_METHODS = (
    "GET",
    "POST",
    "HEAD",
    "PUT",
    "DELETE",
    "OPTIONS",
    "PATCH",
    "TRACE",
    "CONNECT",
    "get",
    "X" * 50,
    "",
)
_KEYS = {"one": "key-of-one", "two": "key-of-two"}
_ADMIN = "key-of-the-operator"
_PROTOCOL_REFUSALS = (b"Invalid HTTP request received.", b"Unsupported upgrade request.")
_TIMEOUT_S, _SILENCE_S = 10.0, 0.1


@dataclass(frozen=True)
class Request:
    """Bytes of a request."""

    kind: str
    data: bytes
    pieces: int = 1

    @property
    def may_end_early(self) -> bool:
        """Whether the server may wait for more, or answer at length; else all of the answer is awaited."""
        return self.kind in ("json", "headers", "chunks", "bytes", "upgrade", "routes")


def request_bytes(
    method: str, path: str, headers: list[tuple[str, str]], body: bytes, version: str = "HTTP/1.1"
) -> bytes:
    lines = [f"{method} {path} {version}", *(f"{name}: {value}" for name, value in headers)]
    return "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogatepass") + body


def chunked(random: Random, body: bytes) -> bytes:
    """A body in chunks, some of which lie about their size."""
    parts = []
    while body:
        part, body = body[: random.choice((1, 7, 100, 5000))], body[5000:]
        size = (
            f"{len(part):x}"
            if random.random() < 0.9
            else random.choice(("0", "-1", "fffffffffffffffff", "zz", ""))
        )
        parts.append(size.encode() + b"\r\n" + part + b"\r\n")
    return b"".join(parts) + random.choice((b"0\r\n\r\n", b"0\r\nx: y\r\n\r\n", b""))


class Http:
    """Requests to one server, with keys or without."""

    documented: tuple[type[BaseException], ...] = ()

    def __init__(self, has_keys: bool) -> None:
        self.name = "HTTP with keys" if has_keys else "HTTP"
        self._has_keys = has_keys
        keys: dict[str, Any] = {"api_keys": _KEYS, "admin_key": _ADMIN} if has_keys else {}
        self._stack = ExitStack()
        self._stack.enter_context(quiet("uvicorn.error"))
        loaded = tiny_loaded()
        self._served = self._stack.enter_context(
            serving(loaded, small_config(), max_body_bytes=MAX_BODY_BYTES, **keys)
        )
        self._good = self._answers()

    def close(self) -> None:
        """Stop the server; what it leaves behind raises an AssertionError."""
        self._stack.close()

    # ---- what is sent

    def draw(self, random: Random) -> Request:
        kind = random.choice(
            ["good", "body", "body", "json", "headers", "headers", "routes", "chunks", "bytes", "upgrade"]
        )
        if kind == "body":
            sent = Malformed(random.getrandbits(32)).draw()
            headers = [*self._headers(), *sent.headers.items(), ("content-length", str(len(sent.body)))]
            latin = [(name, value.encode("latin-1", "replace").decode("latin-1")) for name, value in headers]
            return Request(f"body, {sent.kind}", request_bytes("POST", sent.path, latin, sent.body))
        path = random.choice(list(GOOD))
        body = json.dumps(GOOD[path]).encode()
        if kind == "json":
            body = json.dumps(damaged_json(random, GOOD[path])).encode("utf-8", "surrogatepass")
        headers = [*self._headers(), ("content-type", "application/json")]
        if kind == "chunks":
            chunks = chunked(random, body)
            return Request(
                kind, request_bytes("POST", path, [*headers, ("transfer-encoding", "chunked")], chunks)
            )
        whole = [*headers, ("content-length", str(len(body)))]
        if kind == "headers":
            return self._with_headers(random, path, whole, body)
        if kind == "routes":
            query = random.choice(("", "", "?", "?a=b&a=c", "?%ff=%00", "?" + "x" * 2000, "#x"))
            place = random.choice(_PATHS) + query
            return Request(kind, request_bytes(random.choice(_METHODS), place, whole, body))
        data = request_bytes("POST", path, whole, body)
        if kind == "bytes":
            return Request(kind, damaged_bytes(random, data)[:200_000], random.choice((1, 1, 3)))
        if kind == "upgrade":
            return self._upgrade(random)
        return Request(kind, data)

    def _headers(self) -> list[tuple[str, str]]:
        found = [("host", "x"), ("connection", "close")]
        return [*found, ("authorization", f"Bearer {_KEYS['one']}")] if self._has_keys else found

    def _with_headers(
        self, random: Random, path: str, headers: list[tuple[str, str]], body: bytes
    ) -> Request:
        texts = [text for text in TEXTS if "\n" not in text and "\x00" not in text]
        values = [
            *texts,
            *map(str, NUMBERS[:-1]),
            "Bearer",
            "Bearer \xff",
            "Basic x",
            f"Bearer {_ADMIN}",
            "gzip",
            "chunked",
        ]
        names = [
            "content-length", "content-type", "content-encoding", "transfer-encoding", "authorization",
            "expect",
            "x-cache-salt", "accept-encoding", "if-none-match", "host", "connection", "x-request-id",
            "cookie", "range",
        ]  # fmt: skip
        for _ in range(random.choice((1, 1, 2, 5))):
            name, value = random.choice(names), random.choice(values)
            if name == "content-length" and random.random() < 0.5:
                value = str(len(body) + random.choice((-10, -1, 1, 100, 10**9, 10**18)))
            way = random.randrange(3)
            if way == 0:
                headers = [(each, value if each == name else old) for each, old in headers]
            elif way == 1:
                headers = [*headers, (name, value)]
            else:
                headers = [(each, old) for each, old in headers if each != name]
        if random.random() < 0.05:
            headers += [(f"x-{number}", "y" * 50) for number in range(random.choice((200, 2000)))]
        place = path if random.random() < 0.7 else random.choice(_PATHS)
        method = "POST" if random.random() < 0.7 else random.choice(("GET", "HEAD"))
        return Request("headers", request_bytes(method, place, headers, body))

    def _upgrade(self, random: Random) -> Request:
        headers = [
            ("host", "x"), ("connection", "Upgrade"), ("upgrade", random.choice(("websocket", "h2c", "x"))),
            ("sec-websocket-key", random.choice(("dGhlIHNhbXBsZSBub25jZQ==", "", "x"))),
            ("sec-websocket-version", random.choice(("13", "8", "x"))),
        ]  # fmt: skip
        return Request("upgrade", request_bytes("GET", random.choice(_PATHS), headers, random.randbytes(20)))

    def size_of(self, drawn: object) -> int:
        assert isinstance(drawn, Request)
        return len(drawn.data)

    # ---- what becomes of it

    def feed(self, drawn: object) -> str:
        assert isinstance(drawn, Request)
        reply = self._sent(drawn)
        status = self._checked(drawn, reply)
        if status is not None and status < 400 and drawn.kind == "good" and not self._has_keys:
            assert self._answers() == self._good, "good requests are not answered as before"
        assert status == 200 or drawn.kind != "good", reply
        self._check_idle()
        return ACCEPTED if status is not None and status < 400 else REFUSED

    def _sent(self, drawn: Request) -> bytes:
        """All that the server says."""
        with socket.create_connection(("127.0.0.1", self._served.port), _TIMEOUT_S) as connection:
            size = -(-len(drawn.data) // drawn.pieces) or 1
            received = b""
            try:
                for start in range(0, len(drawn.data), size):
                    connection.sendall(drawn.data[start : start + size])
                if drawn.may_end_early:
                    received = _until_silent(connection)
                    connection.shutdown(socket.SHUT_WR)
                while part := connection.recv(1 << 16):
                    received += part
            except (ConnectionResetError, BrokenPipeError):
                pass
            except OSError as error:  # of `shutdown`: the server has closed the connection
                if error.errno != errno.ENOTCONN:
                    raise
        return received

    def _checked(self, drawn: Request, reply: bytes) -> int | None:
        """The status of the last answer; None where there is none, because the request never was complete."""
        status = None
        while reply:
            head, _, rest = reply.partition(b"\r\n\r\n")
            line, *lines = head.split(b"\r\n")
            status = int(line.split(b" ")[1])
            assert status < 500, f"{drawn.kind}: {reply[:600]!r} to {drawn.data[:300]!r}"
            if status == 100:
                reply = rest
                continue
            headers = {
                name.lower(): value.strip() for name, _, value in (each.partition(b":") for each in lines)
            }
            if status >= 400 and rest not in _PROTOCOL_REFUSALS and drawn.data[:4] != b"HEAD":
                self._check_refusal(headers, rest)
            break
        return status

    def _check_refusal(self, headers: dict[bytes, bytes], body: bytes) -> None:
        """A refusal of the application has the documented form."""
        length = int(headers.get(b"content-length", b"0"))
        if not length and b"x-request-id" not in headers:
            return  # of an upgrade, by the server of websockets
        assert length <= len(body), (headers, body)
        error = json.loads(body[:length])["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        assert isinstance(error["message"], str), error
        assert 0 < len(error["message"]) <= 400, error
        assert not any(word in error["message"] for word in ("Traceback", ".py", "object at 0x")), error
        assert headers.get(b"x-request-id", b"").startswith(b"req-"), headers

    def _check_idle(self) -> None:
        """No request of a client that is gone runs on, and integrity holds."""
        for _ in range(200):
            stats = self._served.stats()
            if not (stats.num_running or stats.num_waiting):
                break
            time.sleep(0.01)
        cache = stats.cache
        left = stats.num_running, stats.num_waiting, cache.num_held_kv_blocks, cache.num_reserved_slots
        assert not any(left), f"left behind a request: {left}"
        self._served.call(lambda engine: engine.check_integrity())

    def _answers(self) -> list[Any]:
        fixed = {"temperature": 0, "stream": False, "return_token_ids": True, "max_tokens": 2}
        key = {"authorization": f"Bearer {_KEYS['one']}"} if self._has_keys else {}
        replies = [self._served.post(path, body | fixed, **key) for path, body in GOOD.items()]
        assert [reply.status for reply in replies] == [200, 200]
        return [reply.json["choices"] for reply in replies]


def _until_silent(connection: socket.socket) -> bytes:
    """What the server says until it waits, perhaps for the rest of a request that never comes.

    An answer without end is not awaited: a client that leaves before it is complete is gone.
    """
    received, begin = b"", time.perf_counter()
    connection.settimeout(_SILENCE_S)
    try:
        while time.perf_counter() - begin < 3 * _SILENCE_S and (part := connection.recv(1 << 16)):
            received += part
    except TimeoutError:
        pass
    connection.settimeout(_TIMEOUT_S)
    return received
