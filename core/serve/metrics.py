"""A monitor's figures in Prometheus' text format."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from ..cache_stats import CacheStats
from ..inference.contexts.cache.pool_stats import AGE_BOUNDS_S
from ..monitor.figures import MonitorFigures
from ..monitor.monitor import Monitor


def metrics_text(monitor: Monitor) -> tuple[bytes, str]:
    """The body of a reply to Prometheus with all metrics of an engine, and its content type.

    Any thread may call it; docs/operations.md explains each metric. Labels have few values, and no metric
    holds content of a prompt.
    """
    return generate_latest(MonitorCollector(monitor)), CONTENT_TYPE_LATEST


class MonitorCollector:
    """Reads a monitor for Prometheus."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def collect(self) -> Iterator[Metric]:
        monitor = self._monitor
        figures = monitor.figures()
        built = {"version": monitor.version, "model": monitor.model_name}
        yield InfoMetricFamily("mambaslots_build", "What is served, and by which version.", built)
        yield from _tokens(figures)
        yield from _requests(figures, monitor.engine.config.max_requests)
        yield from _states(figures.stats.cache)
        yield from _tiers(figures.stats.cache)
        yield from _kv_blocks(figures.stats.cache)
        yield from _tenants(figures)
        for name, help_text, latency in (
            ("time_to_first_token", "Arrival to first token.", figures.first_token),
            ("queue_time", "Arrival to first step.", figures.queue),
            ("inter_token", "Time between two tokens of an answer.", figures.inter_token),
            ("step", "Time of a step of all running requests.", figures.step),
        ):
            yield _histogram(f"{name}_seconds", help_text, latency.bounds, latency.counts, latency.sum)
        yield _gauge("warnings", "Warnings that the monitor has given.", figures.num_warnings)
        rebuilds = figures.stats.num_rebuilds
        yield _counter("cache_rebuilds", "Interrupted calls that cost all cached prefixes.", rebuilds)


def _tokens(figures: MonitorFigures) -> Iterator[Metric]:
    cache, drafts = figures.stats.cache, figures.stats.speculation
    yield _counter("prompt_tokens", "Prompt tokens, resumed and computed.", cache.num_prompt_tokens)
    yield _counter("resumed_prompt_tokens", "Prompt tokens that were not computed.", cache.num_resumed_tokens)
    help_text = "Prompt tokens that were computed, by why they were not resumed."
    yield _counter("computed_prompt_tokens", help_text, cache.computed_by_reason, "reason")
    help_text = "Tokens computed again after a preemption or a failed step."
    yield _counter("recomputed_tokens", help_text, cache.num_recomputed_tokens)
    yield _counter("generated_tokens", "Tokens of answers.", figures.num_generated)
    yield _counter("drafted_tokens", "Tokens that drafts guessed.", drafts.num_drafted)
    yield _counter("accepted_drafted_tokens", "Drafted tokens that were right.", drafts.num_accepted)


def _requests(figures: MonitorFigures, max_requests: int) -> Iterator[Metric]:
    stats = figures.stats
    yield _counter("requests_added", "Requests that were queued.", figures.num_added)
    yield _counter("requests_ended", "Requests that ended, by how.", figures.num_ended, "finish_reason")
    yield _gauge("requests_waiting", "Requests in the queue.", stats.num_waiting)
    yield _gauge("requests_running", "Requests that hold memory, paused ones included.", stats.num_running)
    yield _gauge("requests_paused", "Running requests that wait for a KV block.", stats.num_paused)
    yield _gauge("requests_max", "Requests that can run at once.", max_requests)


def _states(cache: CacheStats) -> Iterator[Metric]:
    uses = {
        "free": cache.num_free_slots,
        "reserved": cache.num_reserved_slots,
        "committed": cache.num_committed_slots,
        "live": cache.num_live_slots,
    }
    yield _gauge("state_slots", "State slots by use; together the whole pool.", uses, "use")
    yield _gauge("state_slots_pinned", "State slots that cannot be evicted now.", cache.num_pinned_slots)
    yield _counter("states_committed", "States that became findable.", cache.num_states_committed)
    left = cache.states_removed_by_cause
    yield _counter("states_left", "States removed from the cache, by cause.", left, "cause")
    refused = cache.num_states_refused
    yield _counter("states_refused", "States that were not stored for want of a slot.", refused)
    unused = cache.num_states_evicted_unused
    yield _counter("states_evicted_unused", "States evicted for want of memory, never resumed from.", unused)
    ages = cache.state_ages
    yield _histogram(
        "state_eviction_age_seconds", "Last use to eviction of states.", AGE_BOUNDS_S, ages.counts, ages.sum_s
    )


