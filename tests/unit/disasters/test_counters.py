"""What is refused, fails or waits counts nothing, and temperature 0 stays greedy on every way in.

Elsewhere hits were counted for requests whose admission was then refused, and again when they were tried
again; and an explicit `temperature=0.0` was taken for "not given", and became 1.0.
"""

from collections.abc import Callable
from typing import Any

import mambaslots as ms
import pytest
from oracle.faults import POINTS, InjectedError, failing
from oracle.serving import assert_answers, random_tokens, run_checked, serve_checked, small_engine
from oracle.workload import assert_idle

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")

from mambaslots.monitor import Monitor
from mambaslots.serve.prometheus_text import monitor_metrics, text_of
from mambaslots.text import GenerationDefaults
from oracle.fleet import SALT_KEY, Replicas
from oracle.recurrent_lm import RecurrentLM
from oracle.served import Served, serving, serving_replicas, small_config, tiny_loaded
from prometheus_client.parser import text_string_to_metric_families

HEAD = random_tokens(40, 1)
PARAMS = ms.SamplingParams(max_tokens=6, return_log_probs=True)


def counters(monitor: Monitor) -> dict[Any, float]:
    """All samples that Prometheus reads of counters and histograms."""
    found = {}
    for family in text_string_to_metric_families(text_of(monitor_metrics(monitor)).decode()):
        if family.type in ("counter", "histogram"):
            found |= {(s.name, *sorted(s.labels.items())): s.value for s in family.samples}
    return {name: value for name, value in found.items() if not name[0].endswith("_created")}


def of_cache(engine: ms.DynamicInferenceEngine) -> dict[str, Any]:
    """What `CacheStats` counts since the beginning."""
    return {
        name: value
        for name, value in vars(engine.stats().cache).items()
        if isinstance(value, (int, dict)) and not name.endswith(("_slots", "_kv_blocks"))
    }


def watched(**settings: Any) -> tuple[ms.DynamicInferenceEngine, Monitor]:
    """An engine that has counted something of everything, hits as well."""
    engine = small_engine(**settings)
    monitor = Monitor(engine, model_name="small")
    serve_checked(engine, [HEAD])
    (result,) = serve_checked(engine, [[*HEAD, 1]])
    assert result.num_resumed_tokens == 40
    return engine, monitor


# ---- counters


@pytest.mark.disaster(number=23)
@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ([], {}), ([*HEAD, 300], {}), ([*HEAD, -1], {}), (HEAD * 9, {}), ("text", {}),
        (HEAD, {"cache_salt": b""}), (HEAD, {"checkpoint_plan": "rolling"}), (HEAD, {"params": 5}),
    ],
)  # fmt: skip
def test_a_call_that_is_refused_counts_nothing(prompt: Any, options: dict[str, Any]) -> None:
    engine, monitor = watched()
    before = of_cache(engine), counters(monitor)
    given = {"cache_salt": None, "checkpoint_plan": None, "params": PARAMS} | options
    params = given.pop("params")
    with pytest.raises(ValueError, match="accepted"):
        engine.add_request(prompt, params, **given)
    with pytest.raises(ValueError, match="accepted"):
        engine.stream(prompt, params, **given)
    with pytest.raises(ValueError, match="accepted"):
        engine.generate([[1, 2], prompt], params, **given)  # one of two is bad: neither counts
    assert (of_cache(engine), counters(monitor)) == before
    assert_idle(engine)


