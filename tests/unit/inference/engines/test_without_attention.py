"""Models without attention: KV blocks have no bytes, and are the names of prefixes alone."""

from pathlib import Path
from typing import Any

import mambaslots as ms
import mambaslots.net as msd
import pytest
from oracle.model_kinds import KINDS, WITH_ATTENTION
from oracle.serving import random_tokens, run_checked, serve_checked, small_config, small_engine, small_model
from oracle.workload import assert_idle

BLOCK = 8
WITHOUT = [name for name in KINDS if name not in WITH_ATTENTION]
pytestmark = pytest.mark.parametrize("kind", WITHOUT, indirect=True)


def engine_of_gigabytes(num_mamba_slots: int = 64, **settings: Any) -> ms.DynamicInferenceEngine:
    """The engine of a user who gives a budget that buys `num_mamba_slots` slots; the model has no KV."""
    num_states = settings.get("max_requests", 4) + num_mamba_slots + 0.5
    gigabytes = num_states * small_model().state_spec().slot_bytes / (1 << 30)
    return small_engine(num_kv_blocks=None, num_mamba_slots=None, total_gb=gigabytes, **settings)


@pytest.mark.parametrize(
    ("settings", "num_blocks"),
    [
        ({"num_mamba_slots": 40}, 4 * 32 + 4 * 40 * 32),
        ({"num_mamba_slots": 3}, 4 * 32 + 4 * 3 * 32),
        ({"num_mamba_slots": 1, "max_requests": 1, "max_sequence_length": 30}, 4 + 4 * 4),
        ({"num_mamba_slots": 0, "enable_prefix_caching": False}, 4 * 32),
    ],
    ids=["many slots", "few slots", "one request", "no cache"],
)
def test_a_budget_of_bytes_buys_names_for_all_slots_and_requests(
    kind: str, settings: dict[str, object], num_blocks: int
) -> None:
    context = engine_of_gigabytes(**settings).context
    assert context.prefix_cache.kv_blocks.total_count == num_blocks
    assert context.memory.kv_cache.nbytes == context.spec.kv_block_bytes(BLOCK) == 0
    assert f"KV {num_blocks} blocks of 8 tokens, 0 MiB" in context.memory.summary()


def test_a_number_of_blocks_is_taken_as_it_is_given(kind: str) -> None:
    assert small_engine(num_kv_blocks=77).context.prefix_cache.kv_blocks.total_count == 77


def test_no_state_is_lost_for_want_of_names(kind: str) -> None:
    """Long prefixes, whose blocks are many more than their states."""
    engine = engine_of_gigabytes(num_mamba_slots=64, max_requests=1, max_sequence_length=128)
    prompts = [random_tokens(120, seed) for seed in range(8)]
    serve_checked(engine, prompts, length=2)
    assert serve_checked(engine, prompts[:1], length=2)[0].num_resumed_tokens == 112


@pytest.mark.parametrize("slots", [1, 3, 40])
def test_prefixes_are_found_and_answers_are_the_recurrences(kind: str, slots: int) -> None:
    engine = engine_of_gigabytes(num_mamba_slots=slots)
    stem = random_tokens(60, seed=1)
    prompts = [stem, stem[:33] + random_tokens(9, seed=2), stem[:33] + random_tokens(20, seed=3), stem]
    for _ in range(2):
        serve_checked(engine, prompts, length=12)
    again, last = (serve_checked(engine, [stem], length=2)[0] for _ in range(2))
    assert last.num_resumed_tokens == 56
    assert slots < 40 or again.num_resumed_tokens == 56
    assert_idle(engine)


@pytest.mark.parametrize("caching", [True, False])
def test_requests_of_the_greatest_length_run_together(kind: str, caching: bool) -> None:
    """All that may run at once have their names: no request is paused, or evicted."""
    engine = engine_of_gigabytes(
        num_mamba_slots=1, max_requests=3, max_sequence_length=40, enable_prefix_caching=caching
    )
    params = ms.SamplingParams(max_tokens=20)
    for seed in range(3):
        engine.add_request(random_tokens(20, seed), params)
    num_paused = 0
    while engine.has_unfinished_requests():
        engine.step()
        num_paused += engine.stats().num_paused
    assert num_paused == 0
    engine.check_integrity()
    if caching:
        serve_checked(engine, [random_tokens(20, seed) for seed in range(3)], length=20)


def test_suspended_resumed_and_reset(kind: str) -> None:
    engine, prompt = engine_of_gigabytes(), random_tokens(41, seed=1)
    request_id = engine.add_request(prompt, ms.SamplingParams(max_tokens=9))
    engine.step()
    engine.suspend()
    engine.resume()
    assert len(run_checked(engine)[request_id].tokens) == 9
    assert serve_checked(engine, [prompt])[0].num_resumed_tokens == 40
    engine.reset()
    assert serve_checked(engine, [prompt])[0].num_resumed_tokens == 0
    assert_idle(engine)


def test_a_saved_prefix_is_resumed_elsewhere(kind: str, tmp_path: Path) -> None:
    model = ms.models.HybridLM(small_config(), seed=3)
    engines = [engine_of_gigabytes(model=model) for _ in range(2)]
    prompt = random_tokens(41, seed=1)
    for engine in engines:
        engine.set_weights_version("same")
    serve_checked(engines[0], [prompt])
    msd.save_prefixes(engines[0], tmp_path / "prefixes")
    msd.load_prefixes(engines[1], tmp_path / "prefixes")
    assert serve_checked(engines[1], [prompt])[0].num_resumed_tokens == 40