def _tiers(cache: CacheStats) -> Iterator[Metric]:
    tiers = cache.tiers
    copies = {"host": tiers.num_host_states, "disk": tiers.num_disk_states}
    yield _gauge("tier_states", "Copies of states in host memory and on the disk.", copies, "tier")
    from_disk = tiers.num_states_fetched_from_disk
    fetched = {"host": tiers.num_states_fetched - from_disk, "disk": from_disk}
    help_text = "States copied back to the device, by the tier they were in."
    yield _counter("tier_states_fetched", help_text, fetched, "tier")
    damaged = {
        "host": tiers.host_copies_removed_by_cause["damaged"],
        "disk": tiers.disk_copies_removed_by_cause["damaged"],
    }
    help_text = "Copies of states whose bytes were not those that were stored."
    yield _counter("tier_copies_damaged", help_text, damaged, "tier")


def _kv_blocks(cache: CacheStats) -> Iterator[Metric]:
    uses = {
        "free": cache.num_free_kv_blocks,
        "cached": cache.num_cached_kv_blocks,
        "held": cache.num_held_kv_blocks,
    }
    yield _gauge("kv_blocks", "KV blocks by use; together the whole pool.", uses, "use")
    yield _counter("kv_blocks_registered", "KV blocks that became findable.", cache.num_kv_blocks_registered)
    left = cache.kv_blocks_removed_by_cause
    yield _counter("kv_blocks_left", "Findable KV blocks removed from the cache, by cause.", left, "cause")
    ages = cache.kv_block_ages
    yield _histogram(
        "kv_block_eviction_age_seconds",
        "Last use to eviction of KV blocks.",
        AGE_BOUNDS_S,
        ages.counts,
        ages.sum_s,
    )


def _tenants(figures: MonitorFigures) -> Iterator[Metric]:
    for family, name, help_text in (
        (_counter, "requests", "Requests of a tenant."),
        (_counter, "prompt_tokens", "Prompt tokens of a tenant."),
        (_counter, "resumed_prompt_tokens", "Prompt tokens of a tenant that were not computed."),
        (_gauge, "states", "States of a tenant in the cache."),
        (_gauge, "kv_blocks", "Findable KV blocks of a tenant, held and cached."),
    ):
        attribute = f"num_{name.replace('resumed_prompt', 'resumed')}"
        values = {one.name: getattr(one, attribute) for one in figures.tenants}
        yield family(f"tenant_{name}", help_text, values, "tenant")


def _counter(name: str, help_text: str, value: float | Mapping[Any, float], label: str = "") -> Metric:
    """A counter, or one for each value of `label`; prometheus_client adds `_total` to the name."""
    return _family(CounterMetricFamily, name, help_text, value, label)


def _gauge(name: str, help_text: str, value: float | Mapping[Any, float], label: str = "") -> Metric:
    return _family(GaugeMetricFamily, name, help_text, value, label)


def _family(
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    name: str,
    help_text: str,
    value: float | Mapping[Any, float],
    label: str,
) -> Metric:
    if not isinstance(value, Mapping):
        return kind(f"mambaslots_{name}", help_text, value=value)
    family = kind(f"mambaslots_{name}", help_text, labels=[label])
    for each, number in value.items():
        family.add_metric([each], number)
    return family


def _histogram(
    name: str, help_text: str, bounds: Sequence[float], counts: Sequence[int], sum_s: float
) -> Metric:
    names = [*map(str, bounds), "+Inf"]
    buckets = list(zip(names, accumulate(counts), strict=True))
    return HistogramMetricFamily(f"mambaslots_{name}", help_text, buckets=buckets, sum_value=sum_s)