@pytest.mark.disaster(number=23)
@pytest.mark.usefixtures("kind")
def test_a_request_that_waits_many_steps_for_memory_is_counted_once() -> None:
    """It matches a long prefix in every step, and finds no row or no blocks for the rest."""
    engine, monitor = watched(num_kv_blocks=16, max_requests=2)
    for seed in (2, 3):
        engine.add_request(random_tokens(20, seed), LONG)
    engine.step()
    waiting = engine.add_request([*HEAD[:32], *random_tokens(9, 4)], PARAMS)
    before, metrics = of_cache(engine), counters(monitor)
    steps = 0
    while engine.stats().num_waiting != 0 and steps < 12:
        engine.step()
        steps += 1
        now = of_cache(engine)
        for name in ("num_requests", "num_prompt_tokens", "num_resumed_tokens", "num_computed_tokens"):
            assert now[name] == before[name], name
    assert steps == 12
    assert (
        counters(monitor)[("mambaslots_resumed_prompt_tokens_total",)]
        == metrics[("mambaslots_resumed_prompt_tokens_total",)]
    )
    results = run_checked(engine)
    hit = results[waiting].num_resumed_tokens
    assert_answers([*HEAD[:32], *random_tokens(9, 4)], results[waiting])
    after = of_cache(engine)
    assert after["num_requests"] == before["num_requests"] + 1
    assert after["num_resumed_tokens"] == before["num_resumed_tokens"] + hit
    assert after["num_prompt_tokens"] == before["num_prompt_tokens"] + 41
    again = serve_checked(engine, [[*HEAD[:32], *random_tokens(9, 4)]])
    assert again[0].num_resumed_tokens > 0


LONG = ms.SamplingParams(max_tokens=30)


@pytest.mark.disaster(number=23)
@pytest.mark.usefixtures("kind")
def test_a_request_that_fits_nowhere_counts_nothing_until_it_fits() -> None:
    """Pins leave too little: each step raises, and matches the prefix again."""
    engine, monitor = watched(num_kv_blocks=18)
    other = random_tokens(56, 9)
    engine.warm(other)
    pins = [engine.pin(other), engine.pin(HEAD)]
    prompt = [*HEAD[:32], *random_tokens(60, 5)]
    waiting = engine.add_request(prompt, PARAMS)
    before, metrics = of_cache(engine), counters(monitor)
    for _ in range(5):
        with pytest.raises(ms.KVBlockCapacityError):
            engine.step()
    assert of_cache(engine) == before
    assert counters(monitor) == metrics
    for pinned in pins:
        engine.unpin(pinned)
    results = run_checked(engine)
    assert_answers(prompt, results[waiting])
    hit = results[waiting].num_resumed_tokens
    assert hit > 0
    assert of_cache(engine)["num_resumed_tokens"] == before["num_resumed_tokens"] + hit
    assert of_cache(engine)["num_requests"] == before["num_requests"] + 1


@pytest.mark.disaster(number=23)
@pytest.mark.sampled(point=("matching", "admission", "slot reservation", "begin", "inputs"))
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("point", [name for name in POINTS if name not in ("leaving", "slot unpin")])
def test_a_step_that_fails_counts_each_token_once(point: str, after: bool) -> None:
    """The hit of a request whose admission or step failed twice is in the figures once."""
    engine, monitor = watched()
    before = of_cache(engine)
    prompt = [*HEAD[:32], *random_tokens(9, 6)]
    request_id = engine.add_request(prompt, PARAMS)
    failed = 0
    for _ in range(2):
        with failing(engine, point, after=after) as seen:
            try:
                engine.step()
            except InjectedError:
                failed += 1
            else:
                assert not seen["failed"]
        engine.check_integrity()
    assert failed > 0
    results = run_checked(engine)
    result = results.get(request_id) or engine.take_result(request_id)
    assert result is not None
    assert_answers(prompt, result)
    now = of_cache(engine)
    assert now["num_requests"] == before["num_requests"] + 1
    assert now["num_prompt_tokens"] == before["num_prompt_tokens"] + len(prompt)
    assert now["num_resumed_tokens"] == before["num_resumed_tokens"] + result.num_resumed_tokens
    assert now["num_prompt_tokens"] == now["num_resumed_tokens"] + now["num_computed_tokens"]
    assert sum(now["computed_by_reason"].values()) == now["num_computed_tokens"]
    metrics = counters(monitor)
    assert metrics[("mambaslots_prompt_tokens_total",)] == now["num_prompt_tokens"]
    assert metrics[("mambaslots_resumed_prompt_tokens_total",)] == now["num_resumed_tokens"] > 0


