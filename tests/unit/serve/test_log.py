"""What the log says of each request."""

import http.client
import json
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from oracle.latched_model import PATIENCE_S
from oracle.served import Served, serving, small_config, tiny_loaded

PROMPT = [5 + i % 80 for i in range(100)]
LONG: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 1900, "temperature": 0}
KEY = {"authorization": "Bearer key-of-ann"}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    config = small_config(num_kv_blocks=64)
    settings: dict[str, Any] = {"api_keys": {"ann": "key-of-ann"}, "request_timeout_s": PATIENCE_S}
    with serving(tiny_loaded(), config, **settings) as served:
        yield served


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> "Lines":
    caplog.set_level(logging.INFO, "mambaslots.serve")
    return Lines(caplog)


class Lines:
    """The log, read line by line."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def last(self) -> str:
        """What the next line says, without the id and the seconds; a line is written after its answer."""
        for _ in range(2000):
            if self._caplog.messages:
                message = self._caplog.messages[-1]
                self._caplog.clear()
                return message.partition(": ")[2].rpartition(" ")[0].rpartition(" ")[0]
            time.sleep(0.005)
        pytest.fail("no line was written")


@pytest.mark.parametrize("streams", [False, True])
def test_how_a_request_ended(served: Served, lines: Lines, streams: bool) -> None:
    served.post("/v1/completions", LONG | {"max_tokens": 2, "stream": streams}, **KEY)
    assert lines.last() == "POST /v1/completions 200"
    with closing(http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)) as client:
        headers = {"content-type": "application/json"} | KEY
        client.request("POST", "/v1/completions", json.dumps(LONG | {"stream": streams}), headers)
        if streams:
            client.getresponse().readline()
        else:
            while not served.stats().num_running:
                time.sleep(0.001)
        served.pass_time(PATIENCE_S)
        outcome_line = lines.last()
    outcome = "200 broken by timeout" if streams else "504"
    assert outcome_line == f"POST /v1/completions {outcome}"


def test_a_client_that_leaves_its_stream(served: Served, lines: Lines) -> None:
    body = b'{"prompt": [1, 2], "max_tokens": 1900, "stream": true}'
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" \
           f"Authorization: Bearer key-of-ann\r\nContent-Length: {len(body)}\r\n\r\n"  # fmt: skip
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as client:
        client.sendall(head.encode() + body)
        assert client.recv(12, socket.MSG_WAITALL) == b"HTTP/1.1 200"
    assert lines.last() == "POST /v1/completions 200 broken by client"


def test_a_stream_that_the_shutdown_ends(lines: Lines) -> None:
    with serving(tiny_loaded(), small_config(num_kv_blocks=64)) as other:
        service = other.app.state.service
        body = b'{"prompt": [1, 2], "max_tokens": 1900, "stream": true}'
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" \
               f"Content-Length: {len(body)}\r\n\r\n"  # fmt: skip
        with socket.create_connection(("127.0.0.1", other.port), timeout=60) as client:
            client.sendall(head.encode() + body)
            assert client.recv(12, socket.MSG_WAITALL) == b"HTTP/1.1 200"
            other.do(service.close)
            assert lines.last() == "POST /v1/completions 200 broken by cancelled"


def test_what_is_not_admitted_shows_nothing_of_its_path(served: Served, lines: Lines) -> None:
    for method, path in (
        ("POST", "/v1/completions?q=peculiar"),
        ("GET", "/v1/models/peculiar"),
        ("GET", "/v1/peculiar?q=peculiar"),
    ):
        assert served.send(method, path).status == 401
        assert lines.last() == f"{method} - 401"
    assert served.get("/metrics").status == 403
    assert lines.last() == "GET - 403"


# ---- odd requests


def test_a_body_that_does_not_end_is_not_waited_for(served: Served, lines: Lines) -> None:
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" \
           "Authorization: Bearer key-of-ann\r\nContent-Length: 100\r\n\r\n{"  # fmt: skip
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as client:
        client.sendall(head.encode())
        while not served.app.state.service._num_open:
            time.sleep(0.001)
        served.pass_time(PATIENCE_S)
        received = b""
        while part := client.recv(10_000):  # until the server closes the connection
            received += part
    assert received.startswith(b"HTTP/1.1 408 ")
    assert b"the body was not complete within" in received
    assert lines.last() == "POST /v1/completions 408"


@pytest.mark.parametrize("depth", [50, 500, 950, 2_000, 100_000])
def test_a_body_may_be_nested_deeply(served: Served, depth: int) -> None:
    nested = '{"a":' * depth + "1" + "}" * depth
    chat = '"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1'
    for path, fields in (
        ("completions", f'"prompt": [1], "max_tokens": 1, "metadata": {nested}'),
        ("completions", f'"prompt": {nested}'),
        ("completions", f'"prompt": [1], "response_format": {nested}'),
        ("chat/completions", f'{chat}, "chat_template_kwargs": {{"style": {nested}}}'),
        (
            "chat/completions",
            f'{chat}, "tools": [{{"type": "function", "function": {{"name": "f", "parameters": {nested}}}}}]',
        ),
        ("chat/completions", f'"messages": [{{"role": "user", "content": {nested}}}]'),
        (
            "chat/completions",
            f'"messages": [{{"role": "user", "content": "Hi", "reasoning": {nested}}}], "max_tokens": 1',
        ),
    ):
        reply = served.post(f"/v1/{path}", f"{{{fields}}}".encode(), **KEY)
        assert reply.status in (200, 400), (path, fields[:100])
        assert reply.status == 400 or depth < 100_000  # Python 3.14 reads 2,000


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ("application/json; charset=utf-8", 200),
        ('application/json; profile="a;b"; charset="UTF-8"', 200),
        ("application/json; charset=utf8", 200),
        ("Application/JSON; version=1", 200),
        ("application/json; charset=latin-1", 415),
        ("text/plain", 415),
        ("", 415),
    ],
)
def test_the_content_type_has_parameters(served: Served, given: str, status: int) -> None:
    body = json.dumps({"prompt": [1, 2], "max_tokens": 1}).encode()
    headers = {"content-type": given, "authorization": "Bearer key-of-ann"}
    assert served.post("/v1/completions", body, **headers).status == status


@pytest.mark.parametrize("path", ["/", "/health"])
def test_monitors_may_ask_for_the_head_alone(served: Served, path: str) -> None:
    reply = served.send("HEAD", path)
    assert (reply.status, reply.body) == (200, b"")
    assert reply.headers["content-length"] == str(len(served.get(path).body))


@pytest.mark.parametrize(
    "fields", [{"best_of": 1}, {"best_of": None}, {"min_p": 0.0, "echo": False}], ids=str
)
def test_values_that_change_nothing_are_ignored(served: Served, fields: dict[str, Any]) -> None:
    assert served.post("/v1/completions", {"prompt": [1], "max_tokens": 1} | fields, **KEY).status == 200


def test_a_value_that_changes_something_is_refused(served: Served) -> None:
    assert served.post("/v1/completions", {"prompt": [1], "best_of": 2}, **KEY).error["param"] == "best_of"
