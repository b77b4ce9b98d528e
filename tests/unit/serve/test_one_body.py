"""The requests of one body enter the engine together, and end with the reason that their client sees."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mambaslots as ms
import pytest
from oracle.observed import Recorder
from oracle.served import Served, serving, small_config, tiny_loaded

PROMPT = [5 + i % 80 for i in range(100)]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(tiny_loaded(), small_config(max_requests=16), max_waiting_requests=12) as served:
        yield served


def waiting_until(served: Served, number: int) -> None:
    engine = served.app.state.engine
    for _ in range(5000):
        if engine.num_waiting == number:
            return
        time.sleep(0.002)
    pytest.fail(f"{engine.num_waiting} requests wait in place of {number}")


def test_all_answers_of_a_body_enter_before_the_next_step(served: Served) -> None:
    body = {"prompt": [PROMPT, PROMPT[:60]], "n": 6, "max_tokens": 4, "temperature": 0}
    recorder, go_on = Recorder(), threading.Event()
    served.call(lambda engine: engine.observe(recorder))
    with ThreadPoolExecutor(2) as threads:
        held = threads.submit(served.call, lambda _: go_on.wait(60))
        try:
            reply = threads.submit(served.post, "/v1/completions", body)
            waiting_until(served, 12)
        finally:
            go_on.set()
        assert held.result()
        assert reply.result().status == 200
    served.call(lambda engine: engine.unobserve(recorder))
    assert len(recorder.ended) == 12
    alone = Recorder()
    served.reference.observe(alone)
    prompts = [prompt for prompt in (PROMPT, PROMPT[:60]) for _ in range(6)]
    served.reference.generate(prompts, ms.SamplingParams(max_tokens=4))
    assert recorder.num_steps <= alone.num_steps + 1  # the last call of the crowd may come after a step


@pytest.mark.parametrize("fields", [{"stream": True}, {}], ids=str)
def test_where_one_answer_finds_no_room_none_is_generated(served: Served, fields: dict[str, Any]) -> None:
    engine = served.app.state.engine
    params = ms.SamplingParams(max_tokens=1900)
    others = [served.do(lambda: engine.stream(PROMPT, params)) for _ in range(20)]
    reply = served.post("/v1/completions", {"prompt": PROMPT, "n": 12, "max_tokens": 4} | fields)
    assert (reply.status, reply.error["code"]) == (429, "queue_full")
    waiting_until(served, 4)
    assert engine.num_running + engine.num_waiting == 20
    for stream in others:
        served.loop.call_soon_threadsafe(stream.cancel)
    while engine.num_running + engine.num_waiting:
        time.sleep(0.001)


@pytest.mark.parametrize("streams", [False, True])
def test_a_stop_string_ends_its_request_with_the_reason_stop(served: Served, streams: bool) -> None:
    (whole,) = served.reference.generate([PROMPT], ms.SamplingParams(max_tokens=8))
    text = served.loaded.codec.decode(whole.tokens)
    recorder = Recorder()
    served.call(lambda engine: engine.observe(recorder))
    body = {"prompt": PROMPT, "max_tokens": 1900, "temperature": 0, "stop": text[2], "stream": streams}
    assert served.post("/v1/completions", body).status == 200
    served.call(lambda engine: engine.unobserve(recorder))
    assert [result.finish_reason for _, result in recorder.ended] == ["stop"]
    metrics = served.get("/metrics")
    assert b'mambaslots_requests_ended_total{finish_reason="stop"}' in metrics.body
    assert metrics.headers["content-type"].startswith("text/plain")
    assert served.app.state.monitor.snapshot()["requests"][0]["finish_reason"] == "stop"