def test_what_a_server_refuses_counts_no_hit() -> None:
    with serving(tiny_loaded(), small_config(max_requests=2), api_keys={"ann": "key"}) as served:
        key = {"authorization": "Bearer key"}
        body = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0}
        for _ in range(2):
            assert served.post("/v1/completions", body, **key).status == 200
        before = served.call(of_cache)
        assert before["num_resumed_tokens"] > 0
        for change, status in (
            ({"temperature": -1}, 400), ({"max_tokens": 10**6}, 400), ({"prompt": []}, 400),
            ({"prompt": [10**9]}, 400), ({"model": "other"}, 404),
        ):  # fmt: skip
            assert served.post("/v1/completions", body | change, **key).status == status
        assert served.post("/v1/completions", body, authorization="Bearer wrong").status == 401
        assert served.call(of_cache) == before


# ---- temperature 0


def greedy(loaded: Any, prompt: list[int], length: int) -> list[int]:
    """What the recurrence says, without any of our sampling."""
    return list(map(int, RecurrentLM(loaded.model).generate_greedy(prompt, length)[0]))


TEMPERATURES = [0, 0.0, -0.0]
PROMPT = [5 + i % 80 for i in range(70)]


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_temperature_zero_is_greedy_in_the_engine(temperature: float) -> None:
    engine = small_engine()
    for seed in range(3):
        params = ms.SamplingParams(
            max_tokens=12, temperature=temperature, top_p=0.9, seed=seed, return_log_probs=True
        )
        (result,) = engine.generate([HEAD], params)
        assert_answers(HEAD, result)
        assert [token.token for token in engine.stream(HEAD, params)] == result.tokens
    assert result.num_resumed_tokens > 0


def ways(served: Served) -> list[Callable[[dict[str, Any]], list[int]]]:
    def whole(fields: dict[str, Any]) -> list[int]:
        reply = served.post(
            "/v1/completions", {"prompt": PROMPT, "max_tokens": 9, "return_token_ids": True} | fields
        )
        assert reply.status == 200, reply.body
        tokens: list[int] = reply.json["choices"][0]["token_ids"]
        return tokens

    def streamed(fields: dict[str, Any]) -> list[int]:
        body = {"prompt": PROMPT, "max_tokens": 9, "return_token_ids": True, "stream": True} | fields
        events = served.post("/v1/completions", body).events
        return [token for each in events[:-1] for one in each["choices"] for token in one["token_ids"]]

    return [whole, streamed]


@pytest.mark.parametrize("through", ["server", "fleet"])
def test_temperature_zero_is_greedy_through_a_server(through: str) -> None:
    """Also where the model's own defaults sample, as most checkpoints' do."""
    loaded = tiny_loaded(defaults=GenerationDefaults(ms.SamplingParams(temperature=5.0, top_p=0.99)))
    config = small_config(max_requests=2, salt_key=SALT_KEY)
    expected = greedy(loaded, PROMPT, 9)
    if through == "server":
        context: Any = serving(loaded, config)
    else:
        engines = [ms.DynamicInferenceEngine(loaded.model, config) for _ in range(2)]
        context = serving_replicas(Replicas(engines), loaded, config)
    with context as served:
        for way in ways(served):
            for temperature in (0, 0.0):
                assert way({"temperature": temperature, "seed": 3}) == expected
        sampled = [way({"seed": seed}) for way in ways(served) for seed in (1, 2)]
        assert any(tokens != expected for tokens in sampled)  # the defaults do sample


def test_a_generate_that_is_refused_changes_no_later_id_or_seed() -> None:
    sampled = ms.SamplingParams(max_tokens=8, temperature=3.0)
    one, other = small_engine(), small_engine()
    with pytest.raises(ValueError, match="is empty"):
        one.generate([HEAD, []], sampled)
    results = [engine.generate([HEAD], sampled)[0] for engine in (one, other)]
    assert results[0].request_id == results[1].request_id
    assert results[0].tokens == results[1].tokens
