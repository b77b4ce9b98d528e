"""Whatever is sent, the server answers and loses nothing; what is malformed is refused in a sentence."""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.served import Served, serving, small_config, tiny_loaded

sys.path.append(str(Path(__file__).parents[3] / "tools"))
from fuzzing.malformed_bodies import (
    CHATS,
    COMPLETIONS,
    GOOD,
    JSON,
    KINDS,
    MAX_BODY_BYTES,
    Malformed,
    wrong_values,
)
from server_fuzz import fault_of

NUM_BODIES = settings.default.max_examples  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(tiny_loaded(), small_config(), max_body_bytes=MAX_BODY_BYTES) as served:
        yield served


@pytest.fixture(autouse=True)
def _good_requests_are_answered_as_before(served: Served) -> Iterator[None]:
    before = answers(served)
    yield
    assert answers(served) == before
    stats = served.stats()
    assert (stats.num_running, stats.num_waiting, stats.cache.num_held_kv_blocks) == (0, 0, 0)
    assert stats.cache.num_reserved_slots == 0
    served.call(lambda engine: engine.check_integrity())


def answers(served: Served) -> list[Any]:
    fixed = {"temperature": 0, "stream": False, "return_token_ids": True}
    replies = [served.post(path, body | fixed) for path, body in GOOD.items()]
    assert [reply.status for reply in replies] == [200, 200]
    return [reply.json["choices"] for reply in replies]


@pytest.mark.parametrize("kind", KINDS)
def test_a_malformed_request_is_refused_in_a_sentence(served: Served, kind: str) -> None:
    malformed = Malformed(seed=len(kind))
    for _ in range(max(5, NUM_BODIES // 10)):
        sent = malformed.of(kind)
        reply = served.send("POST", sent.path, sent.body, sent.headers)
        assert fault_of(reply.status, reply.headers, reply.body) is None, (sent, reply)


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_every_wrong_value_is_refused(served: Served, path: str) -> None:
    for body in wrong_values(path):
        reply = served.post(path, body)
        assert 400 <= reply.status < 500, (body, reply)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=8), values, max_size=3),
    max_leaves=6,
)
FIELDS = (
    "prompt", "messages", "stop", "n", "logprobs", "top_logprobs", "seed", "temperature", "top_p", "top_k",
    "stream", "stream_options", "stop_token_ids", "tools", "tool_choice", "chat_template_kwargs",
    "checkpoints", "model", "cache_salt", "ignore_eos", "return_token_ids", "response_format", "user",
)  # fmt: skip


@given(
    st.sampled_from([COMPLETIONS, CHATS]),
    st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=2),
    st.none()
    | st.lists(st.dictionaries(st.sampled_from(["role", "content", "name", "tool_calls"]), JSON_VALUES)),
)
def test_any_value_of_any_field_is_served_or_refused(
    served: Served, path: str, fields: dict[str, Any], messages: Any
) -> None:
    body = GOOD[path] | ({} if messages is None else {"messages": messages}) | fields
    check(served, path, json.dumps(body).encode())


@given(st.sampled_from([COMPLETIONS, CHATS]), st.integers(0, 2**32))
def test_any_bytes_are_served_or_refused(served: Served, path: str, seed: int) -> None:
    """Bytes of a good body are changed, dropped and repeated."""
    draw, body = random.Random(seed), bytearray(json.dumps(GOOD[path]).encode())
    for _ in range(draw.randrange(1, 4)):
        at = draw.randrange(len(body))
        way = draw.randrange(3)
        if way == 0:
            body[at] = draw.randrange(256)
        elif way == 1:
            del body[at : at + draw.randrange(1, 5)]
        else:
            body[at:at] = body[draw.randrange(len(body)) :][: draw.randrange(1, 9)]
    check(served, path, bytes(body))


def check(served: Served, path: str, body: bytes) -> None:
    reply = served.send("POST", path, body, JSON)
    if reply.status != 200:
        assert fault_of(reply.status, reply.headers, reply.body) is None, (body, reply)
    elif reply.headers["content-type"].startswith("text/event-stream"):
        assert reply.events[-1] == "[DONE]"
    else:
        assert reply.json["choices"]
