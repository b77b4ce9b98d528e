"""The server over replicas: answers, errors, health and metrics over loopback."""

import json
from collections.abc import Iterator
from typing import Any

import mambaslots as ms
import pytest

pytest.importorskip("fastapi")

from oracle.fleet import SALT_KEY, Replicas
from oracle.served import Served, serving_replicas, small_config, tiny_loaded
from prometheus_client.parser import text_string_to_metric_families

PROMPT = [5 + i % 80 for i in range(70)]
BODY = {"prompt": PROMPT, "max_tokens": 12, "seed": 3, "temperature": 1.5, "return_token_ids": True}


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[Served, Replicas]]:
    loaded, config = tiny_loaded(), small_config(max_requests=2, salt_key=SALT_KEY)
    replicas = Replicas([ms.DynamicInferenceEngine(loaded.model, config) for _ in range(2)])
    settings = {"api_keys": {"alice": "key-a"}, "admin_key": "admin"}
    with serving_replicas(replicas, loaded, config, **settings) as served:
        yield served, replicas


def ask(served: Served, **fields: Any) -> Any:
    return served.post("/v1/completions", BODY | fields, authorization="Bearer key-a")


def tokens_of(events: list[Any]) -> list[int]:
    assert events[-1] == "[DONE]"
    return [token for each in events[:-1] for one in each["choices"] for token in one["token_ids"]]


def test_a_stream_goes_on_behind_a_loss(both: tuple[Served, Replicas]) -> None:
    served, replicas = both
    reply = ask(served)
    whole = reply.json["choices"][0]["token_ids"]
    for losses in ([0], [5], [3, 4], [11]):
        replicas.losses[:] = losses
        events = ask(served, stream=True, stream_options={"include_usage": True}).events
        assert tokens_of(events) == whole
        usage = events[-2]["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT), 12)
        assert usage["prompt_tokens_details"]["cached_tokens"] <= len(PROMPT)
    assert not replicas.losses
    assert {request.tenant for request in replicas.requests} == {"alice"}
    assert len({request.cache_salt for request in replicas.requests}) == 1


def test_too_many_losses_end_the_stream_with_an_error(both: tuple[Served, Replicas]) -> None:
    served, replicas = both
    replicas.losses[:] = [2, 2, 2]
    lines = ask(served, stream=True).body.decode().split("\n\n")
    events = [json.loads(line[6:]) for line in lines if line]
    assert events[-1]["error"]["code"] == "no_replica"
    assert len([one for each in events[:-1] for one in each["choices"][0]["token_ids"]]) == 6
    for streams, num_tokens in ((False, 0), (False, 2), (True, 0)):  # before the first event
        replicas.losses[:] = [num_tokens] * 3
        reply = ask(served, stream=streams)
        assert (reply.status, reply.error["code"]) == (503, "no_replica")
        assert reply.headers["retry-after"] == "1"
    assert not replicas.losses


def test_a_stop_string_ends_the_request_at_its_replica(both: tuple[Served, Replicas]) -> None:
    served, _ = both
    text = ask(served, max_tokens=40).json["choices"][0]["text"]
    stop = text[4:6]
    reply = ask(served, max_tokens=1900, stop=[stop]).json
    assert reply["choices"][0]["text"] == text[: text.index(stop)]
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["usage"]["prompt_tokens"] == len(PROMPT)


def test_health_and_models(both: tuple[Served, Replicas]) -> None:
    served, replicas = both
    assert served.get("/health").json == {"status": "ok"}
    (model,) = served.get("/v1/models", authorization="Bearer key-a").json["data"]
    assert model["max_model_len"] == 2048
    replicas.num_serving = 0
    try:
        for reply in (served.get("/health"), ask(served)):
            assert (reply.status, reply.error["code"]) == (503, "no_replica")
    finally:
        replicas.num_serving = None
    assert served.get("/health").status == 200


def test_metrics_have_the_figures_of_each_replica(both: tuple[Served, Replicas]) -> None:
    served, replicas = both
    ask(served)
    assert served.get("/metrics").status == 401
    reply = served.get("/metrics", authorization="Bearer admin")
    assert reply.headers["content-type"].startswith("text/plain")
    found: dict[tuple[str, str], float] = {}
    names = set()
    for family in text_string_to_metric_families(reply.body.decode()):
        assert family.documentation
        assert family.name not in names
        names.add(family.name)
        for sample in family.samples:
            labels = {**sample.labels}
            replica = labels.pop("replica", "")
            assert bool(replica) is ("_fleet_" not in sample.name)
            found[sample.name + str(sorted(labels.items())), replica] = sample.value
    for number, local in enumerate(replicas.local):
        figures = local.monitor.figures()
        name = "mambaslots_generated_tokens_total[]", f"r{number}"
        assert found[name] == figures.num_generated > 0
        lengths = found["mambaslots_time_to_first_token_seconds_count[]", f"r{number}"]
        assert lengths == sum(figures.first_token.counts)
        tenants = "mambaslots_tenant_requests_total[('tenant', 'alice')]", f"r{number}"
        assert found[tenants] == figures.num_added
    assert found["mambaslots_fleet_replicas[]", ""] == 2
    assert found["mambaslots_fleet_replicas_lost_total[]", ""] >= 1


def test_the_page_shows_all_replicas(both: tuple[Served, Replicas]) -> None:
    served, replicas = both
    ask(served)
    assert served.get("/").status == 200
    assert served.get("/status.json").status == 401
    shown = served.get("/status.json", authorization="Bearer admin").json
    parts = [local.monitor.snapshot() for local in replicas.local]
    assert shown.keys() == parts[0].keys()
    assert shown["engine"]["max_requests"] == 4
    for pool, name in (("states", "total"), ("states", "committed"), ("kv", "total"), ("kv", "cached")):
        assert shown["pools"][pool][name] == sum(part["pools"][pool][name] for part in parts)
    assert shown["pools"]["kv"]["block_size_tokens"] == 32
    for name in ("prompt", "resumed", "generated"):
        assert shown["tokens"][name] == sum(part["tokens"][name] for part in parts)
    tenants = {one["name"]: one["requests"] for one in shown["tenants"]}
    requests = [one for part in parts for one in part["tenants"] if one["name"] == "alice"]
    assert tenants["alice"] == sum(one["requests"] for one in requests) > 0
    slowest = max(part["latency"]["ttft_s"]["p90"] for part in parts)
    assert shown["latency"]["ttft_s"]["p90"] == slowest
    ids = [one["id"] for one in shown["requests"]]
    assert len(set(ids)) == len(ids) == min(100, sum(len(part["requests"]) for part in parts))
    arrivals = [one["arrived_s"] for one in shown["requests"]]
    assert arrivals == sorted(arrivals, reverse=True)
