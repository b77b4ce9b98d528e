"""The figures of several replicas on one page."""

from collections.abc import Callable
from typing import Any

import pytest
from mambaslots.fleet.replica_questions import GONE_S, Ingresses, IngressQuestion
from mambaslots.fleet.replica_reports import ReplicaReport, counts_of_all, merged_snapshot
from oracle.operations_snapshot import INTERVAL_S, TIME_S, snapshot


def test_one_replica_is_shown_as_it_is() -> None:
    alone = snapshot(30)
    merged = merged_snapshot({"a": alone})
    assert [one.pop("id") for one in merged["requests"]] == [f"a-{one['id']}" for one in alone["requests"]]
    for one in alone["requests"]:
        del one["id"]
    assert merged == alone


def test_counts_are_added_and_the_worst_percentiles_shown() -> None:
    one, other = snapshot(30), snapshot(80, seed=1, warnings=["half of the prompts are short"])
    other["latency"]["step_s"] = {"p50": 2.0, "p90": None, "p99": 0.1}
    other["evictions"]["age_s"] = {"p50": 3.0, "p90": None}
    parts = [one, other]
    merged = merged_snapshot({"a": one, "b": other})
    assert merged["warnings"] == ["b: half of the prompts are short"]
    assert merged["engine"] == {
        "description": ["2 replicas: a, b", "an engine of 12 layers", "  attention: reference"],
        "running": 6, "waiting": 4, "paused": 0, "max_requests": 32,
    }  # fmt: skip
    assert merged["pools"]["states"] == {
        "total": 128, "pinned": 10, "committed": 80, "reserved": 4, "live": 6, "free": 38,
        "bytes_each": 1_300_000,
    }  # fmt: skip
    assert merged["latency"]["step_s"] == {"p50": 2.0, "p90": 0.18, "p99": 1.25}
    assert merged["evictions"]["age_s"] == {"p50": 3.0, "p90": 200.0}
    assert merged["evictions"]["by_cause"]["new_state"] == 34
    assert merged["tokens"]["saved_s"] == 7.2
    for name in ("prompt", "resumed"):
        total = sum(part["tokens"][name] for part in parts)
        assert merged["tokens"][name] == total
        assert sum(one[f"{name}_tokens"] for one in merged["tenants"]) == total
    by_reason = sum(merged["tokens"]["by_reason"].values())
    assert by_reason == merged["tokens"]["prompt"] - merged["tokens"]["resumed"]
    assert len(merged["requests"]) == 100
    assert len({request["id"] for request in merged["requests"]}) == 100


@pytest.mark.parametrize("shift_s", [0.0, 0.7, -1.3])
def test_points_of_one_interval_are_added(shift_s: float) -> None:
    """Also where the replicas' intervals end at different moments."""
    one, other = snapshot(30), snapshot(30)
    for point in other["series"]["points"]:
        point["time_s"] += shift_s
    series = merged_snapshot({"a": one, "b": other, "new": snapshot(0, series=_no_points())})["series"]
    points = series["points"]
    times = [point["time_s"] for point in points]
    assert times == sorted(set(times))
    assert all(TIME_S - 2 * INTERVAL_S <= time <= TIME_S for time in times[-1:])
    lost = [] if shift_s >= 0 else one["series"]["points"][-1:]
    for name in ("prompt", "generated"):
        whole = 2 * sum(point[name] for point in one["series"]["points"])
        assert sum(point[name] for point in points) == whole - sum(point[name] for point in lost)
    last = one["series"]["points"][-1 - len(lost)]
    if not lost:
        assert points[-1]["states_committed"] == 2 * last["states_committed"]


def _no_points() -> dict[str, Any]:
    return {"every_s": INTERVAL_S, "points": []}


def test_the_numbers_of_ingresses_are_added_once_each() -> None:
    """The own ones are of now; of another's the newest that a replica has."""
    reports = [
        ReplicaReport("r0", (), {}, {"a": {"requests": 3}, "b": {"requests": 5, "retries": 1}}),
        ReplicaReport("r1", (), {}, {"b": {"requests": 7}}),
    ]
    assert counts_of_all("a", {"requests": 4}, reports) == {"requests": 11, "retries": 1}
    assert counts_of_all("a", {"requests": 4}, []) == {"requests": 4}


async def _no_call(function: Callable[[Any], Any]) -> None:
    raise AssertionError("a replica without a cache has no states to poll")


def test_an_ingress_that_is_gone_has_no_requests_and_keeps_its_counts() -> None:
    now_s = 0.0
    ingresses = Ingresses(_no_call, None, clock=lambda: now_s)
    numbers = {"requests": 3, "requests_waiting": 1, "requests_running": 2}
    assert ingresses.answer(IngressQuestion("a", True, numbers)) is None
    assert ingresses.answer(IngressQuestion("b", True, {"requests": 1})) is None
    assert ingresses.counts == {"a": numbers, "b": {"requests": 1}}
    now_s = 2 * GONE_S
    ingresses.answer(IngressQuestion("b", True, {"requests": 2}))
    ended = {"requests": 3, "requests_waiting": 0, "requests_running": 0}
    assert ingresses.counts == {"a": ended, "b": {"requests": 2}}
