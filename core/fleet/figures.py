"""The figures of several replicas as those of one engine: metrics, and the snapshot of the page."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from ..monitor.monitor import NUM_REQUESTS
from ..serve.served_engine import LocalEngine


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """A replica's metrics in Prometheus' text format, and its snapshot. It can be pickled."""

    replica: str
    metrics: bytes
    snapshot: Mapping[str, Any] | None = None


async def replica_report(engine: LocalEngine, replica: str) -> ReplicaReport:
    """Made in other threads, so that the event loop does not wait."""
    metrics, _ = await engine.metrics_text()
    return ReplicaReport(replica, metrics, await engine.snapshot())


@dataclass
class FleetCounts:
    """Requests; replicas lost while they answered; retries; requests that lost too many replicas."""

    num_requests: int = 0
    num_lost: int = 0
    num_retries: int = 0
    num_given_up: int = 0
    num_waiting: int = 0
    num_running: int = 0


def fleet_metrics_text(
    counts: FleetCounts, num_replicas: int, reports: Sequence[ReplicaReport]
) -> tuple[bytes, str]:
    """The body of a reply to Prometheus, and its content type; the label `replica` has a replica's name."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_FleetCollector(counts, num_replicas, reports))
    return generate_latest(registry), CONTENT_TYPE_LATEST


@dataclass(frozen=True, eq=False)
class _FleetCollector(Collector):
    counts: FleetCounts
    num_replicas: int
    reports: Sequence[ReplicaReport]

    def collect(self) -> Iterator[Metric]:
        counts = self.counts
        for name, help_text, number in (
            ("replicas", "Replicas that serve.", self.num_replicas),
            ("requests_waiting", "Requests that no replica has confirmed.", counts.num_waiting),
            ("requests_running", "Requests that replicas have.", counts.num_running),
        ):
            yield GaugeMetricFamily(f"mambaslots_fleet_{name}", help_text, value=number)
        for name, help_text, number in (
            ("requests", "Requests that were taken.", counts.num_requests),
            ("replicas_lost", "Times that a replica was lost while it answered.", counts.num_lost),
            ("retries", "Times that the rest of an answer went to another replica.", counts.num_retries),
            ("requests_given_up", "Requests that lost too many replicas.", counts.num_given_up),
        ):
            yield CounterMetricFamily(f"mambaslots_fleet_{name}", help_text, value=number)
        families: dict[str, Metric] = {}
        for report in self.reports:
            for family in text_string_to_metric_families(report.metrics.decode()):
                merged = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    labels = {**sample.labels, "replica": report.replica}
                    merged.samples.append(sample._replace(labels=labels))
        yield from families.values()


Snapshot = Mapping[str, Any]
"""As `Monitor.snapshot` makes it."""


def merged_snapshot(snapshots: Mapping[str, Snapshot]) -> dict[str, Any]:
    """One snapshot of several replicas, by their names.

    Counts and pools are added, and points of the series by their interval. Percentiles cannot be added: each
    is that of the slowest replica, and that of eviction ages the one of the replica that evicts the youngest.
    """
    all_of = list(snapshots.values())
    first = all_of[0]
    return {
        "time_s": max(one["time_s"] for one in all_of),
        "uptime_s": max(one["uptime_s"] for one in all_of),
        "model": first["model"],
        "version": first["version"],
        "warnings": [f"{name}: {text}" for name, one in snapshots.items() for text in one["warnings"]],
        "engine": _engine(snapshots),
        "pools": {pool: _pool([one["pools"][pool] for one in all_of]) for pool in ("states", "kv")},
        "tokens": {
            **_sums([_counts(one["tokens"]) for one in all_of]),
            "by_reason": _sums([one["tokens"]["by_reason"] for one in all_of]),
        },
        "evictions": {
            "by_cause": _sums([one["evictions"]["by_cause"] for one in all_of]),
            "age_s": _extremes([one["evictions"]["age_s"] for one in all_of], min),
        },
        "latency": {
            name: _extremes([one["latency"][name] for one in all_of], max) for name in first["latency"]
        },
        "tenants": _tenants(tenant for one in all_of for tenant in one["tenants"]),
        "series": _series([one["series"] for one in all_of]),
        "requests": _requests(snapshots),
    }


def _engine(snapshots: Mapping[str, Snapshot]) -> dict[str, Any]:
    engines = {name: one["engine"] for name, one in snapshots.items()}
    description = [f"{len(engines)} replicas: {', '.join(engines)}"] if len(engines) > 1 else []
    by_lines: dict[tuple[str, ...], list[str]] = {}
    for name, engine in engines.items():
        by_lines.setdefault(tuple(engine["description"]), []).append(name)
    for lines, names in by_lines.items():  # replicas that describe themselves alike are described once
        description += [f"{', '.join(names)}:"] * (len(by_lines) > 1) + list(lines)
    return {"description": description, **_sums([_counts(engine) for engine in engines.values()])}


def _counts(figures: Mapping[str, Any]) -> dict[str, int]:
    return {name: value for name, value in figures.items() if isinstance(value, int)}


def _sums(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sums by name, in the order in which the names come."""
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(total)


def _pool(pools: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """The sums of a pool's parts; the sizes of a part are those of the first replica."""
    sizes = {name: value for name, value in pools[0].items() if name in ("bytes_each", "block_size_tokens")}
    return _sums(pools) | sizes


def _extremes(
    figures: Sequence[Mapping[str, float | None]], extreme: Callable[[list[float]], float]
) -> dict[str, float | None]:
    """For each name the extreme of the values, or None."""
    found = {name: [one[name] for one in figures] for name in figures[0]}
    known = {name: [value for value in values if value is not None] for name, values in found.items()}
    return {name: extreme(values) if values else None for name, values in known.items()}


def _tenants(tenants: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    by_name: dict[str, list[dict[str, int]]] = {}
    for tenant in tenants:
        by_name.setdefault(tenant["name"], []).append(_counts(tenant))
    return [{"name": name, **_sums(counts)} for name, counts in by_name.items()]


def _series(series: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The sums of the points that end in the same interval.

    The last interval is the last that all replicas have a point in, so that levels do not fall at the end.
    """
    every_s = series[0]["every_s"]
    by_interval: dict[int, list[Mapping[str, Any]]] = {}
    for one in series:
        for point in one["points"]:
            by_interval.setdefault(int(point["time_s"] // every_s), []).append(point)
    ends = [one["points"][-1]["time_s"] // every_s for one in series if one["points"]]
    points = []
    for interval in sorted(number for number in by_interval if number <= min(ends)):
        together = by_interval[interval]
        counts = _sums([_counts(point) for point in together])
        by_reason = _sums([point["by_reason"] for point in together])
        points.append({**counts, "time_s": interval * every_s, "by_reason": by_reason})
    return {"every_s": every_s, "points": points}


def _requests(snapshots: Mapping[str, Snapshot]) -> list[dict[str, Any]]:
    named = [
        {**request, "id": f"{name}-{request['id']}"}
        for name, one in snapshots.items()
        for request in one["requests"]
    ]
    return sorted(named, key=lambda one: one["arrived_s"], reverse=True)[:NUM_REQUESTS]
