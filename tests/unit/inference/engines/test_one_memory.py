"""Engines of `total_gb`: states and KV borrow from each other, and every answer is the recurrence's."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import mambaslots as ms
import pytest
from mambaslots.inference.contexts.cache import memory, unit_borrower
from mambaslots.inference.contexts.cache.memory import MemoryDivision, UnitSizes
from mambaslots.inference.contexts.pool_sizes import PoolSizes
from mambaslots.net import export_prefixes, import_prefixes
from oracle.model_kinds import KINDS, WITH_ATTENTION
from oracle.scrubbed import NewOwners, assert_scrubbed
from oracle.serving import random_tokens, run_checked, serve_checked, small_engine, small_model
from oracle.workload import assert_idle, counted_moves

BLOCK = 8
FILES = {"unit_borrower.py", "kv_block_allocator.py", "state_slots.py", "memory.py"}


def engine_of(num_units: int, **settings: object) -> ms.DynamicInferenceEngine:
    """An engine whose memory has so many units beyond those that always hold KV."""
    given: dict[str, Any] = {"max_sequence_length": 64} | settings
    model = given.pop("model", None) or small_model()
    sizes = UnitSizes(model.state_spec().slot_bytes, model.state_spec().kv_block_bytes(BLOCK))
    live = 4 * (1 + given.get("num_speculative_tokens", 0))
    division = MemoryDivision.of([_budget(sizes, live)], given["max_sequence_length"] // BLOCK)
    total = division.least_bytes(sizes) + num_units * division.shape.unit_bytes(sizes)
    pools = {"num_kv_blocks": None, "num_mamba_slots": None, "total_gb": (total + 0.5) / (1 << 30)}
    return small_engine(model=model, **(given | pools))


def _budget(sizes: UnitSizes, live: int) -> Any:
    from mambaslots.inference.contexts.cache.memory import RankBudget

    return RankBudget(sizes, 1 << 30, live)


class Churn:
    """After each step units change sides: now KV is emptied for states, now states for KV."""

    def __init__(self, engine: ms.DynamicInferenceEngine) -> None:
        self._cache = engine.context.prefix_cache
        self._num_steps = 0
        engine.context.observers.append(self)

    def step_begun(self, steps: object, inputs: object) -> None: ...

    def step_ended(self, steps: object) -> None:
        self._num_steps += 1
        kv, slots = self._cache.kv_blocks, self._cache.slots
        if self._num_steps % 6 == 0:
            kv.evict_lru_blocks(kv.num_cached)
            kv.unit_borrower.borrow_slots(len(slots.free_slots) + 8)  # type: ignore[union-attr]
        elif self._num_steps % 3 == 0:
            kv.unit_borrower.borrow_blocks(kv.total_avail + kv.num_cached + 4)  # type: ignore[union-attr]


def traffic(engine: ms.DynamicInferenceEngine, rounds: int, length: int = 6) -> None:
    """Short prompts that share heads, which want states, and long ones, which want KV."""
    stems = [random_tokens(24, seed) for seed in range(3)]
    for turn in range(rounds):
        short = [stem + random_tokens(9, 100 * turn + i) for i, stem in enumerate(stems)]
        long = [random_tokens(50, 1000 + 7 * turn + i) for i in range(3)]
        serve_checked(engine, [*short, *short[:1]] if turn % 2 else long, length=length)
        engine.check_integrity()


def test_a_start_warns_of_memory_that_has_no_numbers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine_of(40)
    assert "total_gb" not in caplog.text
    monkeypatch.setattr(memory, "_MAX_NUMBERS", 64)
    engine = engine_of(20_000)
    used = engine.context.memory.total_bytes / 2**30
    total = engine.config.total_gb
    assert total is not None
    assert used < total / 2
    assert f"total_gb is {total:.3g}, of which the pools use {used:.3g}" in caplog.text


@pytest.mark.parametrize("num_units", [2, 7])
def test_an_import_leaves_out_the_states_whose_memory_its_blocks_take(num_units: int) -> None:
    exporter, engine = engine_of(80), engine_of(num_units)
    for each in (exporter, engine):
        each.set_weights_version(0)
    prompts = [random_tokens(57, seed) for seed in range(8)]
    exporter.generate(prompts, ms.SamplingParams(max_tokens=1))
    report = import_prefixes(engine, export_prefixes(exporter))
    assert report.imported.states
    assert report.left_out.states
    assert_idle(engine)
    (result,) = serve_checked(engine, prompts[-1:])
    assert result.num_resumed_tokens == 56


def test_units_move_by_themselves_where_traffic_changes() -> None:
    engine = engine_of(10)
    moves = counted_moves(engine)
    stems = [random_tokens(24, seed) for seed in range(3)]
    for turn in range(4):
        short = [stem + random_tokens(9, 100 * turn + i) for i, stem in enumerate(stems)]
        long = [random_tokens(50, 1000 + 7 * turn + i) for i in range(3)]
        serve_checked(engine, short if turn > 1 else long, length=6)
    assert sum(moves) > 0


@pytest.mark.parametrize("kind", WITH_ATTENTION, indirect=True)
@pytest.mark.sampled(num_units=(3,))
@pytest.mark.parametrize("num_units", [3, 6])
def test_answers_are_the_recurrences_while_units_change_sides(kind: str, num_units: int) -> None:
    # A unit of states as small as windows is one KV block: of fewer units, long prompts evict all others.
    engine = engine_of(4 * num_units if kind == "short convolution" else num_units, poisoned=True)
    moves = counted_moves(engine)
    Churn(engine)
    traffic(engine, rounds=12)
    assert min(moves) > 2
    assert engine.stats().cache.num_resumed_tokens > 0
    assert_idle(engine)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_speculative_tokens": 2},
        {"decode_by_replay": True},
        {"eviction_policy": "lru"},
    ],
    ids=["drafts", "replay", "lru"],
)
def test_other_ways_to_serve_do_too(settings: dict[str, Any]) -> None:
    engine = engine_of(5, poisoned=True, **settings)
    moves = counted_moves(engine)
    Churn(engine)
    traffic(engine, rounds=4)
    assert sum(moves) > 0


@pytest.mark.sampled(settings=1)
@pytest.mark.parametrize("settings", [{}, {"num_speculative_tokens": 2}, {"decode_by_replay": True}])
def test_what_changes_sides_is_zero_with_scrub(settings: dict[str, Any]) -> None:
    """Also the bytes between two entries of a unit, which the other side wrote."""
    engine = engine_of(5, free_memory="zero", **settings)
    owners, moves = NewOwners(engine), counted_moves(engine)
    Churn(engine)
    for _ in range(2):
        traffic(engine, rounds=2)
        assert_scrubbed(engine)
    assert sum(moves) > 0
    assert owners.num_checked > 10
    engine.reset_prefix_cache()
    assert_scrubbed(engine)
    memory = engine.context.memory.state_pool.memory
    assert not any(memory.untyped_storage()), "bytes between two entries are not zero"


def test_suspend_reset_and_resume_keep_the_memory_in_order() -> None:
    engine = engine_of(4)
    Churn(engine)
    traffic(engine, rounds=2)
    engine.suspend()
    assert engine.context.memory.kv_cache.untyped_storage().nbytes() == 0
    engine.resume()
    engine.check_integrity()
    traffic(engine, rounds=2)
    engine.add_request(random_tokens(40, 5), ms.SamplingParams(max_tokens=9))
    engine.step()
    engine.reset()
    engine.check_integrity()
    traffic(engine, rounds=2)
    engine.reset_prefix_cache()
    engine.check_integrity()
    traffic(engine, rounds=2)


def test_pinned_states_leave_room_for_one_longest_sequence() -> None:
    engine = engine_of(3)
    for seed in range(8):
        prompt = random_tokens(17, seed)
        serve_checked(engine, [prompt], length=2)
        if engine.context.prefix_cache.resumable_tokens(_chain(prompt)) and seed < 6:
            engine.pin(prompt)
        engine.check_integrity()
    pins = engine.context.prefix_cache.pins
    assert len(pins.prefixes) > 2
    reach = pins.max_sequence_blocks() * BLOCK
    long = random_tokens(min(62, reach - 3), 99)
    serve_checked(engine, [long], length=2)


def _chain(tokens: list[int]) -> Any:
    from mambaslots.inference.contexts.cache.hashing import PrefixHashChain

    chain = PrefixHashChain(BLOCK)
    chain.extend_to(tokens)
    return chain


@contextmanager
def interrupted_at(number: int) -> Iterator[list[int]]:
    """A KeyboardInterrupt at the line with this number, of those that change a unit's side; once."""
    passed = [0]

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if Path(frame.f_code.co_filename).name not in FILES:
            return None
        if event == "line":
            passed[0] += 1
            if passed[0] == number:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield passed
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("first", [1, pytest.param(0, marks=pytest.mark.long)])
def test_an_interrupt_at_any_line_of_a_move_leaves_nothing_wrong(first: int) -> None:
    """Some lines; `long` takes many of them."""
    engine = engine_of(4)
    Churn(engine)
    traffic(engine, rounds=2)
    step = 149 if first else 7
    for number in range(1 + step * first, 1500, step):
        prompts = [random_tokens(50 - 30 * (number % 2), 10_000 + 10 * number + i) for i in range(3)]
        for prompt in prompts:
            engine.add_request(prompt, ms.SamplingParams(max_tokens=3))
        with interrupted_at(number):
            try:
                while engine.has_unfinished_requests():
                    engine.step()
            except KeyboardInterrupt:
                pass
        run_checked(engine)
        engine.check_integrity()
        assert_idle(engine)


