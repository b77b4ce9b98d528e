"""A monitor's figures in Prometheus' text format."""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ..cache_stats import CacheStats
from ..inference.contexts.cache.pool_stats import AGE_BOUNDS_S, AgeCounts
from ..monitor.figures import Histogram, MonitorFigures
from ..monitor.monitor import Monitor


def metrics_text(monitor: Monitor) -> tuple[bytes, str]:
    """All metrics of an engine; docs/operations.md explains each. Any thread may call it.

    Labels have few values: reasons, causes, uses of a pool, and at most 66 tenants. Nothing tells of the
    content of a prompt.

    Returns:
        The body of a reply to Prometheus, and its content type.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(MonitorCollector(monitor))
    return generate_latest(registry), CONTENT_TYPE_LATEST


class MonitorCollector(Collector):
    """A collector for a registry of prometheus_client; reads the monitor at each scrape."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def collect(self) -> Iterator[Metric]:
        """The metrics now."""
        monitor = self._monitor
        figures = monitor.figures()
        yield InfoMetricFamily(
            "mambaslots_build",
            "What is served, and by which version.",
            {"version": monitor.version, "model": monitor.model_name},
        )
        yield from _tokens(figures)
        yield from _requests(figures, monitor.engine.config.max_requests)
        yield from _states(figures.stats.cache)
        yield from _kv_blocks(figures.stats.cache)
        yield from _tenants(figures)
        yield from _durations(figures)
        yield _gauge("mambaslots_warnings", "Warnings that the monitor has given.", figures.num_warnings)
        yield _counter(
            "mambaslots_cache_rebuilds",
            "Interrupted calls that cost all cached prefixes.",
            figures.stats.num_rebuilds,
        )


def _tokens(figures: MonitorFigures) -> Iterator[Metric]:
    cache, drafts = figures.stats.cache, figures.stats.speculation
    yield _counter(
        "mambaslots_prompt_tokens", "Prompt tokens, resumed and computed.", cache.num_prompt_tokens
    )
    yield _counter(
        "mambaslots_resumed_prompt_tokens", "Prompt tokens that were not computed.", cache.num_resumed_tokens
    )
    yield _counters(
        "mambaslots_computed_prompt_tokens",
        "Prompt tokens that were computed, by why they were not resumed.",
        "reason",
        cache.computed_by_reason,
    )
    yield _counter(
        "mambaslots_recomputed_tokens",
        "Tokens computed again after a preemption or a failed step.",
        cache.num_recomputed_tokens,
    )
    yield _counter("mambaslots_generated_tokens", "Tokens of answers.", figures.num_generated)
    yield _counter("mambaslots_drafted_tokens", "Tokens that drafts guessed.", drafts.num_drafted)
    yield _counter(
        "mambaslots_accepted_drafted_tokens", "Drafted tokens that were right.", drafts.num_accepted
    )


def _requests(figures: MonitorFigures, max_requests: int) -> Iterator[Metric]:
    stats = figures.stats
    yield _counter("mambaslots_requests_added", "Requests that were queued.", figures.num_added)
    yield _counters(
        "mambaslots_requests_ended", "Requests that ended, by how.", "finish_reason", figures.num_ended
    )
    yield _gauge("mambaslots_requests_waiting", "Requests in the queue.", stats.num_waiting)
    yield _gauge(
        "mambaslots_requests_running", "Requests that hold memory, paused ones included.", stats.num_running
    )
    yield _gauge("mambaslots_requests_paused", "Running requests that wait for a KV block.", stats.num_paused)
    yield _gauge("mambaslots_requests_max", "Requests that can run at once.", max_requests)


def _states(cache: CacheStats) -> Iterator[Metric]:
    yield _gauges(
        "mambaslots_state_slots",
        "State slots by use; together the whole pool.",
        "use",
        {
            "free": cache.num_free_slots,
            "reserved": cache.num_reserved_slots,
            "committed": cache.num_committed_slots,
            "live": cache.num_live_slots,
        },
    )
    yield _gauge(
        "mambaslots_state_slots_pinned", "State slots that cannot be evicted now.", cache.num_pinned_slots
    )
    yield _counter("mambaslots_states_committed", "States that became findable.", cache.num_states_committed)
    yield _counters(
        "mambaslots_states_left", "States that left the cache, by cause.", "cause", cache.states_left_by_cause
    )
    yield _counter(
        "mambaslots_states_refused",
        "States that were not taken for want of a slot.",
        cache.num_states_refused,
    )
    yield _counter(
        "mambaslots_states_evicted_unused",
        "States evicted for want of memory that nobody had resumed from.",
        cache.num_states_evicted_unused,
    )
    yield _ages("mambaslots_state_eviction_age_seconds", "Last use to eviction of states.", cache.state_ages)
    tiers = cache.tiers
    yield _gauges(
        "mambaslots_tier_states",
        "Copies of states in host memory and on the disk.",
        "tier",
        {"host": tiers.num_host_states, "disk": tiers.num_disk_states},
    )
    from_disk = tiers.num_states_fetched_from_disk
    yield _counters(
        "mambaslots_tier_states_fetched",
        "States that came back to the device, by where they were.",
        "tier",
        {"host": tiers.num_states_fetched - from_disk, "disk": from_disk},
    )
    damaged = tiers.host_copies_left_by_cause["damaged"], tiers.disk_copies_left_by_cause["damaged"]
    yield _counters(
        "mambaslots_tier_copies_damaged",
        "Copies of states whose bytes were not those that were stored.",
        "tier",
        dict(zip(("host", "disk"), damaged, strict=True)),
    )


