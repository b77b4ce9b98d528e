"""Copies to host memory and files that are late, stop or fail: no slot is found before its bytes are right.

Elsewhere a slot was published before its copy from host memory ran, and an abort left it so; and states went
out on a stream that nothing ordered with the steps that wrote the slots again.
"""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import mambaslots as ms
import pytest
from mambaslots.inference.contexts.tier_copies import HostCopies
from oracle.cached_prefixes import assert_cache_is_right
from oracle.file_starts import wait_for
from oracle.late_streams import late_copies
from oracle.serving import random_tokens, serve_checked, small_engine, small_model
from oracle.toy_engine import ask, resumed, tiers_of, toy_engine
from oracle.toy_lm import TOYS, ToyLM
from oracle.workload import assert_idle

TEXTS = [[(7 * i * i + 3 * i + 5 * seed) % 29 for i in range(24)] for seed in range(5)]


class CopyFailedError(Exception):
    """What a failing copy raises."""


def disk(path: Path) -> dict[str, Any]:
    return {"disk_cache": (str(path), 1e-4)}


def wait_for_files(engine: ms.DynamicInferenceEngine) -> None:
    copies = tiers_of(engine).copies
    if isinstance(copies, HostCopies) and copies._files is not None:
        wait_for(copies._files)


# ---- published before the copy ran (SGLang)


@pytest.fixture(params=["host memory", "file"])
def tiered(request: pytest.FixtureRequest, tmp_path: Path) -> ms.DynamicInferenceEngine:
    """An engine of one cached state, whose others are in host memory, or all but one in files."""
    files = disk(tmp_path) if request.param == "file" else {}
    engine = toy_engine(1, 1 if files else 40, max_requests=1, **files)
    for text in TEXTS:
        ask(engine, text, 2)
        wait_for_files(engine)
    return engine


def states_of(engine: ms.DynamicInferenceEngine) -> dict[int, int]:
    return dict(engine.context.prefix_cache.slots.cached_states.state_block_of_hash)


@pytest.mark.disaster(number=14)
@pytest.mark.sampled
@pytest.mark.parametrize("error", [CopyFailedError, MemoryError, KeyboardInterrupt, "wrong bytes", ""])
@pytest.mark.parametrize("where", ["before", "half-way", "behind"])
def test_a_slot_is_not_found_before_its_copy_is_known_to_be_right(
    tiered: ms.DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch, error: Any, where: str
) -> None:
    slots, copies, seen = tiered.context.prefix_cache.slots, tiers_of(tiered).copies, []
    fetch = copies.fetch

    def failing(host_slot: int, slot: int, serial: int) -> bool:
        before = states_of(tiered)
        assert slot in slots.reserved
        assert slot not in slots.cached_states.slot_of_block.values()
        row = tiered.context.memory.durable_pool.memory[
            tiered.context.memory.durable_pool.durable_index(slot)
        ]
        good = False
        if where != "before":
            good = fetch(host_slot, slot, serial)
            assert states_of(tiered) == before, "a state is found that is only being copied"
        if where == "half-way" or error == "wrong bytes":
            row[: len(row) // 2] = 0xFF
        seen.append(slot)
        if error and error != "wrong bytes":
            raise error
        return good and where == "behind" and not error

    with monkeypatch.context() as patched:
        patched.setattr(copies, "fetch", failing)
        prompt = [*TEXTS[0], 3, 4]
        if error is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                ask(tiered, prompt, 3)
        else:
            result = ask(tiered, prompt, 3)
            came_back = where == "behind" and not error
            assert (result.num_resumed_tokens > 0) == came_back
    assert seen
    tiered.check_integrity()
    assert_cache_is_right(tiered)
    assert_idle(tiered)
    for text in (*TEXTS, *TEXTS):
        ask(tiered, [*text, 1], 2)
        wait_for_files(tiered)
        assert_cache_is_right(tiered)
    assert resumed(tiered) > 0


@pytest.mark.sampled
@pytest.mark.parametrize("error", [CopyFailedError, KeyboardInterrupt])
@pytest.mark.parametrize("call", ["store", "save", "load"])
@pytest.mark.parametrize("after", [False, True])
def test_a_way_out_or_back_that_fails_costs_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: type[BaseException], after: bool
) -> None:
    engine = toy_engine(1, 1, max_requests=1, **disk(tmp_path))
    copies, failures = tiers_of(engine).copies, 0
    real = getattr(copies, call)

    def failing(*arguments: Any) -> Any:
        nonlocal failures
        if after:
            real(*arguments)
        failures += 1
        raise error

    for turn in range(4):
        for text in TEXTS:
            with monkeypatch.context() as patched:
                if turn % 2:
                    patched.setattr(copies, call, failing)
                try:
                    ask(engine, [*text, turn], 2)
                except KeyboardInterrupt:
                    assert error is KeyboardInterrupt
            engine.check_integrity()
            wait_for_files(engine)
            assert_cache_is_right(engine)
            assert_idle(engine)
    assert failures > 0
    assert resumed(engine) > 0


