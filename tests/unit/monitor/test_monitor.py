"""A monitor's snapshot, against what the engine did and what a brute-force recorder counts."""

import json
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, get_args

import mambaslots as ms
import pytest
from mambaslots.inference.contexts.cache.pool_stats import STATE_REMOVAL_CAUSES
from mambaslots.monitor import Monitor, advice
from mambaslots.monitor.advice import why_not_deeper
from mambaslots.params_and_results import FinishReason
from oracle.faults import InjectedError, failing
from oracle.observed import Recorder
from oracle.serving import random_tokens, small_engine

PARAMS = ms.SamplingParams(max_tokens=5)
DOCUMENT = random_tokens(40, 1)

KEYS = {
    "time_s", "uptime_s", "model", "version", "warnings", "engine", "pools", "tokens", "evictions", "latency",
    "tenants", "series", "requests",
}  # fmt: skip
REQUEST_KEYS = {
    "id", "tenant", "arrived_s", "prompt_tokens", "resumed_tokens", "spans", "generated_tokens",
    "finish_reason", "ttft_s", "inter_token_s", "why",
}  # fmt: skip
POINT_KEYS = {
    "time_s", "prompt", "resumed", "generated", "by_reason", "states_committed", "states_pinned", "kv_cached",
    "kv_held", "running", "waiting",
}  # fmt: skip