def _kv_blocks(cache: CacheStats) -> Iterator[Metric]:
    yield _gauges(
        "mambaslots_kv_blocks",
        "KV blocks by use; together the whole pool.",
        "use",
        {
            "free": cache.num_free_kv_blocks,
            "cached": cache.num_cached_kv_blocks,
            "held": cache.num_held_kv_blocks,
        },
    )
    yield _counter(
        "mambaslots_kv_blocks_registered", "KV blocks that became findable.", cache.num_kv_blocks_registered
    )
    yield _counters(
        "mambaslots_kv_blocks_left",
        "Findable KV blocks that left the cache, by cause.",
        "cause",
        cache.kv_blocks_left_by_cause,
    )
    yield _ages(
        "mambaslots_kv_block_eviction_age_seconds", "Last use to eviction of KV blocks.", cache.kv_block_ages
    )


def _tenants(figures: MonitorFigures) -> Iterator[Metric]:
    tenants = figures.tenants
    for name, help_text, values in (
        ("requests", "Requests of a tenant.", {one.name: one.num_requests for one in tenants}),
        ("prompt_tokens", "Prompt tokens of a tenant.", {one.name: one.num_prompt_tokens for one in tenants}),
        (
            "resumed_prompt_tokens",
            "Prompt tokens of a tenant that were not computed.",
            {one.name: one.num_resumed_tokens for one in tenants},
        ),
    ):
        yield _counters(f"mambaslots_tenant_{name}", help_text, "tenant", values)
    yield _gauges(
        "mambaslots_tenant_states",
        "States of a tenant in the cache.",
        "tenant",
        {one.name: one.num_states for one in tenants},
    )
    yield _gauges(
        "mambaslots_tenant_kv_blocks",
        "Findable KV blocks of a tenant, held and cached.",
        "tenant",
        {one.name: one.num_kv_blocks for one in tenants},
    )


def _durations(figures: MonitorFigures) -> Iterator[Metric]:
    for name, help_text, histogram in (
        ("time_to_first_token", "Arrival to first token.", figures.first_token),
        ("queue_time", "Arrival to first step.", figures.queue),
        ("inter_token", "Time between two tokens of an answer.", figures.inter_token),
        ("step", "Time of a step of all running requests.", figures.step),
    ):
        yield _histogram(f"mambaslots_{name}_seconds", help_text, histogram)


def _counter(name: str, help_text: str, value: float) -> Metric:
    """A counter; `_total` is added to its name."""
    return CounterMetricFamily(name, help_text, value=value)


def _counters[Label: str](name: str, help_text: str, label: str, values: Mapping[Label, float]) -> Metric:
    return _labelled(CounterMetricFamily(name, help_text, labels=[label]), values.items())


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, help_text, value=value)


def _gauges(name: str, help_text: str, label: str, values: Mapping[str, float]) -> Metric:
    return _labelled(GaugeMetricFamily(name, help_text, labels=[label]), values.items())


def _labelled[Family: (CounterMetricFamily, GaugeMetricFamily)](
    family: Family, values: Iterable[tuple[str, float]]
) -> Family:
    for label, value in values:
        family.add_metric([label], value)
    return family


def _histogram(name: str, help_text: str, histogram: Histogram) -> Metric:
    total = 0
    buckets: list[tuple[str, float]] = []
    for bound, number in zip([*map(str, histogram.bounds), "+Inf"], histogram.counts, strict=True):
        total += number
        buckets.append((bound, total))
    return HistogramMetricFamily(name, help_text, buckets=buckets, sum_value=histogram.sum)


def _ages(name: str, help_text: str, ages: AgeCounts) -> Metric:
    return _histogram(name, help_text, Histogram(AGE_BOUNDS_S, ages.counts, ages.sum_s))
