"""Metrics, read as Prometheus reads them, against the engine and a brute-force recorder."""

from collections import Counter, defaultdict
from typing import get_args

import mambaslots as ms
import pytest
from mambaslots.params_and_results import FinishReason
from oracle.observed import Recorder
from oracle.serving import random_tokens, small_engine

pytest.importorskip("prometheus_client")

from mambaslots.monitor import Monitor
from mambaslots.serve.prometheus_text import monitor_metrics, text_of
from prometheus_client.parser import text_string_to_metric_families

PARAMS = ms.SamplingParams(max_tokens=5)
DOCUMENT = random_tokens(40, 1)

Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]


def read(monitor: Monitor) -> Samples:
    body = text_of(monitor_metrics(monitor))
    found: Samples = defaultdict(dict)
    for family in text_string_to_metric_families(body.decode()):
        assert family.documentation
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            assert labels not in found[sample.name]
            found[sample.name][labels] = sample.value
    return found


def by_label(samples: Samples, name: str) -> dict[str, float]:
    return {labels[0][1]: value for labels, value in samples[name].items()}


def single(samples: Samples, name: str) -> float:
    return samples[name][()]


def pressed() -> tuple[ms.DynamicInferenceEngine, Monitor, Recorder]:
    """An engine that has evicted states and KV, of two tenants."""
    engine = small_engine(num_mamba_slots=2, num_kv_blocks=16, max_sequence_length=96)
    monitor, recorder = Monitor(engine, model_name="small"), Recorder()
    engine.observe(recorder)
    monitor.name_salt("salt", "alice")
    for _ in range(2):
        for seed in range(4):
            engine.generate([DOCUMENT[: 8 * seed] + random_tokens(30, seed)] * 2, PARAMS)
            engine.generate([DOCUMENT], PARAMS, cache_salt="salt")
    engine.cancel(engine.add_request(DOCUMENT, PARAMS))
    return engine, monitor, recorder


def test_metrics_are_the_engines_counts_and_a_recorders() -> None:
    engine, monitor, recorder = pressed()
    samples, stats, cache = read(monitor), engine.stats(), engine.stats().cache
    reasons = by_label(samples, "mambaslots_computed_prompt_tokens_total")
    assert reasons == {reason: recorder.reasons[reason] for reason in ms.COMPUTE_REASONS}
    assert reasons == cache.computed_by_reason
    assert single(samples, "mambaslots_resumed_prompt_tokens_total") == recorder.num_resumed > 0
    assert single(samples, "mambaslots_prompt_tokens_total") == recorder.num_resumed + sum(reasons.values())
    generated = sum(map(len, recorder.tokens.values()))
    assert single(samples, "mambaslots_generated_tokens_total") == generated
    ended = by_label(samples, "mambaslots_requests_ended_total")
    assert +Counter(ended) == Counter(result.finish_reason for _, result in recorder.ended)
    assert ended.keys() == set(get_args(FinishReason))
    assert single(samples, "mambaslots_requests_added_total") == len(recorder.ended)
    assert by_label(samples, "mambaslots_states_left_total") == cache.states_removed_by_cause
    assert by_label(samples, "mambaslots_kv_blocks_left_total") == cache.kv_blocks_removed_by_cause
    assert cache.states_removed_by_cause["new_state"]
    assert cache.kv_blocks_removed_by_cause["new_block"]
    assert sum(by_label(samples, "mambaslots_state_slots").values()) == 2 + engine.config.max_requests
    assert sum(by_label(samples, "mambaslots_kv_blocks").values()) == 16
    for name, number in (
        ("running", stats.num_running),
        ("waiting", stats.num_waiting),
        ("paused", stats.num_paused),
        ("max", 4),
    ):
        assert single(samples, f"mambaslots_requests_{name}") == number


def test_histograms_are_cumulative_and_count_every_value() -> None:
    _, monitor, recorder = pressed()
    samples, cache = read(monitor), monitor.engine.stats().cache
    answers = [len(tokens) for tokens in recorder.tokens.values()]
    evicted = sum(cache.states_removed_by_cause[cause] for cause in ("new_state", "live_state", "kv_evicted"))
    for name, number in (
        ("time_to_first_token", len(answers)),
        ("inter_token", sum(answers) - len(answers)),
        ("step", recorder.num_steps),
        ("queue_time", len(answers)),
        ("state_eviction_age", evicted),
    ):
        full = f"mambaslots_{name}_seconds"
        buckets = by_label(samples, f"{full}_bucket")
        assert list(buckets.values()) == sorted(buckets.values())
        assert buckets["+Inf"] == single(samples, f"{full}_count") == number
        assert single(samples, f"{full}_sum") > 0
        assert [float(bound) for bound in buckets] == sorted(map(float, buckets))


def test_tenants_add_up_to_the_whole_and_their_number_is_bounded() -> None:
    engine, monitor, _ = pressed()
    samples, cache = read(monitor), engine.stats().cache
    for name, total in (
        ("prompt_tokens_total", cache.num_prompt_tokens),
        ("resumed_prompt_tokens_total", cache.num_resumed_tokens),
    ):
        tenants = by_label(samples, f"mambaslots_tenant_{name}")
        assert tenants.keys() == {"default", "alice"}
        assert sum(tenants.values()) == total
    for number in range(300):
        monitor.name_salt(str(number), f"tenant {number}")
        engine.cancel(engine.add_request([1, 2], PARAMS, cache_salt=str(number)))
    assert len(by_label(read(monitor), "mambaslots_tenant_requests_total")) <= 66


def test_tiers_are_counted() -> None:
    spec = small_engine().context.spec
    engine = small_engine(
        num_mamba_slots=1,
        max_requests=1,
        host_cache_gb=40 * spec.slot_bytes / (1 << 30),
    )
    monitor = Monitor(engine, model_name="small")
    for _ in range(2):
        for seed in range(4):
            engine.generate([random_tokens(30, seed)], PARAMS)
    samples, tiers = read(monitor), engine.stats().cache.tiers
    assert tiers.num_states_fetched > 0
    assert by_label(samples, "mambaslots_tier_states") == {"host": tiers.num_host_states, "disk": 0}
    fetched = by_label(samples, "mambaslots_tier_states_fetched_total")
    assert fetched == {"host": tiers.num_states_fetched, "disk": 0}
    assert single(samples, "mambaslots_tier_copies_damaged_total") == 0


def test_labels_are_few_and_known_and_no_prompt_is_disclosed() -> None:
    _, monitor, _ = pressed()
    body = text_of(monitor_metrics(monitor))
    labels: dict[str, set[str]] = defaultdict(set)
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            for label, value in sample.labels.items():
                labels[label].add(value)
    assert labels.keys() == {
        "reason", "cause", "use", "tier", "tenant", "finish_reason", "le", "version", "model",
    }  # fmt: skip
    assert all(len(values) <= 66 for values in labels.values())
    assert b"salt" not in body.replace(b"mambaslots", b"")


def test_names_are_those_that_prometheus_expects() -> None:
    _, monitor, _ = pressed()
    for family in text_string_to_metric_families(text_of(monitor_metrics(monitor)).decode()):
        assert family.name.startswith("mambaslots_")
        assert not family.name.endswith(("_count", "_sum", "_bucket"))
        assert all(sample.name.endswith("_total") for sample in family.samples) == (family.type == "counter")
        assert family.name.endswith("_seconds") == (family.type == "histogram")
