"""`mambaslots replay --replicas`: what it prints and writes, and how it says mistakes."""

import json
from pathlib import Path
from typing import Any

import pytest
from mambaslots.cli.main import main
from mambaslots.net.routing.routers import ROUTERS
from mambaslots.replay import ReplaySetting, generate, model_shape, row_named
from mambaslots.replay.routed.cells import one_cache_replay, routed_replay, sum_of
from mambaslots.replay.routed.setting import ONE_CACHE, Routing

FIELDS = {
    "trace", "num_requests", "num_replicas", "router", "state_gb", "kv_gb", "total_gb", "share",
    "share_of_one_cache", "refusal", "prompt_tokens", "resumed_tokens", "lost_by_reason", "token_imbalance",
    "request_imbalance", "mean_first_token_s", "p95_first_token_s", "duration_s", "num_sessions",
    "num_moved_sessions", "num_events", "event_bytes", "event_bytes_per_request", "event_bytes_per_s",
    "replicas",
}  # fmt: skip
SMALL = ("replay", "--trace", "fork", "--requests", "40", "--kv-gb", "4")


def written(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["results"]
    return found


def test_the_table_and_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "r.json", tmp_path / "r.png"
    words = [*SMALL, "--budget-gb", "0.5,1", "--replicas", "1,3", "--router", "state,random", "--seed", "3"]
    assert main([*words, "--json", str(path), "--plot", str(picture)]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("a replica, events after 50 ms") == 2
    assert printed.err.splitlines()[-1].startswith("replay: 12 cells")
    assert picture.read_bytes().startswith(b"\x89PNG")
    settings = json.loads(path.read_text())["settings"]
    assert (settings["replicas"], settings["router"]) == ([1, 3], ["state", "random"])
    assert (settings["event_delay_ms"], settings["seed"], settings["trace"]) == (50, 3, ["fork"])
    results = written(path)
    order = [(one["state_gb"], one["num_replicas"], one["router"]) for one in results]
    assert order == [
        (gb, number, router)
        for gb in (0.5, 1)
        for number in (1, 3)
        for router in (ONE_CACHE, "state", "random")
    ]
    for first in range(0, len(results), 3):
        whole, *others = results[first : first + 3]
        for one in (whole, *others):
            assert one.keys() == FIELDS
            assert one["share"] == one["resumed_tokens"] / one["prompt_tokens"]
            assert one["share_of_one_cache"] == one["share"] / whole["share"]
            assert one["resumed_tokens"] + sum(one["lost_by_reason"].values()) == one["prompt_tokens"]
            assert sum(replica["num_requests"] for replica in one["replicas"]) == 40
            assert f"{100 * one['share']:.1f}" in printed.out
        assert [len(one["replicas"]) for one in (whole, *others)] == [1, *[whole["num_replicas"]] * 2]
        by_state, by_chance = others
        assert by_state["event_bytes"] > 36 * by_state["num_events"] > 0
        assert by_chance["event_bytes"] == by_chance["num_events"] == 0
        if whole["num_replicas"] == 1:
            assert by_state["share"] == by_chance["share"] == whole["share"]


@pytest.mark.long
def test_processes_and_runs_change_nothing(tmp_path: Path) -> None:
    found = []
    for jobs in ("1", "2"):
        path = tmp_path / f"{jobs}.json"
        words = [*SMALL, "--budget-gb", "1", "--replicas", "2", "--jobs", jobs, "--json", str(path)]
        assert main(words) == 0
        found.append(path.read_text())
    assert found[0] == found[1]
    assert len(written(path)) == 1 + len(ROUTERS)


def test_a_budget_that_buys_nothing_is_refused_in_its_cell(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--budget-gb", "0.01", "--replicas", "2", "--router", "random", "--event-delay-ms", "0"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert printed.count("refused") == 2
    assert printed.count("state_gb is 0.01") == 1


@pytest.mark.parametrize(
    "setting",
    [
        ReplaySetting(model_shape("nemotron-h-8b"), state_gb=0.5, kv_gb=4.0),
        ReplaySetting(model_shape("nemotron-h-8b"), total_gb=6.0, host_gb=1.0),
    ],
    ids=["apart", "in all"],
)
def test_one_cache_of_one_replica_is_the_plain_row(setting: ReplaySetting) -> None:
    trace = generate("chat", 0, scale=0.05)
    expected = row_named("ours").replay(trace, setting, lambda num_served, num_all: None)
    assert one_cache_replay(trace, setting, Routing(1, ONE_CACHE)).replicas[0].served == expected
    assert routed_replay(trace, setting, Routing(1, "prefix")).replicas[0].served == expected


def test_one_cache_has_what_all_replicas_have() -> None:
    setting = ReplaySetting(model_shape("nemotron-h-8b"), state_gb=2.0, kv_gb=20.0, host_gb=3.0)
    whole = sum_of(setting, 4)
    assert (whole.state_gb, whole.kv_gb, whole.total_gb, whole.host_gb) == (8, 80, None, 12)
    assert (whole.max_requests, whole.max_tokens) == (4 * setting.max_requests, setting.max_tokens)
    assert 4 * whole.cost.seconds(100, 7) == pytest.approx(setting.cost.seconds(100, 7))


def test_with_one_row_requests_come_one_after_another_wherever_they_run() -> None:
    trace = generate("chat", 0, scale=0.02)
    setting = ReplaySetting(model_shape("nemotron-h-8b"), state_gb=2.0, kv_gb=20.0, max_requests=1)
    results = [
        one_cache_replay(trace, setting, Routing(3, ONE_CACHE)),
        *(routed_replay(trace, setting, Routing(3, router)) for router in ("random", "state")),
    ]
    for result in results:
        assert max(result.first_token_s) < setting.cost.seconds(trace.longest, 0) + 1  # nobody waits
