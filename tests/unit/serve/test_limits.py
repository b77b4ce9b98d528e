"""Who is served, and how much: keys, salts, limits, and what others learn of a request, which is nothing."""

import http.client
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import mambaslots as ms
import openai
import pytest
from mambaslots.inference.contexts.cache.pins import PinnedPrefix
from mambaslots.serve import ServerSettings, make_app
from mambaslots.serve.api_keys import engine_salt
from oracle.latched_model import PATIENCE_S
from oracle.served import Reply, Served, serving, small_config, tiny_loaded

PROMPT = [5 + i % 80 for i in range(100)]
KEYS = {"ann": "key-of-ann", "bob": "key-of-bob"}
LONG = {"prompt": PROMPT, "max_tokens": 1900, "temperature": 0}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    settings: dict[str, Any] = {
        "api_keys": KEYS,
        "admin_key": "key-of-operator",
        "max_body_bytes": 5000,
        "max_waiting_requests": 2,
        "request_timeout_s": PATIENCE_S,
        "allowed_origins": ("https://chat.example",),
    }
    with serving(tiny_loaded(), small_config(max_requests=2), **settings) as served:
        yield served


def ask(served: Served, key: str | None, **fields: Any) -> Reply:
    headers = {"authorization": f"Bearer {key}"} if key is not None else {}
    return served.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 2} | fields, **headers)


def occupy(served: Served, num_requests: int) -> Callable[[], None]:
    """Give the engine requests without end; returns what ends them."""
    engine, params = served.app.state.engine, ms.SamplingParams(max_tokens=1900)
    streams = [served.do(lambda: engine.stream(PROMPT, params)) for _ in range(num_requests)]

    def free() -> None:
        for stream in streams:
            served.loop.call_soon_threadsafe(stream.cancel)
        while engine.num_running + engine.num_waiting:
            time.sleep(0.001)

    return free


def cached(reply: Reply) -> int:
    assert reply.status == 200, reply.body
    number: int = reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]
    return number


# ---- keys and salts


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/none"])
@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer wrong", "Basic key-of-ann", "key-of-ann", "Bearer key-of-an"],
)
def test_without_a_key_nothing_is_disclosed(served: Served, path: str, authorization: str | None) -> None:
    headers = {} if authorization is None else {"authorization": authorization}
    reply = served.get(path, **headers)
    assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
    assert reply.error["code"] == "invalid_api_key"
    assert reply.error["type"] == "authentication_error"


def test_each_key_is_accepted_and_the_operator_s_is_no_tenant(served: Served) -> None:
    for key in KEYS.values():
        assert served.get("/v1/models", authorization=f"bearer {key}").status == 200
    refused = served.get("/v1/models", authorization="Bearer key-of-operator")
    message = "the key is missing or wrong; accepted: the header Authorization: Bearer, with a tenant's key"
    assert (refused.status, refused.error["message"]) == (401, message)
    client = openai.OpenAI(base_url=served.url, api_key="key-of-eve", max_retries=0)
    with client, pytest.raises(openai.AuthenticationError, match="the key is missing or wrong"):
        client.models.list()


def test_the_operator_s_paths_need_the_operator_s_key(served: Served) -> None:
    for path in ("/status.json", "/metrics", "/none"):
        assert served.get(path).status == 401
        refused = served.get(path, authorization="Bearer key-of-ann")
        assert (refused.status, refused.error["message"]) == (
            401,
            "the key is missing or wrong; accepted: the header Authorization: Bearer, with the admin key",
        )
        status = 404 if path == "/none" else 200
        assert served.get(path, authorization="Bearer key-of-operator").status == status
    assert served.get("/health").json == {"status": "ok"}


def test_without_an_admin_key_there_is_no_operator() -> None:
    with serving(tiny_loaded(), small_config(num_kv_blocks=64), api_keys=KEYS) as keyed:
        assert keyed.get("/status.json", authorization="Bearer key-of-ann").status == 403
        assert keyed.get("/health").status == 200