def test_a_fetch_for_which_no_slot_can_be_had_publishes_nothing() -> None:
    """The reservation is refused: every slot is pinned."""
    engine = toy_engine(1, 40, max_requests=1)
    for text in TEXTS[:3]:
        ask(engine, text, 1)
    engine.warm(TEXTS[3])
    pinned = engine.pin(TEXTS[3])
    for text in TEXTS[:3]:
        ask(engine, [*text, 1], 3)
        engine.check_integrity()
        assert_cache_is_right(engine)
    engine.unpin(pinned)
    for text in TEXTS[:3]:
        ask(engine, [*text, 2], 3)
    assert engine.stats().cache.tiers.num_states_fetched > 0
    assert resumed(engine) > 0


# ---- copies on another stream, without an order (vLLM)


def converse(engine: ms.DynamicInferenceEngine, turns: int, check: Callable[[], object]) -> None:
    random = Random(3)
    texts = [list(text[:9]) for text in TEXTS]
    for _ in range(turns):
        for number, text in enumerate(texts):
            prompt = text + [random.randrange(29) for _ in range(3)]
            texts[number] = prompt + list(ask(engine, prompt, 4).tokens)
            engine.check_integrity()
            check()


@pytest.mark.disaster(number=15)
@pytest.mark.sampled
@pytest.mark.parametrize("toy", ["one sum", "two sums", "window", "sums alone"])
@pytest.mark.parametrize("in_files", [False, True])
@pytest.mark.parametrize("slots", [1, 2])
def test_copies_that_are_as_late_as_they_may_be_change_no_state(
    toy: str, slots: int, in_files: bool, tmp_path: Path
) -> None:
    with late_copies() as streams:
        files = disk(tmp_path) if in_files else {}
        engine = toy_engine(slots, 3 if in_files else 40, ToyLM(kind=TOYS[toy]), max_requests=1, **files)
        steps = 0

        def check() -> None:
            nonlocal steps
            steps += 1
            if steps % 4 == 0:
                assert_cache_is_right(engine)

        converse(engine, 5, check)
        wait_for_files(engine)
        tiers = engine.stats().cache.tiers
        assert tiers.num_states_fetched > 0
        assert resumed(engine) > 0
        assert sum(stream.num_late for stream in streams) > 0
        assert tiers.num_copies_damaged == 0
        if in_files:
            assert tiers.num_states_fetched_from_disk > 0


@pytest.mark.usefixtures("kind")
def test_late_copies_of_each_kind_of_state() -> None:
    with late_copies() as streams:
        engine = small_engine(
            num_mamba_slots=1, max_requests=2,
            host_cache_gb=40 * small_model().state_spec().slot_bytes / (1 << 30),
        )  # fmt: skip
        texts = [random_tokens(25, seed) for seed in range(6)]
        for turn in range(2):
            for first in range(0, 6, 2):
                serve_checked(engine, [[*text, turn] for text in texts[first : first + 2]], length=2)
                assert_cache_is_right(engine)
        assert sum(stream.num_late for stream in streams) > 0
        assert engine.stats().cache.tiers.num_states_fetched > 0
        assert resumed(engine) > 0
