"""The figures of several replicas as those of one engine: metrics, and the snapshot of the page."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..monitor.monitor import NUM_REQUESTS
from ..serve.prometheus_text import families
from ..serve.served_engine import LocalEngine

Counts = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """A replica's metrics, its snapshot, and the counts of the ingresses that ask it. It can be pickled."""

    replica: str
    metrics: tuple[Metric, ...]
    snapshot: Mapping[str, Any]
    ingresses: Mapping[str, Counts]


async def replica_report(engine: LocalEngine, replica: str, ingresses: Mapping[str, Counts]) -> ReplicaReport:
    return ReplicaReport(replica, tuple(await engine.metrics()), await engine.snapshot(), ingresses)


_GAUGES = {
    "replicas": "Replicas that serve.",
    "requests_waiting": "Requests that no replica has confirmed.",
    "requests_running": "Requests that replicas have.",
}
_COUNTERS = {
    "requests": "Requests that were taken.",
    "replicas_lost": "Times that a replica was lost while it answered.",
    "retries": "Times that the rest of an answer went to another replica.",
    "requests_given_up": "Requests that lost too many replicas.",
}


def counts_of_all(ingress: str, counts: Counts, reports: Sequence[ReplicaReport]) -> Counter[str]:
    """`counts` of this ingress and those of the others, added; of what replicas know, the newest."""
    by_ingress: dict[str, Counter[str]] = {}
    for report in reports:
        for name, known_counts in report.ingresses.items():
            by_ingress[name] = by_ingress.get(name, Counter()) | Counter(known_counts)
    by_ingress[ingress] = Counter(counts)
    return sum(by_ingress.values(), Counter())


def fleet_metrics(counts: Counts, reports: Sequence[ReplicaReport] = ()) -> list[Metric]:
    """The replicas' metrics, each with the label `replica`; `counts` are the fleet's own, others are 0."""
    metrics: list[Metric] = []
    for kind, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
        rows = [(f"fleet_{name}", text, counts.get(name, 0), "") for name, text in table.items()]
        metrics += families(kind, rows)
    of_replicas: dict[str, Metric] = {}
    for report in reports:
        for family in report.metrics:
            new_family = Metric(family.name, family.documentation, family.type)
            of_replicas.setdefault(family.name, new_family).samples += (
                sample._replace(labels={**sample.labels, "replica": report.replica})
                for sample in family.samples
            )
    return [*metrics, *of_replicas.values()]


Snapshot = Mapping[str, Any]  # as `Monitor.snapshot` makes it
_SIZES = ("bytes_each", "block_size_tokens")


def merged_snapshot(snapshots: Mapping[str, Snapshot]) -> dict[str, Any]:
    """Replicas' snapshots as one: counts are sums, percentiles the slowest's, victims' ages the lowest."""
    values = list(snapshots.values())
    result: dict[str, Any] = _merged(values)
    for name, pool in result["pools"].items():
        pool.update({size: values[0]["pools"][name][size] for size in _SIZES if size in pool})
    names = [f"{len(snapshots)} replicas: {', '.join(snapshots)}"] if len(snapshots) > 1 else []
    result["engine"]["description"] = [*names, *values[0]["engine"]["description"]]
    result["latency"] = _merged([snapshot["latency"] for snapshot in values], max)
    result["evictions"]["age_s"] = _merged([snapshot["evictions"]["age_s"] for snapshot in values], min)
    tenants: dict[str, list[Snapshot]] = {}
    for snapshot in values:
        for tenant in snapshot["tenants"]:
            tenants.setdefault(tenant["name"], []).append(tenant)
    requests = [
        {**request, "id": f"{name}-{request['id']}"}
        for name, snapshot in snapshots.items()
        for request in snapshot["requests"]
    ]
    return result | {
        "time_s": max(snapshot["time_s"] for snapshot in values),
        "uptime_s": max(snapshot["uptime_s"] for snapshot in values),
        "warnings": [
            f"{name}: {text}" for name, snapshot in snapshots.items() for text in snapshot["warnings"]
        ],
        "tenants": [_merged(figures) for figures in tenants.values()],
        "series": _series([snapshot["series"] for snapshot in values]),
        "requests": sorted(requests, key=lambda request: request["arrived_s"], reverse=True)[:NUM_REQUESTS],
    }


def _merged(figures: Sequence[Any], of_times: Callable[[list[float]], float] = sum) -> Any:
    """Dicts by their keys, integers and times added, or times as `of_times` says; of others the first."""
    if isinstance(figures[0], Mapping):
        names = dict.fromkeys(name for part in figures for name in part)
        return {name: _merged([part[name] for part in figures if name in part], of_times) for name in names}
    values = [part for part in figures if part is not None]
    if values and isinstance(values[0], float):
        return of_times(values)
    return sum(values) if values and isinstance(values[0], int) else figures[0]


def _series(series: Sequence[Snapshot]) -> dict[str, Any]:
    """The sums of the points of each interval, until the last in which all replicas have one."""
    every_s = series[0]["every_s"]
    by_interval: dict[int, list[Snapshot]] = {}
    points_of_replicas = [replica_series["points"] for replica_series in series]
    for points in points_of_replicas:
        for point in points:
            by_interval.setdefault(int(point["time_s"] // every_s), []).append(point)
    last = min((points[-1]["time_s"] // every_s for points in points_of_replicas if points), default=0)
    sums = [
        _merged(points) | {"time_s": interval * every_s}
        for interval, points in sorted(by_interval.items())
        if interval <= last
    ]
    return {"every_s": every_s, "points": sums}