def test_tenants_never_share(served: Served) -> None:
    assert cached(ask(served, "key-of-ann")) == 0
    assert cached(ask(served, "key-of-bob")) == 0
    assert cached(ask(served, "key-of-ann")) == 96
    assert cached(ask(served, "key-of-bob", cache_salt="ann")) == 0
    assert cached(ask(served, "key-of-bob", cache_salt='["ann", null]')) == 0
    headers = {"authorization": "Bearer key-of-bob", "X_Cache_Salt": "ann"}
    assert cached(served.post("/v1/completions", {"prompt": PROMPT}, **headers)) == 96  # his own salt


def test_no_two_tenants_and_salts_make_one_salt() -> None:
    names = ["ann", "bob", 'ann", "x', "ann\\", '["ann", null]', "é"]
    pairs = [(tenant, salt) for tenant in names for salt in (None, "null", *names)]
    assert len({engine_salt(*pair, has_keys=True) for pair in pairs}) == len(pairs)
    assert engine_salt("default", None, has_keys=False) is None


def test_salts_without_keys() -> None:
    with serving(tiny_loaded(), small_config(num_kv_blocks=64)) as open_server:
        assert [cached(ask(open_server, None)) for _ in range(2)] == [0, 96]
        assert [cached(ask(open_server, None, cache_salt="é")) for _ in range(2)] == [0, 96]
        reply = open_server.post(
            "/v1/completions", {"prompt": PROMPT}, X_Cache_Salt="é".encode().decode("latin-1")
        )
        assert cached(reply) == 96
        wrong: list[tuple[dict[str, Any], dict[str, str]]] = [
            ({"cache_salt": ""}, {}),
            ({"cache_salt": 3}, {}),
            ({"cache_salt": "a" * 257}, {}),
            ({"cache_salt": "a"}, {"X_Cache_Salt": "b"}),
            ({}, {"X_Cache_Salt": ""}),
            ({}, {"X_Cache_Salt": "\xff"}),
        ]
        for body, header in wrong:
            refused = open_server.post("/v1/completions", {"prompt": [1]} | body, **header)
            assert refused.status == 400
            assert refused.error["param"] in ("cache_salt", "X-Cache-Salt")


# ---- limits


def received_to(raw: socket.socket, text: bytes) -> bytes:
    """What arrives until `text` is in it, in however many pieces."""
    received = b""
    while text not in received:
        piece = raw.recv(10_000)
        assert piece, f"the connection ended after {received!r}"
        received += piece
    return received


def test_a_long_body_is_refused_with_and_without_its_length(served: Served) -> None:
    key = {"authorization": "Bearer key-of-ann"}
    body = json.dumps({"prompt": "a" * 5000}).encode()
    reply = served.post("/v1/completions", body, **key)
    assert reply.status == 413
    assert "5000 bytes" in reply.error["message"]
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key-of-ann\r\n" \
           "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"  # fmt: skip
    with socket.create_connection(
        ("127.0.0.1", served.port), timeout=30
    ) as raw:  # another 5,000 bytes end it
        raw.sendall(head.encode() + b"2710\r\n" + b" " * 10_000 + b"\r\n0\r\n\r\n")
        assert b"connection: close" not in received_to(raw, b"body_too_long")
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        received_to(raw, b'{"status":"ok"}')
    huge = {"content-length": str(10**12), "authorization": key["authorization"]}
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as raw:
        lines = [f"{name}: {value}" for name, value in (huge | {"content-type": "application/json"}).items()]
        raw.sendall("\r\n".join(["POST /v1/completions HTTP/1.1", "Host: x", *lines, "", ""]).encode())
        received_to(raw, b"connection: close")
    assert served.post("/v1/completions", b" " * 4990 + b"{}", **key).status == 400


