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
        for other, known in report.ingresses.items():
            by_ingress[other] = by_ingress.get(other, Counter()) | Counter(known)
    return sum((by_ingress | {ingress: Counter(counts)}).values(), Counter())


def fleet_metrics(counts: Counts, reports: Sequence[ReplicaReport] = ()) -> list[Metric]:
    """The replicas' metrics, each with the label `replica`; `counts` are the fleet's own, others are 0."""
    kinds = ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS))
    metrics = [
        metric
        for kind, table in kinds
        for metric in families(
            kind, ((f"fleet_{name}", text, counts.get(name, 0), "") for name, text in table.items())
        )
    ]
    of_replicas: dict[str, Metric] = {}
    for report in reports:
        for family in report.metrics:
            empty = Metric(family.name, family.documentation, family.type)
            of_replicas.setdefault(family.name, empty).samples += (
                sample._replace(labels={**sample.labels, "replica": report.replica})
                for sample in family.samples
            )
    return [*metrics, *of_replicas.values()]


Snapshot = Mapping[str, Any]
"""As `Monitor.snapshot` makes it."""
_SIZES = ("bytes_each", "block_size_tokens")


def merged_snapshot(snapshots: Mapping[str, Snapshot]) -> dict[str, Any]:
    """One snapshot of replicas, by their names.

    Counts are sums; a percentile is that of the slowest replica, an age of victims that of the youngest. Ids
    of requests have the replica's name in front. Sizes of a slot or block are those of the first replica.
    """
    every = list(snapshots.values())
    merged: dict[str, Any] = _merged(every)
    for name, pool in merged["pools"].items():
        pool.update({size: every[0]["pools"][name][size] for size in _SIZES if size in pool})
    names = [f"{len(snapshots)} replicas: {', '.join(snapshots)}"] if len(snapshots) > 1 else []
    merged["engine"]["description"] = [*names, *every[0]["engine"]["description"]]
    merged["latency"] = _merged([snapshot["latency"] for snapshot in every], max)
    merged["evictions"]["age_s"] = _merged([snapshot["evictions"]["age_s"] for snapshot in every], min)
    tenants: dict[str, list[Snapshot]] = {}
    for tenant in (tenant for snapshot in every for tenant in snapshot["tenants"]):
        tenants.setdefault(tenant["name"], []).append(tenant)
    requests = [
        {**request, "id": f"{name}-{request['id']}"}
        for name, snapshot in snapshots.items()
        for request in snapshot["requests"]
    ]
    return merged | {
        "time_s": max(snapshot["time_s"] for snapshot in every),
        "uptime_s": max(snapshot["uptime_s"] for snapshot in every),
        "warnings": [f"{name}: {text}" for name, each in snapshots.items() for text in each["warnings"]],
        "tenants": [_merged(same) for same in tenants.values()],
        "series": _series([snapshot["series"] for snapshot in every]),
        "requests": sorted(requests, key=lambda request: request["arrived_s"], reverse=True)[:NUM_REQUESTS],
    }


def _merged(figures: Sequence[Any], of_times: Callable[[list[float]], float] = sum) -> Any:
    """Dicts by their keys, integers and times added, or times as `of_times` says; of others the first."""
    if isinstance(figures[0], Mapping):
        names = dict.fromkeys(name for part in figures for name in part)
        return {name: _merged([part[name] for part in figures if name in part], of_times) for name in names}
    known = [part for part in figures if part is not None]
    if known and isinstance(known[0], float):
        return of_times(known)
    return sum(known) if known and isinstance(known[0], int) else figures[0]


def _series(series: Sequence[Snapshot]) -> dict[str, Any]:
    """The sums of the points of each interval, until the last in which all replicas have one."""
    every_s = series[0]["every_s"]
    by_interval: dict[int, list[Snapshot]] = {}
    for point in (point for own in series for point in own["points"]):
        by_interval.setdefault(int(point["time_s"] // every_s), []).append(point)
    last = min((own["points"][-1]["time_s"] // every_s for own in series if own["points"]), default=0)
    points = [
        _merged(together) | {"time_s": interval * every_s}
        for interval, together in sorted(by_interval.items())
        if interval <= last
    ]
    return {"every_s": every_s, "points": points}
