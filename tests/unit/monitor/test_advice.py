"""Warnings of a monitor: each cause is made to happen, is named once, with the setting that helps."""

import logging
from typing import Any

import mambaslots as ms
import pytest
from mambaslots.monitor import Monitor, advice
from mambaslots.monitor import monitor as monitor_module
from oracle.plans import SwitchedPlan
from oracle.serving import random_tokens, small_engine

PARAMS = ms.SamplingParams(max_tokens=1)
TEXTS = [random_tokens(40, seed) for seed in range(24)]


@pytest.fixture(autouse=True)
def small_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "WINDOW_TOKENS", 400)
    monkeypatch.setattr(monitor_module, "_JUDGE_INTERVAL_S", 0.0)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0  # so that every second look ends an interval of the series
        return self.now


def warned(
    prompts: list[list[int]], params: ms.SamplingParams = PARAMS, *, repeats: int = 3, **settings: Any
) -> list[str]:
    """The warnings about an engine that serves these prompts, one after the other, again and again."""
    engine = small_engine(**settings)
    monitor = Monitor(engine, model_name="small", clock=Clock())
    for _ in range(repeats):
        for prompt in prompts:
            engine.generate([prompt], params)
    warnings: list[str] = monitor.snapshot()["warnings"]
    return warnings


def test_states_that_are_evicted_ask_for_slots(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="mambaslots.monitor"):
        warnings = warned(TEXTS[:6], num_mamba_slots=4)
    assert warnings == [record.getMessage() for record in caplog.records]
    assert {record.name for record in caplog.records} == {"mambaslots.monitor"}
    (slots,) = warnings
    assert "state_evicted" in slots
    assert "raise num_mamba_slots by up to" in slots


def test_as_many_slots_more_as_the_warning_says_are_enough() -> None:
    (slots,) = warned(TEXTS[:6], num_mamba_slots=4)
    number = int(slots.split("by up to ")[1].split(",")[0])
    assert warned(TEXTS[:6], num_mamba_slots=4 + number) == []


def test_kv_that_is_evicted_asks_for_blocks() -> None:
    (warning,) = warned(TEXTS[:6], num_kv_blocks=13, max_sequence_length=96)
    assert "kv_evicted" in warning
    assert "raise num_kv_blocks by up to" in warning


def test_states_that_no_plan_takes_ask_for_marks() -> None:
    """All prompts continue one text at its end, where the plan takes nothing."""
    plan = SwitchedPlan(tail=False, branch=False, step_ends=False, decode="off", marks=(8,))
    (warning,) = warned([TEXTS[0]], checkpoint_plan=plan, repeats=40)
    assert "state_not_taken" in warning
    assert "CheckpointPlan.marks" in warning
    assert "prefill_interval" in warning


def test_branches_that_are_seen_first_again_and_again_ask_for_marks() -> None:
    branches = [TEXTS[0][:32] + text[:9] for text in TEXTS[1:]]
    plan = SwitchedPlan(tail=False, branch=False, step_ends=False, decode="off", marks=(8,))
    warnings = warned([TEXTS[0], *branches], checkpoint_plan=plan, repeats=1)
    assert any("branch_first_seen" in warning and "marks" in warning for warning in warnings)


def test_log_probs_of_prompts_are_named_where_they_cost_hits() -> None:
    params = ms.SamplingParams(max_tokens=1, skip_prompt_log_probs=False)
    (warning,) = warned(TEXTS[:1], params, repeats=40)
    assert "skip_prompt_log_probs" in warning


def test_a_cache_that_is_off_is_named_at_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="mambaslots.monitor"):
        engine = small_engine(enable_prefix_caching=False)
        monitor = Monitor(engine, model_name="small")
    (warning,) = monitor.snapshot()["warnings"]
    assert "enable_prefix_caching is False" in warning
    assert len(caplog.records) == 1
    engine.generate(TEXTS, PARAMS)
    assert monitor.snapshot()["warnings"] == [warning]


def test_blocks_that_are_longer_than_prompts_are_named() -> None:
    prompts = [random_tokens(20, seed) for seed in range(64)]
    (warning,) = warned(prompts, repeats=1, block_size_tokens=32)
    assert "100% of 400 prompt tokens were computed because of partial_block: " in warning
    assert "a smaller block_size_tokens (a multiple of 4) caches more of them" in warning


def test_a_model_that_allows_no_shorter_block_is_not_warned_of() -> None:
    assert warned([random_tokens(3, seed) for seed in range(200)], repeats=1, block_size_tokens=4) == []


@pytest.mark.parametrize(
    ("prompts", "repeats"),
    [
        pytest.param(TEXTS, 1, id="never_seen"),
        pytest.param([random_tokens(9, 1)], 60, id="last_token and partial_block"),
        pytest.param(TEXTS[:2], 12, id="hits"),
    ],
)
def test_what_no_setting_helps_is_no_alarm(prompts: list[list[int]], repeats: int) -> None:
    assert warned(prompts, repeats=repeats) == []


def test_states_of_prompts_that_never_come_again_are_no_alarm() -> None:
    assert warned(TEXTS, repeats=1, num_mamba_slots=2, num_kv_blocks=16, max_sequence_length=96) == []


def test_a_reason_is_warned_of_by_its_share_of_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = small_engine(num_mamba_slots=4, eviction_policy="lru")
    for share, window, expected in ((0.99, 400, 0), (0.2, 10**9, 0), (0.2, 400, 1)):
        monkeypatch.setattr(advice, "MAX_LOST_SHARE", share)
        monkeypatch.setattr(advice, "WINDOW_TOKENS", window)
        monitor = Monitor(engine, model_name="small", clock=Clock())
        for _ in range(3):
            for text in TEXTS[:6]:
                engine.generate([text], PARAMS)
        assert len(monitor.snapshot()["warnings"]) == expected
        monitor.close()