@pytest.mark.parametrize("streams", [False, True])
def test_a_request_that_takes_too_long(served: Served, streams: bool) -> None:
    headers = {"content-type": "application/json", "authorization": "Bearer key-of-ann"}
    with closing(http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)) as client:
        client.request("POST", "/v1/completions", json.dumps(LONG | {"stream": streams}), headers)
        if streams:
            response = client.getresponse()
            assert response.readline().startswith(b"data: ")
        else:
            while not served.stats().num_running:
                time.sleep(0.001)
        served.pass_time(PATIENCE_S)
        if not streams:
            response = client.getresponse()
        rest = response.read().lstrip()
    reply = Reply(response.status, {}, rest)
    assert reply.status == (200 if streams else 504)
    error = reply.events[-1]["error"] if streams else reply.error
    assert error["code"] == "timeout"
    assert served.stats().num_running == 0


def test_a_request_that_waits_too_long_has_a_status(served: Served) -> None:
    """Its stream has not begun."""
    free, engine = occupy(served, 2), served.app.state.engine
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(ask, served, "key-of-bob", stream=True)
        while engine.num_running + engine.num_waiting < 3:
            time.sleep(0.001)
        served.pass_time(PATIENCE_S)
        assert waiting.result().status == 504
    free()
    assert ask(served, "key-of-bob", stream=True).status == 200


def test_the_queue_has_an_end(served: Served) -> None:
    free = occupy(served, 4)
    reply = ask(served, "key-of-ann", stream=True)
    assert (reply.status, reply.headers["retry-after"]) == (429, "1")
    assert reply.error["type"] == "rate_limit_error"
    free()
    assert ask(served, "key-of-ann").status == 200
    message = ask(served, "key-of-ann", n=3).error["message"]
    assert "times n are 3 answers; accepted: 2, the server's max_waiting_requests" in message


