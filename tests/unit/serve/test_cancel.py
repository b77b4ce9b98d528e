"""A client that goes away frees its slot, whatever its request was doing."""

import json
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import mambaslots as ms
import pytest
from oracle.served import Served, serving, small_config, tiny_loaded

PROMPT = [5 + i % 80 for i in range(100)]
LONG = {"prompt": PROMPT, "max_tokens": 1900, "temperature": 0}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(tiny_loaded(), small_config(max_requests=2)) as served:
        yield served


def connect(served: Served, body: dict[str, Any]) -> socket.socket:
    """A client that has sent its request."""
    sent = json.dumps(body).encode()
    client = socket.create_connection(("127.0.0.1", served.port), timeout=60)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n\
Content-Length: {len(sent)}\r\n\r\n"
    client.sendall(head.encode() + sent)
    return client


def numbers(served: Served) -> tuple[int, int, int]:
    """Running, waiting, KV blocks held."""
    stats = served.stats()
    return stats.num_running, stats.num_waiting, stats.cache.num_held_kv_blocks


def wait_for(served: Served, running: int, waiting: int = 0) -> None:
    for _ in range(3000):
        if numbers(served)[:2] == (running, waiting):
            return
        time.sleep(0.002)
    pytest.fail(f"{numbers(served)} in place of {(running, waiting)}")


@pytest.mark.parametrize("way", ["close", "reset"])
@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 2, "stream": True}], ids=str)
def test_a_running_request_is_cancelled(served: Served, fields: dict[str, Any], way: str) -> None:
    client = connect(served, LONG | fields)
    wait_for(served, running=fields.get("n", 1))
    if fields.get("stream"):
        assert client.recv(12, socket.MSG_WAITALL) == b"HTTP/1.1 200"
    if way == "reset":
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    wait_for(served, running=0)
    assert numbers(served) == (0, 0, 0)
    served.call(lambda engine: engine.check_integrity())


def test_a_waiting_request_is_cancelled(served: Served) -> None:
    running = [connect(served, LONG) for _ in range(2)]
    wait_for(served, running=2)
    waiting = connect(served, LONG)
    wait_for(served, running=2, waiting=1)
    waiting.close()
    wait_for(served, running=2)
    for client in running:
        client.close()
    wait_for(served, running=0)


@pytest.mark.parametrize("streams", [False, True])
def test_a_slot_is_free_within_a_step(served: Served, streams: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    make_step, cancel = ms.DynamicInferenceEngine.step, ms.TokenStream.cancel

    def noted_step(engine: ms.DynamicInferenceEngine) -> ms.StepReport:
        events.append(f"a step of {engine.stats().num_running}")
        return make_step(engine)

    def noted_cancel(stream: ms.TokenStream[Any]) -> None:
        events.append("cancelled")
        cancel(stream)

    client = connect(served, LONG | {"stream": streams})
    wait_for(served, running=1)
    monkeypatch.setattr(ms.DynamicInferenceEngine, "step", noted_step)
    monkeypatch.setattr(ms.TokenStream, "cancel", noted_cancel)
    client.close()
    wait_for(served, running=0)
    after = events[events.index("cancelled") :]
    assert after.count("a step of 1") <= 1


def test_a_client_that_leaves_within_its_body(served: Served) -> None:
    client = socket.create_connection(("127.0.0.1", served.port), timeout=60)
    client.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: 500\r\n\r\n{"
    )
    client.close()
    assert served.post("/v1/completions", {"prompt": [1], "max_tokens": 1}).status == 200
    wait_for(served, running=0)


def test_others_go_on(served: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "return_token_ids": True}
    client = connect(served, LONG | {"stream": True})
    wait_for(served, running=1)
    other = connect(served, body)
    wait_for(served, running=2)
    client.close()
    received = b""
    while part := other.recv(10000):
        received += part
        if b"usage" in received:
            break
    answer = json.loads(received.partition(b"\r\n\r\n")[2])
    (result,) = served.reference.generate([PROMPT], ms.SamplingParams(max_tokens=40))
    assert answer["choices"][0]["token_ids"] == result.tokens
    other.close()
