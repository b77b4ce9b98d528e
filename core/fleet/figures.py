"""The figures of several replicas as those of one engine: metrics, and the snapshot of the page."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..monitor.monitor import NUM_REQUESTS
from ..serve.metrics import MonitorCollector
from ..serve.served_engine import LocalEngine


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """A replica's metrics, and its snapshot. It can be pickled."""

    replica: str
    metrics: tuple[Metric, ...]
    snapshot: Mapping[str, Any]


async def replica_report(engine: LocalEngine, replica: str) -> ReplicaReport:
    """Made in another thread, so that the event loop does not wait."""
    collector = MonitorCollector(engine.monitor)
    metrics = await asyncio.to_thread(lambda: tuple(collector.collect()))
    return ReplicaReport(replica, metrics, await engine.snapshot())


@dataclass
class FleetCounts:
    """Replicas that serve, requests, and replicas lost while they answered; collects all metrics.

    Attributes:
        num_retries: rests of answers that were sent to another replica.
        num_given_up: requests that lost too many replicas.
        reports: of the replicas.
    """

    num_replicas: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_requests: int = 0
    num_lost: int = 0
    num_retries: int = 0
    num_given_up: int = 0
    reports: Sequence[ReplicaReport] = ()

    def collect(self) -> Iterator[Metric]:
        for name, help_text, number in (
            ("replicas", "Replicas that serve.", self.num_replicas),
            ("requests_waiting", "Requests that no replica has confirmed.", self.num_waiting),
            ("requests_running", "Requests that replicas have.", self.num_running),
        ):
            yield GaugeMetricFamily(f"mambaslots_fleet_{name}", help_text, value=number)
        for name, help_text, number in (
            ("requests", "Requests that were taken.", self.num_requests),
            ("replicas_lost", "Times that a replica was lost while it answered.", self.num_lost),
            ("retries", "Times that the rest of an answer went to another replica.", self.num_retries),
            ("requests_given_up", "Requests that lost too many replicas.", self.num_given_up),
        ):
            yield CounterMetricFamily(f"mambaslots_fleet_{name}", help_text, value=number)
        families: dict[str, Metric] = {}
        for report in self.reports:
            for family in report.metrics:
                empty = Metric(family.name, family.documentation, family.type)
                families.setdefault(family.name, empty).samples += (
                    sample._replace(labels={**sample.labels, "replica": report.replica})
                    for sample in family.samples
                )
        yield from families.values()


def fleet_metrics_text(counts: FleetCounts) -> tuple[bytes, str]:
    """The body of a reply to Prometheus, and its content type; the label `replica` has a replica's name."""
    return generate_latest(counts), CONTENT_TYPE_LATEST


Snapshot = Mapping[str, Any]
"""As `Monitor.snapshot` makes it."""
_SIZES = ("bytes_each", "block_size_tokens")


def merged_snapshot(snapshots: Mapping[str, Snapshot]) -> dict[str, Any]:
    """One snapshot of several replicas, by their names.

    Counts and pools are added, and points of the series by their interval. Percentiles cannot be added: each
    is that of the slowest replica, and that of eviction ages the one of the replica that evicts the youngest.
    """
    every = list(snapshots.values())
    merged: dict[str, Any] = _sum(every)
    for name, pool in merged["pools"].items():
        pool.update({size: every[0]["pools"][name][size] for size in _SIZES if size in pool})
    merged["engine"]["description"] = _description(snapshots)
    merged["evictions"]["age_s"] = _extremes([one["evictions"]["age_s"] for one in every], min)
    for name in merged["latency"]:
        merged["latency"][name] = _extremes([one["latency"][name] for one in every], max)
    tenants: dict[str, list[Snapshot]] = {}
    for tenant in (tenant for one in every for tenant in one["tenants"]):
        tenants.setdefault(tenant["name"], []).append(tenant)
    requests = [
        {**request, "id": f"{name}-{request['id']}"}
        for name, one in snapshots.items()
        for request in one["requests"]
    ]
    return merged | {
        "time_s": max(one["time_s"] for one in every),
        "uptime_s": max(one["uptime_s"] for one in every),
        "warnings": [f"{name}: {text}" for name, one in snapshots.items() for text in one["warnings"]],
        "tenants": [_sum(same) for same in tenants.values()],
        "series": _series([one["series"] for one in every]),
        "requests": sorted(requests, key=lambda one: one["arrived_s"], reverse=True)[:NUM_REQUESTS],
    }


def _sum(figures: Sequence[Any]) -> Any:
    """Integers are added, dicts by their keys; of all else the first."""
    first = figures[0]
    if isinstance(first, Mapping):
        names = dict.fromkeys(name for one in figures for name in one)
        return {name: _sum([one[name] for one in figures if name in one]) for name in names}
    return sum(figures) if isinstance(first, int) else first


def _description(snapshots: Mapping[str, Snapshot]) -> list[str]:
    """Replicas that describe themselves alike are described once."""
    description = [f"{len(snapshots)} replicas: {', '.join(snapshots)}"] if len(snapshots) > 1 else []
    by_lines: dict[tuple[str, ...], list[str]] = {}
    for name, one in snapshots.items():
        by_lines.setdefault(tuple(one["engine"]["description"]), []).append(name)
    for lines, names in by_lines.items():
        description += [f"{', '.join(names)}:"] * (len(by_lines) > 1) + list(lines)
    return description


def _extremes(
    figures: Sequence[Mapping[str, float | None]], extreme: Callable[[Iterable[float]], float]
) -> dict[str, float | None]:
    """For each name the extreme of the values, or None."""
    known = {name: [value for one in figures if (value := one[name]) is not None] for name in figures[0]}
    return {name: extreme(values) if values else None for name, values in known.items()}


def _series(series: Sequence[Snapshot]) -> dict[str, Any]:
    """The sums of the points that end in the same interval.

    The last interval is the last that all replicas have a point in, so that levels do not fall at the end.
    """
    every_s = series[0]["every_s"]
    by_interval: dict[int, list[Snapshot]] = {}
    for point in (point for one in series for point in one["points"]):
        by_interval.setdefault(int(point["time_s"] // every_s), []).append(point)
    last = min((one["points"][-1]["time_s"] // every_s for one in series if one["points"]), default=0)
    points = [
        _sum(together) | {"time_s": interval * every_s}
        for interval, together in sorted(by_interval.items())
        if interval <= last
    ]
    return {"every_s": every_s, "points": points}