def test_a_text_that_cannot_fit_is_refused(served: Served) -> None:
    huge = "a" * 3000
    for path, body in (
        ("/v1/completions", {"prompt": huge}),
        ("/v1/completions", {"prompt": ["a", huge]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": huge}]}),
    ):
        reply = served.post(path, body, authorization="Bearer key-of-ann")
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
        assert re.match(r"the prompt has 30\d\d tokens and the answer up to 1; acc", reply.error["message"])


def test_a_long_body_that_is_prepared_holds_up_no_short_one() -> None:
    entered, held = threading.Event(), threading.Event()
    with serving(tiny_loaded(), small_config()) as served:
        job_factory = served.app.state.service.job_factory
        prepare = job_factory.completion_job

        def hold(body: bytes, salt: str | None) -> Any:
            if len(body) > 10_000:
                entered.set()
                assert held.wait(PATIENCE_S)
            return prepare(body, salt)

        job_factory.completion_job = hold
        with ThreadPoolExecutor(1) as pool:
            long = pool.submit(served.post, "/v1/completions", {"prompt": "a" * 300_000})
            assert entered.wait(PATIENCE_S)
            assert served.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status == 200
            assert not long.done()
            held.set()
            assert long.result().status == 400


@pytest.mark.parametrize("key", ["key-of-ann", "wrong"])
def test_what_follows_a_body_of_two_lengths_is_no_request(served: Served, key: str) -> None:
    """A proxy that goes by the other length has not seen it: it may be another client's, under this key."""
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {key}\r\nContent-Length: 100\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as raw:
        raw.sendall(head.encode() + b"2\r\n{}\r\n0\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b"".join(iter(lambda: raw.recv(10_000), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"Content-Length and Transfer-Encoding" in answer
    assert answer.count(b"HTTP/1.1") == answer.count(b"connection: close") == 1


def test_a_body_must_come_in_time() -> None:
    limits: dict[str, Any] = {"max_waiting_requests": 1, "body_timeout_s": PATIENCE_S}
    with serving(tiny_loaded(), small_config(num_kv_blocks=64, max_requests=1), **limits) as open_server:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        begun = [socket.create_connection(("127.0.0.1", open_server.port), timeout=30) for _ in range(2)]
        for raw in begun:
            raw.sendall(head + b'Content-Length: 100\r\n\r\n{"prompt')
        while open_server.app.state.service._num_open < 2:
            time.sleep(0.001)
        assert ask(open_server, None).status == 429
        open_server.pass_time(PATIENCE_S)
        for raw in begun:
            with raw:
                answer = received_to(raw, b"timeout_error")
                assert answer.startswith(b"HTTP/1.1 408 ")
                assert b"connection: close" in answer
        assert ask(open_server, None).status == 200


def test_each_answer_counts() -> None:
    limits: dict[str, Any] = {"max_waiting_requests": 2}
    with serving(tiny_loaded(), small_config(num_kv_blocks=64, max_requests=1), **limits) as open_server:
        service = open_server.app.state.service
        go_on = threading.Event()
        with ThreadPoolExecutor(3) as threads:
            held = threads.submit(open_server.call, lambda _: go_on.wait(PATIENCE_S))
            try:
                two = threads.submit(ask, open_server, None, n=2, stream=True)
                while service._num_open < 2:
                    time.sleep(0.001)
                reply = ask(open_server, None, n=2)
                assert (reply.status, reply.error["code"]) == (429, "queue_full")
                one = threads.submit(ask, open_server, None)
                while service._num_open < 3:
                    time.sleep(0.001)
            finally:
                go_on.set()
            assert held.result()
            assert (two.result().status, one.result().status) == (200, 200)
        while service._num_open:  # the answer is read before its request ends
            time.sleep(0.001)


@pytest.mark.parametrize(("length", "longest"), [(2048, 2 * 2**20), (2**20, 17 * 2**20)])
def test_the_longest_body_has_room_for_the_longest_prompt(length: int, longest: int) -> None:
    config = small_config(max_sequence_length=length, num_kv_blocks=length // 32)
    engine = ms.DynamicInferenceEngine(tiny_loaded().model, config)
    app = make_app(engine, tiny_loaded(), ServerSettings(model_name="tiny"))
    assert app.state.service.max_body_bytes == longest


def test_keys_under_a_prefix(served: Served) -> None:
    """A server that is mounted in another application has the paths of its routes behind the prefix."""

    class Prefixed:
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            assert scope["path"].startswith("/llm/")
            await served.app(dict(scope, root_path="/llm"), receive, send)

    async def status(path: str, key: str | None = None) -> int:
        headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
        scope = {
            "type": "http", "method": "GET", "path": path, "query_string": b"", "headers": headers,
            "http_version": "1.1", "scheme": "http", "server": ("x", 80), "client": ("x", 1),
        }  # fmt: skip
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": b""}

        async def send(message: Any) -> None:
            sent.append(message)

        await Prefixed()(scope, receive, send)
        return int(sent[0]["status"])

    assert served.do(lambda: status("/llm/health")) == 200
    assert served.do(lambda: status("/llm/v1/models")) == 401
    assert served.do(lambda: status("/llm/v1/models", "key-of-ann")) == 200
    assert served.do(lambda: status("/llm/metrics", "key-of-ann")) == 401
    assert served.do(lambda: status("/llm/metrics", "key-of-operator")) == 200


# ---- what others learn


def test_nothing_of_a_request_is_logged(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    logging.getLogger("asyncio").setLevel(logging.INFO)
    secret = "peculiar"
    key = {"authorization": "Bearer key-of-ann"}
    good = {"prompt": secret, "max_tokens": 5, "user": secret, "cache_salt": secret}
    assert served.post(f"/v1/completions?q={secret}", good, **key).status == 200
    assert served.post("/v1/completions", {"prompt": secret, secret: secret}, **key).status == 400
    assert served.get(f"/v1/{secret}", authorization=f"Bearer {secret}").status == 401
    assert served.get(f"/v1/{secret}", **key).status == 404
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served.app.state.service.job_factory, "completion_job", _raise)
        reply = served.post("/v1/completions", good, **key)
    assert reply.status == 500
    assert secret not in reply.error["message"]
    request_id = reply.headers["x-request-id"]
    assert request_id in reply.error["message"]
    text = "\n".join([caplog.text, *(record.getMessage() for record in caplog.records)])
    assert secret not in text
    assert "key-of" not in text
    assert f"{request_id}: ZeroDivisionError through" in text
    assert "in _raise" in text


def _raise(*arguments: Any) -> None:
    raise ZeroDivisionError(str(arguments))


def test_each_request_has_an_id_of_its_own(served: Served) -> None:
    paths = ("/health", "/v1/models", "/none")
    ids = {served.get(path, x_request_id="mine").headers["x-request-id"] for path in paths}
    assert len(ids) == 3
    assert all(each.startswith("req-") for each in ids)


def test_other_origins(served: Served) -> None:
    asked = {"access_control_request_method": "POST", "access_control_request_headers": "authorization"}
    named = {name.replace("_", "-"): value for name, value in asked.items()}
    for origin, allowed in (("https://chat.example", True), ("https://evil.example", False)):
        reply = served.send("OPTIONS", "/v1/completions", None, {"origin": origin} | named)
        assert (reply.status == 200) == allowed
        assert ("access-control-allow-origin" in reply.headers) == allowed


def test_paths_and_methods_that_do_not_exist() -> None:
    with serving(tiny_loaded(), small_config(num_kv_blocks=64)) as open_server:
        for path in ("/none", "/v1/completions/"):
            reply = open_server.get(path)
            assert reply.status == 404
            assert reply.error["message"].startswith("there is no such path; accepted: /v1/completions, ")
        reply = open_server.get("/v1/completions")
        assert (reply.status, reply.headers["allow"]) == (405, "POST")
        assert reply.error["message"] == "this path does not accept this method"


def test_a_dead_engine_is_reported() -> None:
    loaded = tiny_loaded()
    with (
        serving(loaded, small_config(num_kv_blocks=64)) as open_server,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(ms.AsyncEngine, "failure", property(lambda _: MemoryError("secret")))
        for reply in (open_server.get("/health"), open_server.post("/v1/completions", {"prompt": [1]})):
            assert (reply.status, reply.error["code"]) == (503, "engine_dead")
            assert "secret" not in reply.error["message"]


@pytest.mark.parametrize("streams", [pytest.param(False, marks=pytest.mark.long), True])
def test_logits_that_are_no_numbers_are_reported(streams: bool) -> None:
    loaded = tiny_loaded()
    for weight in loaded.model.parameters():  # type: ignore[attr-defined]
        weight.fill_(float("nan"))
    with serving(loaded, small_config(num_kv_blocks=64)) as open_server:
        reply = ask(open_server, None, stream=streams)
        assert (reply.status, reply.error["code"]) == (500, "invalid_logits")


@pytest.mark.parametrize("streams", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_request_that_pins_leave_too_little_memory_ends_alone(streams: bool) -> None:
    with serving(tiny_loaded(), small_config(num_kv_blocks=8, max_sequence_length=256)) as open_server:

        def pin(engine: ms.DynamicInferenceEngine) -> PinnedPrefix:
            tokens = list(range(193))
            engine.warm(tokens)
            return engine.pin(tokens)

        pinned = open_server.call(pin)
        reply = ask(open_server, None, prompt=[1, 2, 3], max_tokens=100, stream=streams)
        assert reply.status == (200 if streams else 503)
        error = reply.events[-1]["error"] if streams else reply.error
        assert error["code"] == "capacity"
        assert ask(open_server, None, prompt=[1, 2, 3], max_tokens=20).status == 200
        open_server.call(lambda engine: engine.unpin(pinned))
