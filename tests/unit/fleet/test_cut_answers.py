"""What the proxy adds to an answer that its ingress does not complete."""

import asyncio
import json
from typing import Any

import pytest

pytest.importorskip("fastapi")

from mambaslots.fleet.cut_answers import CutAnswers, middlewares

EVENTS = [(b"Content-Type", b"text/event-stream; charset=utf-8")]
PIECE = {"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True}
END = {"type": "http.response.body", "body": b"data: [DONE]\n\n"}


def sent(messages: list[dict[str, Any]], kind: str = "http") -> list[dict[str, Any]]:
    """What a client gets of an application that sends these messages."""
    found: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        for message in messages:
            await send(message)

    async def send(message: Any) -> None:
        found.append(message)

    asyncio.run(CutAnswers(application)({"type": kind}, None, send))  # type: ignore[arg-type]
    return found


def start(headers: list[tuple[bytes, bytes]]) -> dict[str, Any]:
    return {"type": "http.response.start", "status": 200, "headers": headers}


def test_a_cut_stream_ends_with_an_error_event() -> None:
    *same, last = sent([start(EVENTS), PIECE, PIECE])
    assert same == [start(EVENTS), PIECE, PIECE]
    assert not last.get("more_body")
    error = json.loads(last["body"].removeprefix(b"data: "))["error"]
    assert error["code"] == "no_replica"
    assert error["message"].endswith("send the request again")


def test_a_request_without_an_answer_gets_status_503() -> None:
    head, body = sent([])
    assert head["status"] == 503
    assert (b"retry-after", b"1") in head["headers"]
    assert json.loads(body["body"])["error"]["code"] == "no_replica"


def test_what_is_complete_or_no_stream_is_passed_on_as_it_is() -> None:
    for messages in ([start(EVENTS), PIECE, END], [start([]), PIECE]):
        assert sent(messages) == messages
    assert sent([], "lifespan") == []
    assert [one.cls for one in middlewares()] == [CutAnswers]