class Clock:
    """Seconds that pass only when a test says so, and a thousandth at each look."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def watched(clock: Clock | None = None, **settings: object) -> tuple[ms.DynamicInferenceEngine, Monitor]:
    engine = small_engine(**settings)
    return engine, Monitor(engine, model_name="small", **({"clock": clock} if clock else {}))  # type: ignore[arg-type]


def numbers(value: object) -> Iterator[float]:
    if isinstance(value, dict):
        for inner in value.values():
            yield from numbers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from numbers(inner)
    elif isinstance(value, int | float):
        yield value


def test_a_snapshot_has_the_keys_that_a_page_reads() -> None:
    engine, monitor = watched()
    engine.generate([DOCUMENT, DOCUMENT], PARAMS)
    running = engine.add_request(DOCUMENT, PARAMS)
    engine.step()
    snapshot = monitor.snapshot()
    assert json.loads(json.dumps(snapshot)) == snapshot
    assert snapshot.keys() == KEYS
    assert snapshot["engine"].keys() == {"description", "running", "waiting", "paused", "max_requests"}
    assert snapshot["pools"]["states"].keys() == {
        "total", "pinned", "committed", "reserved", "live", "free", "bytes_each",
    }  # fmt: skip
    assert snapshot["pools"]["kv"].keys() == {
        "total", "held", "cached", "free", "bytes_each", "block_size_tokens",
    }  # fmt: skip
    assert snapshot["tokens"].keys() == {
        "prompt", "resumed", "recomputed", "generated", "by_reason", "saved_s",
    }  # fmt: skip
    assert snapshot["tokens"]["by_reason"].keys() == set(ms.COMPUTE_REASONS)
    assert snapshot["evictions"]["by_cause"].keys() == set(STATE_REMOVAL_CAUSES)
    assert snapshot["evictions"]["age_s"].keys() == {"p50", "p90"}
    assert snapshot["latency"].keys() == {"ttft_s", "inter_token_s", "step_s"}
    assert all(each.keys() == {"p50", "p90", "p99"} for each in snapshot["latency"].values())
    assert snapshot["tenants"][0].keys() == {
        "name", "requests", "prompt_tokens", "resumed_tokens",
    }  # fmt: skip
    assert all(request.keys() == REQUEST_KEYS for request in snapshot["requests"])
    newest, *others = snapshot["requests"]
    assert (newest["id"], newest["finish_reason"]) == (running, None)
    assert {one["finish_reason"] for one in others} == {"length"}
    assert all(number >= 0 for number in numbers(snapshot))


def test_a_snapshots_figures_are_the_engines() -> None:
    engine, monitor = watched(num_mamba_slots=4, num_kv_blocks=24)
    recorder = Recorder()
    engine.observe(recorder)
    prompts = [[*DOCUMENT[:n], *random_tokens(20, n)] for n in (8, 16, 24, 40)]
    for _ in range(2):
        engine.generate(prompts, PARAMS)
    stats, snapshot = engine.stats().cache, monitor.snapshot()
    tokens = snapshot["tokens"]
    assert tokens["by_reason"] == {reason: recorder.reasons[reason] for reason in ms.COMPUTE_REASONS}
    assert tokens["resumed"] == recorder.num_resumed == stats.num_resumed_tokens
    assert tokens["prompt"] == tokens["resumed"] + sum(tokens["by_reason"].values())
    assert tokens["generated"] == sum(map(len, recorder.tokens.values()))
    states, kv = snapshot["pools"]["states"], snapshot["pools"]["kv"]
    parts = [states[use] for use in ("free", "reserved", "committed", "live")]
    assert sum(parts) == states["total"] == 4 + engine.config.max_requests
    assert kv["free"] + kv["cached"] + kv["held"] == kv["total"] == 24
    assert states["bytes_each"] == engine.context.spec.slot_bytes
    assert snapshot["evictions"]["by_cause"] == stats.states_removed_by_cause
    assert sum(snapshot["evictions"]["by_cause"].values()) == stats.num_states_committed - states["committed"]
    (tenant,) = snapshot["tenants"]
    assert tenant["name"] == "default"
    assert (tenant["requests"], tenant["prompt_tokens"]) == (8, tokens["prompt"])


def test_each_request_says_where_it_resumed_and_why_not_deeper() -> None:
    engine, monitor = watched()
    for prompt in (DOCUMENT, DOCUMENT, [*DOCUMENT[:20], *random_tokens(30, 5)]):
        engine.generate([prompt], PARAMS)
    for request in monitor.snapshot()["requests"]:
        spans = request["spans"]
        computed = sum(stop - start for start, stop, _ in spans)
        assert request["resumed_tokens"] + computed == request["prompt_tokens"]
        assert all(one[1] <= other[0] for one, other in pairwise(spans))
        assert {reason for _, _, reason in spans} <= set(ms.COMPUTE_REASONS)
        assert request["generated_tokens"] == 5
        assert request["why"].count("\n") == 0
    branch, again, first = monitor.snapshot()["requests"]
    assert first["why"] == "Tokens 0 to 40 were computed: no earlier request had these tokens at this place."
    assert again["why"].startswith(
        "It resumed 32 of 40 tokens; tokens 32 to 40 were computed: a prompt's last"
    )
    assert "CheckpointPlan.marks" in branch["why"]


@pytest.mark.parametrize(
    ("block", "length", "advised"),
    [(4, 11, False), (8, 13, True), (8, 12, True), (8, 11, False)],
)
def test_a_smaller_block_is_advised_only_where_the_model_allows_one_that_short_tails_fill(
    block: int, length: int, advised: bool
) -> None:
    engine, monitor = watched(block_size_tokens=block)
    assert engine.context.spec.grid == 4
    for prompt in (DOCUMENT[:length], DOCUMENT[:length]):
        engine.generate([prompt], PARAMS)
    again, _ = monitor.snapshot()["requests"]
    assert again["spans"][-1] == [8, length, "partial_block"]
    advice = (
        "they do not fill a block; a smaller block_size_tokens (a multiple of 4) caches more of them"
        if advised
        else "they do not fill the smallest block that the model allows (4 tokens); no setting helps"
    )
    assert again["why"] == f"It resumed 8 of {length} tokens; tokens 8 to {length} were computed: {advice}."


def test_requests_count_for_the_tenants_whose_salts_are_named() -> None:
    engine, monitor = watched()
    monitor.name_salt("one", "alice")
    monitor.name_salt(b"two", "alice")
    engine.generate([DOCUMENT] * 4, PARAMS, cache_salt=["one", "two", "three", None])
    tenants = {tenant["name"]: tenant for tenant in monitor.snapshot()["tenants"]}
    assert {name: tenant["requests"] for name, tenant in tenants.items()} == {
        "alice": 2, "other": 1, "default": 1,
    }  # fmt: skip
    assert tenants["alice"]["prompt_tokens"] == 2 * len(DOCUMENT)


def test_names_of_tenants_and_requests_kept_are_bounded() -> None:
    engine, monitor = watched()
    for number in range(200):
        monitor.name_salt(str(number), f"tenant {number}")
        engine.cancel(engine.add_request([1, 2], PARAMS, cache_salt=str(number)))
    snapshot = monitor.snapshot()
    assert len(snapshot["tenants"]) <= 66
    assert sum(tenant["requests"] for tenant in snapshot["tenants"]) == 200
    assert len(snapshot["requests"]) == 100
    assert snapshot["requests"][0]["id"] == 199


def test_a_series_has_a_point_for_each_interval_and_each_token_once() -> None:
    clock = Clock()
    engine, monitor = watched(clock)
    engine.generate([DOCUMENT], PARAMS)
    clock.now += 7
    engine.generate([DOCUMENT, random_tokens(12, 9)], PARAMS)
    clock.now += 5
    snapshot = monitor.snapshot()
    series, tokens = snapshot["series"], snapshot["tokens"]
    points = series["points"]
    assert series["every_s"] == 2
    assert len(points) == 6
    assert all(point.keys() == POINT_KEYS for point in points)
    assert all(later["time_s"] - point["time_s"] == pytest.approx(2) for point, later in pairwise(points))
    for key in ("prompt", "resumed", "generated"):
        assert sum(point[key] for point in points) == tokens[key]
    for reason in ms.COMPUTE_REASONS:
        assert sum(point["by_reason"][reason] for point in points) == tokens["by_reason"][reason]
    assert [point["prompt"] for point in points] == [40, 0, 0, 52, 0, 0]
    clock.now += 10_000
    assert len(monitor.snapshot()["series"]["points"]) == 450


def test_a_page_that_polls_takes_no_warning_away_and_no_description(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "WINDOW_TOKENS", 500)
    monkeypatch.setattr(advice, "MAX_LOST_SHARE", 0.05)
    warnings_seen = []
    for polls in (False, True):
        clock = Clock()
        engine = small_engine(num_mamba_slots=2)
        monitor = Monitor(engine, model_name="small", clock=clock)
        monitor._description = ["old"]
        for second in range(100):
            clock.now += 1
            if polls:
                monitor.snapshot()
            if second % 4 == 1:
                engine.generate([random_tokens(60, second // 4 % 12)], PARAMS)
        warnings_seen.append(monitor.snapshot()["warnings"])
        assert monitor.snapshot()["engine"]["description"] == engine.describe().splitlines()
    alone, polled = warnings_seen
    assert any("state_evicted" in warning for warning in alone)
    assert polled == alone


def test_what_scores_and_warms_is_no_request() -> None:
    lines: list[str] = []
    engine = small_engine()
    monitor = Monitor(engine, model_name="small", trace=lines.append)
    engine.score([DOCUMENT])
    engine.warm(random_tokens(40, 2))
    engine.generate([DOCUMENT], PARAMS)
    figures, snapshot = monitor.figures(), monitor.snapshot()
    assert (figures.num_added, sum(figures.num_ended.values()), figures.num_generated) == (1, 1, 5)
    latencies = figures.first_token, figures.queue, figures.inter_token
    assert [sum(one.counts) for one in latencies] == [1, 1, 4]
    (tenant,) = figures.tenants
    assert (tenant.num_requests, tenant.num_prompt_tokens) == (1, 40)
    assert len(snapshot["requests"]) == len(lines) == 1
    assert snapshot["tokens"]["prompt"] == engine.stats().cache.num_prompt_tokens == 39 + 40 + 40
    assert sum(figures.step.counts) > 5


@pytest.mark.parametrize(
    ("spans", "resume_point", "said"),
    [
        ([], 0, "It has computed nothing yet."),
        ([[0, 100, "never_seen"]], 0, "Tokens 0 to 100 were computed: no earlier"),
        ([[0, 100, "never_seen"]], 96, "It resumed 96 of 100 tokens; tokens 96 to 100 were computed: no"),
        ([[0, 64, "never_seen"], [96, 100, "last_token"]], 64, "It resumed 64 of 100 tokens; tokens 96 to"),
        ([[0, 100, "never_seen"]], 100, "Its prompt was computed before a restart; it resumed 10"),
        ([[0, 100, "never_seen"]], 112, "Its prompt was computed before a restart; it resumed 11"),
    ],
)
def test_why_a_request_did_not_resume_deeper(spans: list[list[Any]], resume_point: int, said: str) -> None:
    assert why_not_deeper(spans, resume_point, 100, grid=16).startswith(said)


def test_an_answer_that_is_restarted_does_not_say_that_nothing_was_computed() -> None:
    engine, monitor = watched()
    request_id = engine.add_request(DOCUMENT, ms.SamplingParams(max_tokens=12))
    for _ in range(7):
        engine.step()
    with failing(engine, "forward"), pytest.raises(InjectedError):
        engine.step()
    while engine.has_unfinished_requests():
        engine.step()
    (request,) = monitor.snapshot()["requests"]
    assert (request["id"], request["generated_tokens"]) == (request_id, 12)
    assert not request["why"].startswith("It has computed nothing")


def test_a_trace_has_a_line_for_each_request_and_none_of_its_tokens() -> None:
    lines: list[str] = []
    engine = small_engine()
    monitor = Monitor(engine, model_name="small", trace=lines.append)
    engine.generate([DOCUMENT, DOCUMENT], PARAMS)
    engine.cancel(engine.add_request(DOCUMENT, PARAMS))
    records = [json.loads(line) for line in lines]
    assert [one["finish_reason"] for one in records] == ["length", "length", "cancelled"]
    assert all(one.keys() == REQUEST_KEYS | {"queued_s", "recomputed_tokens"} for one in records)
    shown = {one["id"]: one for one in monitor.snapshot()["requests"]}
    for one in records:
        assert {key: one[key] for key in REQUEST_KEYS} == shown[one["id"]]
    assert not any("\n" in line for line in lines)


def test_a_trace_that_raises_ends_and_the_monitor_goes_on() -> None:
    calls: list[str] = []

    def trace(line: str) -> None:
        calls.append(line)
        raise OSError("disk full")

    engine = small_engine()
    monitor = Monitor(engine, model_name="small", trace=trace)
    engine.generate([DOCUMENT, DOCUMENT], PARAMS)
    assert len(calls) == 1
    assert len(monitor.snapshot()["requests"]) == 2


def test_another_thread_reads_while_steps_are_made() -> None:
    engine, monitor = watched(
        num_mamba_slots=3, num_kv_blocks=16, max_tokens_per_step=16, max_sequence_length=96
    )
    failures: list[BaseException] = []
    ended = threading.Event()

    def read() -> None:
        try:
            while not ended.wait(0.002):  # else the engine's thread hardly gets the interpreter's lock
                tokens = monitor.snapshot()["tokens"]
                assert tokens["prompt"] == tokens["resumed"] + sum(tokens["by_reason"].values())
                assert monitor.figures().stats.cache.num_prompt_tokens >= tokens["prompt"]
        except BaseException as error:
            failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for seed in range(6):
            engine.generate([[*DOCUMENT[: 8 * seed], *random_tokens(20, seed)] for _ in range(3)], PARAMS)
            engine.check_integrity()
    finally:
        ended.set()
        reader.join()
    assert failures == []


def test_after_a_reset_counts_begin_again_and_nothing_is_negative() -> None:
    clock = Clock()
    engine, monitor = watched(clock)
    engine.generate([DOCUMENT], PARAMS)
    clock.now += 2
    engine.add_request(DOCUMENT, PARAMS)
    engine.step()
    engine.reset()
    clock.now += 2
    engine.generate([DOCUMENT[:16]], PARAMS)
    clock.now += 2
    snapshot = monitor.snapshot()
    assert snapshot["tokens"]["prompt"] == 16
    assert all(number >= 0 for number in numbers(snapshot["series"]))
    assert [one["finish_reason"] for one in snapshot["requests"]] == ["length", "reset", "length"]


def test_a_closed_monitor_counts_no_more() -> None:
    engine, monitor = watched()
    engine.generate([DOCUMENT], PARAMS)
    monitor.close()
    engine.generate([DOCUMENT], PARAMS)
    figures = monitor.figures()
    assert (figures.num_added, figures.num_ended["length"]) == (1, 1)
    assert figures.num_ended.keys() == set(get_args(FinishReason))


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("model_name", 3),
        ("trace", "a path"),
        ("engine", None),
    ],
)
def test_arguments_are_checked(argument: str, value: Any) -> None:
    arguments = {"engine": small_engine(), "model_name": "small"} | {argument: value}
    with pytest.raises(ValueError, match=argument):
        Monitor(arguments.pop("engine"), **arguments)
