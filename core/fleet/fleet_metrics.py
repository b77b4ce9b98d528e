"""The metrics of a fleet: what replicas report, and what only the fleet knows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from .replica_report import ReplicaReport


@dataclass
class FleetCounts:
    """What a fleet counts.

    Attributes:
        num_requests: requests that were taken.
        num_lost: how often a replica was lost while it answered.
        num_retries: how often the rest of an answer went to another replica.
        num_given_up: requests that lost too many replicas.
        num_waiting, num_running: requests that no replica has confirmed, and those that one has.
    """

    num_requests: int = 0
    num_lost: int = 0
    num_retries: int = 0
    num_given_up: int = 0
    num_waiting: int = 0
    num_running: int = 0


def fleet_metrics_text(
    counts: FleetCounts, num_replicas: int, reports: Sequence[ReplicaReport]
) -> tuple[bytes, str]:
    """All metrics; those of a replica have its name in the label `replica`.

    Returns:
        The body of a reply to Prometheus, and its content type.

    Raises:
        ValueError: a report is no text of Prometheus.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_FleetCollector(counts, num_replicas, reports))
    return generate_latest(registry), CONTENT_TYPE_LATEST


class _FleetCollector(Collector):
    def __init__(self, counts: FleetCounts, num_replicas: int, reports: Sequence[ReplicaReport]) -> None:
        self._counts = counts
        self._num_replicas = num_replicas
        self._reports = reports

    def collect(self) -> Iterator[Metric]:
        counts = self._counts
        for name, help_text, number in (
            ("replicas", "Replicas that serve.", self._num_replicas),
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
        for report in self._reports:
            for family in text_string_to_metric_families(report.metrics.decode()):
                merged = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    labels = {**sample.labels, "replica": report.replica}
                    merged.samples.append(sample._replace(labels=labels))
        yield from families.values()
