"""A slot holds several tensors: what is stored, copied, evicted or moved is all of them, or none.

Elsewhere a window of a convolution stayed behind when its slot was freed, and was left out of the copies to
host memory. Answers hardly show that: here every tensor of every findable state is held to the recurrence.
"""

from pathlib import Path
from typing import Any

import mambaslots as ms
import numpy as np
import pytest
from mambaslots.net import (
    decode_prefixes,
    encode_prefixes,
    export_prefixes,
    import_prefixes,
    load_prefixes,
    save_prefixes,
)
from mambaslots.state_spec import SCALES
from oracle.cached_prefixes import assert_cache_is_right, snapshot, tokens_to
from oracle.file_starts import wait_for
from oracle.model_kinds import MIX, kind_of_model
from oracle.serving import assert_answers, random_tokens, serve_checked, small_engine, small_model
from oracle.stored_states import RoundedEngine

pytestmark = pytest.mark.usefixtures("kind")

TEXTS = [random_tokens(40, seed) for seed in range(3)]
FORKS = [TEXTS[0][:24] + random_tokens(9, seed=7), TEXTS[1][:8] + random_tokens(9, seed=8)]
ONE = ms.SamplingParams(max_tokens=1)


def state_bytes() -> int:
    return small_model().state_spec().slot_bytes


def engine_of(**settings: Any) -> ms.DynamicInferenceEngine:
    engine = small_engine(**({"poisoned": True} | settings))
    engine.set_weights_version("one")
    return engine


def resumed(results: list[ms.RequestResult]) -> int:
    return sum(result.num_resumed_tokens for result in results)


@pytest.mark.disaster(number=22)
def test_the_mix_has_windows_and_matrices_in_one_slot() -> None:
    with kind_of_model(MIX):
        assert len(small_model().state_spec().states) == 5


@pytest.mark.disaster(number=22)
@pytest.mark.parametrize("num_slots", [1, 3])
def test_a_slot_that_is_freed_and_used_again_holds_nothing_of_the_state_before(num_slots: int) -> None:
    engine = engine_of(num_mamba_slots=num_slots, max_requests=2)
    hits = 0
    for _ in range(2):
        for text in (*TEXTS, *FORKS):
            hits += resumed(serve_checked(engine, [text], length=10))
            hits += resumed(serve_checked(engine, [[*text, 1]], length=1))
            assert assert_cache_is_right(engine).states > 0
    assert hits > 0
    assert engine.stats().cache.num_states_evicted > 0


@pytest.mark.disaster(number=22)
@pytest.mark.parametrize("way", ["bytes", "files"])
def test_all_tensors_are_exported_and_imported(way: str, tmp_path: Path) -> None:
    source, target = engine_of(), engine_of(num_mamba_slots=5)
    serve_checked(target, FORKS)  # its slots held other states
    target.reset_prefix_cache()
    serve_checked(source, TEXTS)
    if way == "bytes":
        report = import_prefixes(target, decode_prefixes(encode_prefixes(export_prefixes(source))))
    else:
        save_prefixes(source, tmp_path)
        report = load_prefixes(target, tmp_path)
    found = assert_cache_is_right(target)
    assert found == (report.imported.states, report.imported.blocks)
    assert found.states > 0
    assert resumed(serve_checked(target, TEXTS)) > 0