# ---- what the memory is divided into


def test_a_budget_that_is_too_small_says_by_how_much() -> None:
    model = small_model()
    config = ms.InferenceConfig(total_gb=1e-5, block_size_tokens=8, max_requests=4, max_sequence_length=64)
    with pytest.raises(
        ValueError, match=r"total_gb is 1e-05; accepted: at least [\d.e-]+ \([\d.e-]+ more\) for 4 run"
    ) as error:
        PoolSizes.of(config, model.state_spec())
    least = float(str(error.value).split("at least ")[1].split()[0])
    from dataclasses import replace

    sizes = PoolSizes.of(replace(config, total_gb=1.01 * least), model.state_spec())
    assert sizes.division is not None
    assert sizes.num_kv_blocks >= 8


@pytest.mark.parametrize("name", ["num_kv_blocks", "num_mamba_slots"])
def test_a_total_stands_alone(name: str) -> None:
    with pytest.raises(ValueError, match=f"total_gb is 1.0 and {name} is 3"):
        ms.InferenceConfig(total_gb=1.0, **{name: 3})


def test_a_model_that_takes_no_gaps_gets_halves() -> None:
    from dataclasses import replace

    spec = replace(small_model().state_spec(), strided_blocks=False)
    config = ms.InferenceConfig(total_gb=0.01, block_size_tokens=8, max_requests=4, max_sequence_length=64)
    sizes = PoolSizes.of(config, spec)
    assert sizes.division is None
    live, total = 4 * spec.slot_bytes, 0.01 * (1 << 30)
    states, kv = sizes.num_mamba_slots * spec.slot_bytes, sizes.num_kv_blocks * spec.kv_block_bytes(8)
    assert total - spec.kv_block_bytes(8) < live + states + kv <= total
    assert abs(states - kv) <= 2 * spec.slot_bytes


@pytest.mark.parametrize("kind", [name for name in KINDS if name not in WITH_ATTENTION], indirect=True)
def test_a_model_without_attention_spends_all_on_states(kind: str) -> None:
    engine = small_engine(num_kv_blocks=None, num_mamba_slots=None, total_gb=0.002, max_sequence_length=64)
    num_slots = engine.context.prefix_cache.slots.num_slots
    assert num_slots == int(0.002 * (1 << 30)) // engine.context.spec.slot_bytes
    serve_checked(engine, [random_tokens(40, 1), random_tokens(40, 1)], length=4)


def test_without_a_cache_all_is_kv() -> None:
    engine = small_engine(
        num_kv_blocks=None, num_mamba_slots=None, total_gb=0.002, enable_prefix_caching=False
    )
    assert engine.context.prefix_cache.kv_blocks.total_count > 100
    serve_checked(engine, [random_tokens(40, 1), random_tokens(40, 1)], length=4)


def test_the_line_of_memory_says_what_is_shared() -> None:
    engine = engine_of(5)
    said = engine.context.memory.summary()
    assert "cached states and KV share" in said
    assert unit_borrower.MAX_LOOKS > 0
