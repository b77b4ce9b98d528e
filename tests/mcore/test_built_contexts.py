"""The contexts that were built under the drop-in: which cache nothing, what they count, when they refuse."""

import gc
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mambaslots.mcore
import megatron.core
import pytest
from mambaslots.mcore.built_contexts import built_contexts, idle_reason
from mambaslots.mcore.overrides import REGISTRY
from mambaslots.mcore.recurrence import BLOCK, MODES, RecurrenceDriver, make_context, tokens
from mambaslots.mcore.run_script import as_dict, described
from mcore_rig import cpu_as_gpu


@pytest.fixture(autouse=True)
def _machine() -> Iterator[None]:
    with cpu_as_gpu():
        yield


# ---- contexts that cache nothing


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"enable_prefix_caching": False}, "enable_prefix_caching is False, so mambaslots has nothing to do"),
        (
            {"prefix_caching_mamba_gb": None},
            "prefix_caching_mamba_gb is None, so every prompt token is computed",
        ),
    ],
)
def test_a_context_that_caches_no_state_is_warned_once_with_the_settings_to_change(
    settings: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with mambaslots.mcore.installed():
        context = make_context(**settings)
        lines = described(built_contexts)
    (record,) = [record for record in caplog.records if record.name == "mambaslots.mcore"]
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(f"context 1 caches no states: {reason}")
    assert "pass enable_prefix_caching=True, a prefix_caching_mamba_gb" in record.getMessage()
    assert lines[1].startswith(f"  context 1 cached no states: {reason}")
    assert context.mamba_slot_allocator is None


def test_a_model_without_mamba_layers_is_left_to_the_host() -> None:
    context = SimpleNamespace(enable_prefix_caching=True, is_hybrid_model=False, mamba_slot_allocator=None)
    assert idle_reason(context) == "its model has no Mamba layers, so megatron-core's own KV cache serves it"


def test_a_context_that_caches_states_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with mambaslots.mcore.installed():
        make_context()
        assert [built.idle_reason for built in built_contexts] == [""]
    assert not [record for record in caplog.records if record.name == "mambaslots.mcore"]


def test_under_the_hosts_default_policy_it_is_said_that_states_are_short_lived(
    caplog: pytest.LogCaptureFixture,
) -> None:
    prompt = tokens(3 * BLOCK + 1, seed=1)
    with mambaslots.mcore.installed():
        host = RecurrenceDriver(make_context(policy="ref_zero"))
        for _ in range(2):
            host.serve(prompt)
        lines = described(built_contexts)
    (record,) = [record for record in caplog.records if record.name == "mambaslots.mcore"]
    assert record.getMessage().startswith("context 1: prefix_caching_eviction_policy is REF_ZERO")
    assert "resumed 0" in lines[1]
    assert lines[-1].endswith("pass PrefixCachingEvictionPolicy.LRU")


# ---- counts


def test_every_context_is_reported_and_one_that_is_gone_keeps_its_counts() -> None:
    prompt = tokens(3 * BLOCK + 1, seed=1)
    with mambaslots.mcore.installed() as installation:
        assert described(built_contexts)[0].startswith("no DynamicInferenceContext was built")
        for number in (1, 2, 3):
            host = RecurrenceDriver(make_context())
            for _ in range(number - 1):
                host.serve(prompt)
        before = mambaslots.mcore.stats(host.context)
        del host
        gc.collect()
        contexts = built_contexts
        lines = described(contexts)
        written = as_dict(installation, contexts, rank=0, exit_code=0)
    assert [each.context for each in contexts] == [None] * 3
    assert contexts[2].stats == before
    assert lines[:3] == [
        "3 contexts built",
        "  context 1: no request was added",
        "  context 2: requests 1, prompt tokens 25, resumed 0 (hit rate 0.0%), computed 25",
    ]
    assert "  context 3: requests 2, prompt tokens 50, resumed 24 (hit rate 48.0%), computed 26" in lines
    assert "    computed by reason: never_seen 25, partial_block 1" in lines
    assert [each["num_requests"] for each in written["contexts"]] == [0, 1, 2]
    assert written["plan"] == "decode=rolling"


def test_a_context_that_resumes_is_counted_once() -> None:
    with mambaslots.mcore.installed():
        host = RecurrenceDriver(make_context(kv_cache_management_mode=MODES.RECOMPUTE))
        host.serve(tokens(2 * BLOCK, seed=1))
        host.context.deallocate_inference_state_buffers()
        host.context.reinitialize_inference_state_buffers()
        host.serve(tokens(2 * BLOCK, seed=1))
        (built,) = built_contexts
        assert built.stats.num_requests == 2
        assert built.stats == mambaslots.mcore.stats(host.context)


# ---- uninstall


def test_a_context_refuses_to_serve_once_the_drop_in_is_out() -> None:
    prompt = tokens(3 * BLOCK + 1, seed=1)
    with mambaslots.mcore.installed():
        host = RecurrenceDriver(make_context())
        assert [host.serve(prompt)[0] for _ in range(2)] == [0, 3 * BLOCK]
        host.add(prompt)
    for serve in (lambda: host.add(prompt), host.step):
        with pytest.raises(RuntimeError, match=r"uninstall\(\) has been called .* build a new context"):
            serve()
    with mambaslots.mcore.installed(), pytest.raises(RuntimeError, match="build a new context"):
        host.add(prompt)


def test_without_the_refusal_stock_would_compute_wrong_states_from_our_cache() -> None:
    prompt = tokens(3 * BLOCK + 1, seed=1)
    with mambaslots.mcore.installed():
        host = RecurrenceDriver(make_context())
        host.serve(prompt)
    for name in ("add_request", "initialize_attention_state"):
        delattr(host.context, name)
    with pytest.raises(AssertionError):
        host.serve(prompt)


def test_contexts_that_were_built_before_and_after_serve_on() -> None:
    prompt = tokens(BLOCK + 3, seed=1)
    before = RecurrenceDriver(make_context())
    with mambaslots.mcore.installed():
        before.serve(prompt)
    after = RecurrenceDriver(make_context())
    for host in (before, after):
        assert host.serve(prompt)[0] in (0, BLOCK)
    assert not built_contexts


# ---- versions that are not known


def test_a_version_that_is_not_tested_is_named_although_its_sources_are_known(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with mambaslots.mcore.installed():
        assert "tested" not in caplog.text
    monkeypatch.setattr(megatron.core, "__version__", "0.21.0+abc")
    with mambaslots.mcore.installed() as installation:
        assert installation.megatron_core == "0.21.0"
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("mambaslots.mcore", "WARNING")
    assert record.getMessage().startswith("megatron-core 0.21.0 is not among the tested versions (0.19.0, ")
    assert record.getMessage().endswith("all replaced methods have known sources")


def test_the_page_on_megatron_lists_the_faults_of_every_override() -> None:
    lines = (Path(__file__).parents[2] / "docs" / "megatron.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in lines if re.match(r"\| \d+ \|", line)]
    assert [int(number) for number, *_ in rows] == list(range(1, 25))
    assert {fault for each in REGISTRY for fault in each.faults} <= {int(number) for number, *_ in rows}
