"""The Grafana dashboard and the page of operations name the metrics that there are."""

import json
import re
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import mambaslots as ms
import pytest
from mambaslots.inference.contexts.cache.pool_stats import KV_REMOVAL_CAUSES, STATE_REMOVAL_CAUSES
from oracle.serving import small_engine

pytest.importorskip("prometheus_client")

from mambaslots.fleet.replica_reports import fleet_metrics
from mambaslots.monitor import Monitor
from mambaslots.serve.prometheus_text import connection_metrics, monitor_metrics, text_of
from prometheus_client.parser import text_string_to_metric_families

sys.path.append(str(Path(__file__).parents[3] / "tools"))
import dashboard

DASHBOARD: dict[str, Any] = json.loads(dashboard.BOARD.read_text())
PAGE = dashboard.PAGE.read_text()
METRIC = re.compile(r"mambaslots_\w+")


@pytest.fixture(scope="module")
def labels_of() -> dict[str, set[str]]:
    """Sample name -> its labels."""
    engine = small_engine()
    monitor = Monitor(engine, model_name="small")
    engine.generate([[1, 2, 3]], ms.SamplingParams(max_tokens=2))
    found: dict[str, set[str]] = {}
    text = text_of([*monitor_metrics(monitor), *connection_metrics(0)])
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def expressions() -> list[str]:
    queries = [variable["query"] for variable in DASHBOARD["templating"]["list"]]
    return queries + [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]


def names_of(samples: set[str]) -> set[str]:
    """Names of metrics as people write them: a histogram has one."""
    return {re.sub(r"_seconds_(bucket|count|sum)$", "_seconds", name) for name in samples}


def test_each_expression_of_the_dashboard_names_samples_and_their_labels(
    labels_of: dict[str, set[str]],
) -> None:
    for expression in expressions():
        for name in METRIC.findall(expression):
            assert name in labels_of, expression
        for by in re.findall(r"by \(([^)]*)\)", expression):
            assert all(by in labels_of[name] for name in METRIC.findall(expression)), expression
        assert expression.count("(") == expression.count(")")


def test_legends_name_labels_that_the_expression_keeps() -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert f"by ({label})" in target["expr"], target


def test_the_dashboard_and_the_page_are_those_of_the_definitions() -> None:
    assert dashboard.BOARD.read_text() == dashboard.board()
    assert dashboard.page(PAGE) == PAGE


def test_the_dashboard_shows_and_the_page_explains_every_metric(labels_of: dict[str, set[str]]) -> None:
    names = names_of(set(labels_of))
    assert names_of(set(METRIC.findall(" ".join(expressions())))) == names
    fleet = {name for name in METRIC.findall(PAGE) if name.startswith("mambaslots_fleet_")}
    assert set(METRIC.findall(PAGE)) == names | fleet
    text = text_of(fleet_metrics({"replicas": 1})).decode()
    assert fleet == set(METRIC.findall(re.sub("(?m)^#.*", "", text)))


def test_the_page_explains_every_reason_and_cause() -> None:
    words = set(re.findall(r"`(\w+)`", PAGE))
    assert words >= {*ms.COMPUTE_REASONS, *STATE_REMOVAL_CAUSES, *KV_REMOVAL_CAUSES}


def test_panels_have_ids_and_places_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24
        assert panel["title"]
        assert panel["type"] == "row" or panel["description"]
    for one, other in combinations((panel["gridPos"] for panel in panels), 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above, (one, other)


def test_the_dashboard_names_no_host() -> None:
    assert "http" not in json.dumps(DASHBOARD)
