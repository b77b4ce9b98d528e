"""A monitor's figures in Prometheus' text format."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from ..inference.contexts.cache.pool_stats import AGE_BOUNDS_S
from ..monitor.monitor import Monitor
from ..version import VERSION

Row = tuple[str, str, float | Mapping[Any, float], str]
"""Name without "mambaslots_", what it means, value or values, and the label that tells values apart."""


def text_of(metrics: Iterable[Metric]) -> tuple[bytes, str]:
    """The body of a reply to Prometheus with these metrics, and its content type."""
    registry: Any = SimpleNamespace(collect=lambda: metrics)
    return generate_latest(registry), CONTENT_TYPE_LATEST


def metrics_text(monitor: Monitor) -> tuple[bytes, str]:
    """The body of a reply to Prometheus with all metrics of an engine, and its content type.

    Any thread may call it; docs/operations.md explains each metric. Labels have few values, and no metric
    holds content of a prompt.
    """
    return text_of(monitor_metrics(monitor))


def connections_text(num_failed_accepts: int) -> bytes:
    """What a server that accepts connections itself adds to the metrics of its engine."""
    help_text = "Attempts to accept connections that failed for want of descriptors or memory."
    row: Row = ("failed_accepts", help_text, num_failed_accepts, "")
    return text_of(families(CounterMetricFamily, [row]))[0]


def monitor_metrics(monitor: Monitor) -> Iterator[Metric]:
    """All metrics of an engine."""
    figures = monitor.figures()
    stats, cache, tiers = figures.stats, figures.stats.cache, figures.stats.cache.tiers
    yield InfoMetricFamily(
        "mambaslots_build",
        "What is served, and by which version.",
        {"version": VERSION, "model": monitor.model_name},
    )
    from_disk = tiers.num_states_fetched_from_disk
    fetched = {"host": tiers.num_states_fetched - from_disk, "disk": from_disk}
    slots = {
        "free": cache.num_free_slots, "reserved": cache.num_reserved_slots,
        "committed": cache.num_committed_slots, "live": cache.num_live_slots,
    }  # fmt: skip
    blocks = {
        "free": cache.num_free_kv_blocks, "cached": cache.num_cached_kv_blocks,
        "held": cache.num_held_kv_blocks,
    }  # fmt: skip

    def by_tenant(field: str) -> dict[str, int]:
        return {one.name: getattr(one, field) for one in figures.tenants}

    yield from families(CounterMetricFamily, (
        ("prompt_tokens", "Prompt tokens, resumed and computed.", cache.num_prompt_tokens, ""),
        ("resumed_prompt_tokens", "Prompt tokens that were not computed.", cache.num_resumed_tokens, ""),
        ("computed_prompt_tokens", "Prompt tokens that were computed, by why they were not resumed.",
         cache.computed_by_reason, "reason"),
        ("recomputed_tokens", "Tokens computed again after a preemption or a failed step.",
         cache.num_recomputed_tokens, ""),
        ("generated_tokens", "Tokens of answers.", figures.num_generated, ""),
        ("drafted_tokens", "Tokens that drafts guessed.", stats.speculation.num_drafted, ""),
        ("accepted_drafted_tokens", "Drafted tokens that were right.", stats.speculation.num_accepted, ""),
        ("requests_added", "Requests that were queued.", figures.num_added, ""),
        ("requests_ended", "Requests that ended, by how.", figures.num_ended, "finish_reason"),
        ("states_committed", "States that became findable.", cache.num_states_committed, ""),
        ("states_left", "States removed from the cache, by cause.", cache.states_removed_by_cause, "cause"),
        ("states_refused", "States that were not stored for want of a slot.", cache.num_states_refused, ""),
        ("states_evicted_unused", "States evicted for want of memory, never resumed from.",
         cache.num_states_evicted_unused, ""),
        ("tier_states_fetched", "States copied back to the device, by the tier they were in.",
         fetched, "tier"),
        ("tier_copies_damaged", "Copies of states whose bytes were not those that were stored.",
         tiers.num_copies_damaged, ""),
        ("kv_blocks_registered", "KV blocks that became findable.", cache.num_kv_blocks_registered, ""),
        ("kv_blocks_left", "Findable KV blocks removed from the cache, by cause.",
         cache.kv_blocks_removed_by_cause, "cause"),
        ("tenant_requests", "Requests of a tenant.", by_tenant("num_requests"), "tenant"),
        ("tenant_prompt_tokens", "Prompt tokens of a tenant.", by_tenant("num_prompt_tokens"), "tenant"),
        ("tenant_resumed_prompt_tokens", "Prompt tokens of a tenant that were not computed.",
         by_tenant("num_resumed_tokens"), "tenant"),
        ("cache_rebuilds", "Interrupted calls that cost all cached prefixes.", stats.num_rebuilds, ""),
    ))  # fmt: skip
    yield from families(GaugeMetricFamily, (
        ("requests_waiting", "Requests in the queue.", stats.num_waiting, ""),
        ("requests_running", "Requests that hold memory, paused ones included.", stats.num_running, ""),
        ("requests_paused", "Running requests that wait for a KV block.", stats.num_paused, ""),
        ("requests_max", "Requests that can run at once.", monitor.engine.config.max_requests, ""),
        ("state_slots", "State slots by use; together the whole pool.", slots, "use"),
        ("state_slots_pinned", "State slots that cannot be evicted now.", cache.num_pinned_slots, ""),
        ("tier_states", "Copies of states in host memory and on the disk.",
         {"host": tiers.num_host_states, "disk": tiers.num_disk_states}, "tier"),
        ("kv_blocks", "KV blocks by use; together the whole pool.", blocks, "use"),
        ("warnings", "Warnings that the monitor has given.", figures.num_warnings, ""),
    ))  # fmt: skip
    ages = cache.state_ages
    for name, help_text, bounds, counts, sum_s in (
        ("state_eviction_age", "Last use to eviction of states.", AGE_BOUNDS_S, ages.counts, ages.sum_s),
        ("time_to_first_token", "Arrival to first token.", *figures.first_token.classes),
        ("queue_time", "Arrival to first step.", *figures.queue.classes),
        ("inter_token", "Time between two tokens of an answer.", *figures.inter_token.classes),
        ("step", "Time of a step of all running requests.", *figures.step.classes),
    ):
        buckets = list(zip([*map(str, bounds), "+Inf"], accumulate(counts), strict=True))
        yield HistogramMetricFamily(f"mambaslots_{name}_seconds", help_text, buckets=buckets, sum_value=sum_s)


def families(kind: type[CounterMetricFamily | GaugeMetricFamily], rows: Iterable[Row]) -> Iterator[Metric]:
    """Counters or gauges; prometheus_client adds `_total` to the name of a counter."""
    for name, help_text, value, label in rows:
        family = kind(f"mambaslots_{name}", help_text, labels=[label] * bool(label))
        for each, number in value.items() if isinstance(value, Mapping) else [("", value)]:
            family.add_metric([each] * bool(label), number)
        yield family
