"""A server in a process of its own is stopped by real signals."""

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mambaslots as ms
import pytest
from mambaslots.serve import ServerSettings, serve
from mambaslots.serve.middleware import add_host_header_check
from oracle.fresh_process import Begun
from oracle.served import Reply, serving, small_config, tiny_loaded
from oracle.texts import blocks_of
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

ROOT = Path(__file__).parents[3]
PROMPT = [5 + i % 80 for i in range(100)]


@dataclass
class Process:
    """A server, and where it listens."""

    process: Begun
    port: int

    def ask(self, path: str, body: dict[str, Any] | None = None, **headers: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        sent = None if body is None else json.dumps(body)
        method, headers = "POST" if body else "GET", {"content-type": "application/json"} | headers
        connection.request(method, path, sent, headers)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return response.status, content

    def stream(self, num_tokens: int) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """A stream that has begun; its first event is the next one."""
        body = {"prompt": PROMPT, "max_tokens": num_tokens, "temperature": 0, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        sent = json.dumps(body | {"return_token_ids": True})
        connection.request("POST", "/v1/completions", sent, {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200
        return connection, response

    def end(self) -> tuple[int, str]:
        """The exit code and what came on stderr."""
        code = self.process.wait(60)
        assert code is not None, "the server has not ended"
        return code, self.process.errors


@contextmanager
def process(**settings: Any) -> Iterator[Process]:
    """A server on a free port; the environment finds this tree."""
    paths = [str(ROOT / "stubs"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    script = str(ROOT / "tests/oracle/serve_tiny.py")
    with closing(Begun(script, json.dumps({"port": 0} | settings), env=environment)) as started:
        line = started.first_line()
        assert line.startswith("mambaslots serves tiny at http://127.0.0.1:"), started.errors
        yield Process(started, int(line.rpartition(":")[2]))


def events(response: http.client.HTTPResponse) -> list[Any]:
    lines = [line[6:].strip() for line in response if line.startswith(b"data: ")]
    return [json.loads(line) if line != b"[DONE]" else "[DONE]" for line in lines]


def health_until(server: Process, wanted: int) -> None:
    for _ in range(5000):
        if server.ask("/health")[0] == wanted:
            return
        time.sleep(0.01)
    pytest.fail(f"/health never was {wanted}")


def test_sigterm_lets_answers_end_and_takes_no_new_ones(tmp_path: Path) -> None:
    """Also after the server was out of descriptors: silent connections are closed, and others served."""
    num_tokens = 150
    go_on = tmp_path / "go on"
    settings = {"drain_timeout_s": 60, "max_files": 200}  # the soft limit, 100, is raised
    with process(**settings, pauses_until=str(go_on)) as server:
        _closes_silent_connections(server)
        assert server.ask("/health", host="evil.example")[0] == 403
        connection, response = server.stream(num_tokens)
        server.process.signal(signal.SIGTERM)
        health_until(server, 503)
        status, body = server.ask("/v1/completions", {"prompt": PROMPT})
        assert (status, json.loads(body)["error"]["code"]) == (503, "draining")
        go_on.touch()
        received = events(response)
        connection.close()
        assert received[-1] == "[DONE]"
        assert received[-2]["choices"][0]["finish_reason"] == "length"
        code, errors = server.end()
    assert code == 0, errors
    tokens = [token for event in received[:-1] for token in event["choices"][0]["token_ids"]]
    engine = ms.DynamicInferenceEngine(tiny_loaded().model, small_config(max_requests=2))
    params = ms.SamplingParams(max_tokens=num_tokens)
    (result,) = engine.generate([PROMPT], params)
    assert tokens == result.tokens
    assert "no connection can be accepted (Too many open files)" in errors
    assert "Traceback" not in errors


@pytest.mark.long
def test_control_c_cancels_what_takes_longer_than_the_drain() -> None:
    with process(drain_timeout_s=0.2) as server:
        connection, response = server.stream(1900)
        server.process.signal(signal.SIGINT)
        error = events(response)[-1]["error"]
        connection.close()
        assert error["code"] == "cancelled"
        code, errors = server.end()
    assert code == 0, errors
    assert "Traceback" not in errors


@pytest.mark.long
def test_a_second_signal_ends_the_drain() -> None:
    with process(drain_timeout_s=1000) as server:
        connection, response = server.stream(1900)
        server.process.signal(signal.SIGTERM)
        health_until(server, 503)
        server.process.signal(signal.SIGTERM)
        assert events(response)[-1]["error"]["code"] == "cancelled"
        connection.close()
        code, errors = server.end()
    assert code == 0, errors


@pytest.mark.parametrize(
    ("num_signals", "reason"),
    [
        (1, "the engine is still in a step"),
        (2, "the engine is still in a step"),
        (3, "SIGTERM for the third time"),
    ],
)
@pytest.mark.long
def test_a_step_that_hangs_holds_no_process(num_signals: int, reason: str) -> None:
    with process(drain_timeout_s=0.1 if num_signals == 1 else 1000, hangs=True) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        sent = json.dumps({"prompt": PROMPT})
        connection.request("POST", "/v1/completions", sent, {"content-type": "application/json"})
        time.sleep(0.5)
        for _ in range(num_signals):
            server.process.signal(signal.SIGTERM)
            health_until(server, 503) if num_signals < 3 else time.sleep(0.2)
        code, errors = server.end()
        connection.close()
    assert code == 1
    assert f"mambaslots: {reason}; the process ends" in errors


def _refuses_heads_without_end(served: Process) -> None:
    for start in (b"GET /health HTTP/1.1\r\nx-long: ", b"GET /health?"):
        with socket.create_connection(("127.0.0.1", served.port), timeout=20) as client:
            client.sendall(start)
            sent = 0
            try:
                while sent < 4 << 20:
                    sent += client.send(b"x" * 65536)
                answer = client.recv(4096)
            except OSError:  # the server has closed the connection
                answer = b""
            assert sent < 4 << 20 or answer.startswith(b"HTTP/1.1 400 "), start
        assert served.ask("/health")[0] == 200


def test_streams_that_nobody_reads_hold_no_process() -> None:
    """Nor is a request accepted whose head has no end."""
    body = {"prompt": PROMPT, "max_tokens": 1900, "temperature": 0, "stream": True, "logprobs": 20}
    sent = json.dumps(body | {"return_token_ids": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    unread = []
    with process(drain_timeout_s=1.0, max_requests=2) as server:
        _refuses_heads_without_end(server)
        for _ in range(2):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # full after some tokens
            client.connect(("127.0.0.1", server.port))
            client.sendall(head + b"content-length: %d\r\n\r\n" % len(sent) + sent)
            unread.append(client)
        time.sleep(1)  # their writers wait for room in the sockets
        begin = time.monotonic()
        server.process.signal(signal.SIGTERM)
        code, _ = server.end()
        took = time.monotonic() - begin
        for client in unread:
            client.close()
    assert code == 0
    assert 1.0 < took < 30, "no stream ended before the drain did"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("LOCALHOST:80", 200), ("127.0.0.1:80", 200), ("127.0.0.2", 200),
        ("[::1]:80", 200), ("chat.example", 200), ("chat.example:80", 200), ("evil.example", 403),
        ("10.0.0.1", 403), ("", 403), ("localhost.evil.example:80", 403), ("evil.example:localhost", 403),
        ("[localhost]evil", 403), ("[::1]evil.example", 403), ("[::1]", 200), ("::1", 200),
        ("localhost:evil", 403),
    ],
)  # fmt: skip
def test_a_page_with_a_name_of_its_own_is_refused(host: str, status: int) -> None:
    settings = ServerSettings(model_name="tiny", allowed_hosts=("Chat.example",))
    app = Starlette(routes=[Route("/", lambda request: Response())])
    add_host_header_check(app, settings)
    statuses = []

    async def send(message: Any) -> None:
        statuses.append(message.get("status"))

    headers = [(b"host", host.encode())]
    scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": headers}
    asyncio.run(app(scope, None, send))  # type: ignore[arg-type]
    assert statuses[0] == status


@pytest.mark.parametrize(
    ("settings", "checks", "warns"),
    [
        ({}, 1, None),
        ({"host": "::1"}, 1, None),
        ({"allowed_hosts": ("*",)}, 0, None),
        ({"api_keys": {"ann": "key"}}, 0, None),
        ({"host": "0.0.0.0", "api_keys": {"ann": "key"}}, 0, None),
        ({"host": "0.0.0.0"}, 0, "is served, and sees the operator's page"),
        ({"host": "0.0.0.0", "admin_key": "key"}, 0, "is served"),
    ],
)
def test_a_server_that_everybody_reaches_warns(
    settings: dict[str, Any], checks: int, warns: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    app = Starlette()
    add_host_header_check(app, ServerSettings(model_name="tiny", **settings))
    assert len(app.user_middleware) == checks
    messages = [
        record.getMessage() for record in caplog.records if record.name == "mambaslots.serve.middleware"
    ]
    assert len(messages) == (warns is not None)
    assert warns is None or warns in messages[0]
    assert ("sees" in caplog.text) == (warns is not None and "sees" in warns)


@pytest.mark.parametrize("streams", [pytest.param(False, marks=pytest.mark.long), True])
def test_what_runs_when_the_drain_is_over_is_cancelled(streams: bool) -> None:
    config = small_config(num_kv_blocks=64)
    with (
        serving(tiny_loaded(), config, drain_timeout_s=0.1) as served,
        closing(http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)) as client,
    ):
        sent = json.dumps({"prompt": PROMPT, "max_tokens": 1900, "stream": streams})
        client.request("POST", "/v1/completions", sent, {"content-type": "application/json"})
        if streams:  # the client has its first event before the drain begins
            response = client.getresponse()
            assert response.readline().startswith(b"data: ")
            response.readline()
        core = served.app.state.engine._engine.core
        while not any(one.num_new for one in list(core.requests.values())):
            time.sleep(0.001)
        assert served.do(served.app.state.service.drain) is False
        if not streams:
            response = client.getresponse()
        answer = Reply(response.status, {}, response.read())
        error = answer.events[-1]["error"] if streams else answer.error
        assert error["code"] == "cancelled"
        assert answer.status == (200 if streams else 503)
        assert served.get("/health").error["code"] == "draining"
        refused = served.post("/v1/chat/completions", {})
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")


@pytest.mark.long
def test_the_program_of_the_page_runs() -> None:
    """The block "python serve" of docs/server.md."""
    (block,) = (one for one in blocks_of(ROOT / "docs/server.md") if one.words == ["python", "serve"])
    paths = [str(ROOT / "stubs"), os.environ.get("PYTHONPATH", "")]
    with subprocess.Popen(
        [sys.executable, "-c", block.code.replace("port=8000", "port=0")],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        text=True,
    ) as started:
        try:
            assert started.stdout is not None
            assert started.stdout.readline().startswith("mambaslots serves tiny-code at http://127.0.0.1:")
            started.send_signal(signal.SIGTERM)
            assert started.wait(60) == 0
        finally:
            started.kill()


def test_an_address_in_use_is_reported_in_a_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        loaded = tiny_loaded()
        engine = ms.DynamicInferenceEngine(loaded.model, small_config(num_kv_blocks=64))
        assert serve(engine, loaded, ServerSettings(model_name="tiny", port=port)) == 1


def health_over(connection: http.client.HTTPConnection) -> int:
    connection.request("GET", "/health")
    answer = connection.getresponse()
    answer.read()
    return answer.status


def _closes_silent_connections(server: Process) -> None:
    with ExitStack() as clients:
        kept = [http.client.HTTPConnection("127.0.0.1", server.port, timeout=60) for _ in range(20)]
        for connection in kept:
            clients.callback(connection.close)
            assert health_over(connection) == 200
        server.process.signal(signal.SIGSTOP)  # it finds all of them at once
        for _ in range(200):
            clients.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
        server.process.signal(signal.SIGCONT)
        begun_s = time.monotonic()
        assert server.ask("/health")[0] == 200
        assert time.monotonic() - begun_s < 10
        for connection in kept:  # those without any request are closed first
            assert health_over(connection) == 200
        figures = server.ask("/metrics")[1].decode().splitlines()
        (count,) = [
            line.split()[1] for line in figures if line.startswith("mambaslots_failed_accepts_total ")
        ]
        assert float(count) >= 1
