"""Clients that end their sending side."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from oracle.served import Served, serving, small_config, tiny_loaded

BODY = {"prompt": [5 + i % 80 for i in range(100)], "max_tokens": 100, "temperature": 0}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(tiny_loaded(), small_config(max_requests=2)) as served:
        yield served


def sent(fields: dict[str, Any]) -> bytes:
    body = json.dumps(BODY | fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n\
Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def all_of(client: socket.socket) -> bytes:
    """What comes until the server ends the connection."""
    return b"".join(iter(lambda: client.recv(65536), b""))


@pytest.mark.sampled
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("num_requests", [1, 2])
def test_a_client_that_sends_nothing_more_gets_its_answers(
    served: Served, streams: bool, num_requests: int
) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as client:
        client.sendall(sent({"stream": streams}) * num_requests)
        client.shutdown(socket.SHUT_WR)
        received = all_of(client)
    assert received.count(b"HTTP/1.1 200") == num_requests
    assert received.count(b'"finish_reason":"length"') == num_requests
    assert served.stats().num_running == 0


def test_a_client_that_ends_within_its_request_gets_none(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as client:
        client.sendall(sent({})[:-1])
        client.shutdown(socket.SHUT_WR)
        assert b"200" not in all_of(client)
