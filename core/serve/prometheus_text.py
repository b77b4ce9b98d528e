"""A monitor's figures in Prometheus' text format."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from ..monitor.figures import DurationHistogram
from ..monitor.metrics import COUNTERS, DURATIONS, FAILED_ACCEPTS, GAUGES, Figure
from ..monitor.monitor import Monitor
from ..version import VERSION

Row = tuple[str, str, float | Mapping[Any, float], str]
"""Name without "mambaslots_", what it means, value or values, and the label that tells values apart."""


def text_of(metrics: Iterable[Metric]) -> bytes:
    """The body of a reply to Prometheus with these metrics, of type `CONTENT_TYPE_LATEST`."""
    registry: Any = SimpleNamespace(collect=lambda: metrics)
    return generate_latest(registry)


def connection_metrics(num_failed_accepts: int) -> Iterator[Metric]:
    """What a server that accepts connections itself adds to the metrics of its engine."""
    row = FAILED_ACCEPTS.name, _help(FAILED_ACCEPTS), num_failed_accepts, ""
    return families(CounterMetricFamily, [row])


def monitor_metrics(monitor: Monitor) -> Iterator[Metric]:
    figures = monitor.figures()
    yield InfoMetricFamily(
        "mambaslots_build",
        "What is served, and by which version.",
        {"version": VERSION, "model": monitor.model_name},
    )
    for kind, table in ((CounterMetricFamily, COUNTERS), (GaugeMetricFamily, GAUGES)):
        yield from families(kind, ((row.name, _help(row), row.value(figures), row.label) for row in table))
    for figure in DURATIONS:
        duration: DurationHistogram = figure.value(figures)
        bounds = [*map(str, duration.bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(duration.counts), strict=True))
        name = f"mambaslots_{figure.name}_seconds"
        yield HistogramMetricFamily(name, _help(figure), buckets=buckets, sum_value=duration.sum)


def _help(figure: Figure) -> str:
    return f"{figure.help[0].upper()}{figure.help[1:]}."


def families(kind: type[CounterMetricFamily | GaugeMetricFamily], rows: Iterable[Row]) -> Iterator[Metric]:
    """Counters or gauges; prometheus_client adds `_total` to the name of a counter."""
    for name, help_text, value, label in rows:
        family = kind(f"mambaslots_{name}", help_text, labels=[label] if label else [])
        samples = value.items() if isinstance(value, Mapping) else [("", value)]
        for label_value, number in samples:
            family.add_metric([label_value] if label else [], number)
        yield family