@pytest.mark.disaster(number=22)
@pytest.mark.parametrize("disk", [False, True])
def test_all_tensors_go_to_host_memory_and_files_and_come_back(disk: bool, tmp_path: Path) -> None:
    gigabytes = state_bytes() / (1 << 30)
    files = {"disk_cache": (str(tmp_path), 99 * gigabytes)} if disk else {}
    engine = engine_of(
        num_mamba_slots=1, max_requests=1, host_cache_gb=(1.5 if disk else 99) * gigabytes, **files
    )
    for _ in range(3):
        for text in TEXTS:
            serve_checked(engine, [text], length=2)
            assert_cache_is_right(engine)
            if disk:
                wait_for(engine.context.prefix_cache.tiers.copies._files)  # type: ignore[union-attr]
    tiers = engine.stats().cache.tiers
    assert tiers.num_states_fetched > 0
    assert (tiers.num_states_fetched_from_disk > 0) == disk
    assert engine.stats().cache.num_resumed_tokens > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_numbers_and_scales_are_stored_moved_and_freed_together(dtype: str) -> None:
    """Against the recurrence, rounded by the codec's rule, in the first engine and behind an import."""
    settings = {"durable_state_dtype": dtype, "num_mamba_slots": 3, "max_requests": 2}
    source, target = engine_of(**settings), engine_of(**settings)
    rounded = RoundedEngine(source, small_model(), dtype)
    plan = ms.CheckpointPlan(decode="off")
    for text in (*TEXTS, *FORKS, *TEXTS):  # slots are used again
        source.generate([text], ONE, checkpoint_plan=plan)
    source.reset_prefix_cache()
    for text in TEXTS[:2]:  # none of them resumes: their states are rounded once
        source.generate([text], ONE, checkpoint_plan=plan)
    checked = assert_rounded(source, rounded)
    assert import_prefixes(target, encode_prefixes(export_prefixes(source))).imported.states == checked
    assert assert_rounded(target, rounded) == checked > 0
    one, other = ({name: sums(engine, name) for name in names(engine)} for engine in (source, target))
    assert one == other
    (there,) = source.generate([[*TEXTS[1], 5]], ONE)
    (here,) = target.generate([[*TEXTS[1], 5]], ONE)
    assert here.tokens == there.tokens
    assert here.num_resumed_tokens == there.num_resumed_tokens > 0


def assert_rounded(engine: ms.DynamicInferenceEngine, rounded: RoundedEngine) -> int:
    """Every tensor that a durable slot holds is what the codec makes of the recurrence's state."""
    cache, pool = engine.context.prefix_cache, engine.context.memory.durable_pool
    for block in cache.slots.cached_states.state_block_of_hash.values():
        exact = snapshot(engine.model, tokens_to(cache.kv_blocks.tree, block)).states
        slot = pool.durable_index(cache.slots.cached_states.slot_of(block))
        expected = rounded.rounded(exact)
        stored = {tensor.name for tensor in pool.states}
        for state in small_model().state_spec().states:
            numbers = pool[state.name][:, slot].double()
            if state.name + SCALES in stored:
                scales = pool[state.name + SCALES][:, slot].double()
                numbers = numbers * scales.unsqueeze(1 + state.scale_axis)  # type: ignore[operator]
            np.testing.assert_allclose(
                numbers.numpy(), expected[state.name], rtol=1e-5, atol=1e-9, err_msg=state.name
            )
    return len(cache.slots.cached_states.state_block_of_hash)


def names(engine: ms.DynamicInferenceEngine) -> list[str]:
    return [tensor.name for tensor in engine.context.memory.durable_pool.states]


def sums(engine: ms.DynamicInferenceEngine, name: str) -> list[float]:
    """Of each findable state of an engine, one number of this tensor, in no order."""
    cache, pool = engine.context.prefix_cache, engine.context.memory.durable_pool
    slots = [
        cache.slots.cached_states.slot_of(block)
        for block in cache.slots.cached_states.state_block_of_hash.values()
    ]
    return sorted(float(pool[name][:, pool.durable_index(slot)].double().sum()) for slot in slots)


def test_a_state_that_is_copied_for_a_request_is_copied_whole() -> None:
    """Kernels that update states in place get copies of the durable slot."""
    engine = engine_of(in_place=True)
    serve_checked(engine, TEXTS)
    params = ms.SamplingParams(max_tokens=9, return_log_probs=True)
    for _ in range(2):
        for prompt, result in zip(FORKS, engine.generate(FORKS, params), strict=True):
            assert_answers(prompt, result)
        assert_cache_is_right(engine)
    assert result.num_resumed_tokens > 0
