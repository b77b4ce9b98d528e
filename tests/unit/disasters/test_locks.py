"""Requests that leave half-way, slots that are all taken, and memory that one side wants: serving goes on.

Elsewhere an abort between match and allocation lost the forked slot; an assertion ended the server when every
cached state was locked by a transfer and one more was to be stored; and a pool that was split between two
kinds starved one of them while the other was idle.
"""

from contextlib import suppress
from random import Random
from typing import Any

import mambaslots as ms
import pytest
from mambaslots.inference.contexts.cache.memory import UnitShape, UnitSizes
from mambaslots.net import encode_prefixes, export_prefixes, import_prefixes
from mambaslots.net.transfer import placement
from oracle.cached_prefixes import assert_cache_is_right
from oracle.faults import POINTS, InjectedError, failing
from oracle.model_kinds import WITH_ATTENTION
from oracle.serving import (
    assert_answers,
    random_tokens,
    resumable,
    run_checked,
    serve_checked,
    small_engine,
    small_model,
)
from oracle.toy_engine import ask, resumed, tiers_of, toy_engine
from oracle.workload import assert_idle, counted_moves

HEAD = random_tokens(40, 1)
ONE = ms.SamplingParams(max_tokens=1)
TEN = ms.SamplingParams(max_tokens=10, return_log_probs=True)
BETWEEN = [
    "matching", "admission", "row", "block table", "KV references", "KV allocation", "resume",
    "slot pin", "planned slots", "slot reservation", "inputs", "begin", "scheduling",
]  # fmt: skip
"""Where a request is, from its match to the end of its admission: calls of `oracle.faults.POINTS`."""


def tiered(slots: int) -> dict[str, Any]:
    gigabytes = 40 * small_model().state_spec().slot_bytes / (1 << 30)
    return {"num_mamba_slots": slots, "host_cache_gb": gigabytes}


def conserved(engine: ms.DynamicInferenceEngine) -> tuple[int, int]:
    """All slots and all blocks that exist, counted by what they are."""
    cache = engine.stats().cache
    slots = cache.num_free_slots + cache.num_reserved_slots + cache.num_committed_slots + cache.num_live_slots
    return slots, cache.num_free_kv_blocks + cache.num_cached_kv_blocks + cache.num_held_kv_blocks


# ---- a client that leaves between match and admission (SGLang)


@pytest.mark.disaster(number=16)
@pytest.mark.sampled(point=("matching", "admission", "slot reservation", "begin"))
@pytest.mark.usefixtures("kind")
@pytest.mark.in_turn("from_tier", "after")
@pytest.mark.parametrize("from_tier", [False, True], ids=["device", "tier"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("point", BETWEEN)
def test_a_cancel_between_match_and_admission_loses_no_slot(point: str, after: bool, from_tier: bool) -> None:
    """The step fails there, and the client cancels behind it; or its stream goes in the call itself."""
    engine = small_engine(num_kv_blocks=40, max_requests=2, **(tiered(1) if from_tier else {}))
    others = [random_tokens(20, seed) for seed in (2, 3)]
    for text in (HEAD, *others):
        serve_checked(engine, [text], length=2)
    everything, hits = conserved(engine), 0
    for seed, way in enumerate(("fails", "goes", "both")):
        prompt = [*HEAD[:24], *random_tokens(12, 50 + seed)]
        stream = engine.stream(prompt, TEN)
        second = [*others[0], *random_tokens(9, 60 + seed)]
        waiting = engine.add_request(second, TEN)
        leaving = [stream]
        del stream
        if way != "goes":
            with failing(engine, point, after=after) as seen, suppress(InjectedError):
                for _ in range(4):
                    engine.step()
            assert seen["failed"]
        if way == "fails":
            leaving.pop().close()
        else:
            dropping(engine, point, leaving, after)
        results = run_checked(engine)
        assert_answers(second, results[waiting])
        assert conserved(engine) == everything
        assert_idle(engine)
        assert_cache_is_right(engine)
        hits += results[waiting].num_resumed_tokens
    for tail in (8, 9):
        (result,) = serve_checked(engine, [[*HEAD, tail]], length=3)
    assert hits + result.num_resumed_tokens > 0
    assert conserved(engine) == everything


def dropping(engine: ms.DynamicInferenceEngine, point: str, streams: list[Any], after: bool) -> None:
    """The only reference to a stream goes before or behind the next call of a point."""
    owner_of, name = POINTS[point]
    owner = owner_of(engine)
    real = getattr(owner, name)

    def wrapped(*arguments: Any, **named: Any) -> Any:
        result = real(*arguments, **named) if after else None
        streams.clear()
        return result if after else real(*arguments, **named)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, name, wrapped)
        for _ in range(3):
            engine.step()
    streams.clear()


# ---- every slot is locked (SGLang's allocator asserts)


@pytest.mark.sampled
@pytest.mark.disaster(number=17)
@pytest.mark.usefixtures("kind")
@pytest.mark.in_turn("policy")
@pytest.mark.parametrize("policy", ["value", "lru"])
@pytest.mark.parametrize("mode", ["plain", "drafts", "replay", "host tier", "encoded"])
def test_a_state_for_which_every_slot_is_pinned_is_skipped_and_counted(policy: str, mode: str) -> None:
    settings: dict[str, Any] = {
        "plain": {}, "drafts": {"num_speculative_tokens": 2}, "replay": {"decode_by_replay": True},
        "host tier": tiered(2), "encoded": {"encoded": True},
    }[mode]  # fmt: skip
    engine = small_engine(**({"num_mamba_slots": 2, "max_requests": 2, "eviction_policy": policy} | settings))
    kept = [random_tokens(17, 90 + seed) for seed in range(2)]
    for text in kept:
        engine.warm(text)
        engine.pin(text)
    prompts = [random_tokens(33, seed) for seed in range(6)]
    before = engine.stats().cache.num_states_refused
    for first in range(0, 6, 2):  # both rows run: their slots hold no cached state
        ids = [engine.add_request(prompt, TEN) for prompt in prompts[first : first + 2]]
        results = run_checked(engine)
        for prompt, request_id in zip(prompts[first : first + 2], ids, strict=True):
            assert_answers(prompt, results[request_id])
        assert_cache_is_right(engine)
        assert all(resumable(engine.context, [*text, 1]) == 16 for text in kept)
    assert engine.stats().cache.num_states_refused > before
    (result,) = serve_checked(engine, [[*kept[0], 5]], length=2)
    assert result.num_resumed_tokens == 16
    for pinned in engine.pins():
        engine.unpin(pinned)
    serve_checked(engine, [prompts[0]], length=2)
    (result,) = serve_checked(engine, [[*prompts[0], 1]], length=2)
    assert result.num_resumed_tokens > 0
    assert_cache_is_right(engine)
    assert_idle(engine)


@pytest.mark.disaster(number=17)
@pytest.mark.usefixtures("kind")
def test_an_import_that_holds_every_slot_stops_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it copies, the slots are reserved; a state that another one would store is refused."""
    source, target = (small_engine(num_mamba_slots=slots, max_requests=1) for slots in (8, 2))
    for engine in (source, target):
        engine.set_weights_version("one")
    texts = [random_tokens(20, 40 + seed) for seed in range(6)]
    for text in texts:
        serve_checked(source, [text], length=1)
    looked: list[int] = []
    write_entries = placement.write_entries

    def looking(*arguments: Any) -> None:
        slots = target.context.prefix_cache.slots
        assert len(slots.reserved) == len(slots.reserved | slots.cached_states.slot_of_block) > 0
        if not slots.num_available:
            with pytest.raises(ms.MambaSlotCapacityError):
                slots.reserve_slots([10**6])
            looked.append(len(slots.reserved))
        slots.check_integrity()
        write_entries(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(placement, "write_entries", looking)
        report = import_prefixes(target, encode_prefixes(export_prefixes(source)))
    assert report.imported.states > 0
    assert looked
    assert_cache_is_right(target)
    (result,) = serve_checked(target, [[*texts[-1], 1]], length=2)
    assert result.num_resumed_tokens == 16
    assert_idle(target)


@pytest.mark.disaster(number=17)
@pytest.mark.sampled
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_states_pinned_by_requests_users_and_the_tier_at_once(slots: int, rows: int) -> None:
    """Requests resume from states that come back from host memory, beside pins, in the smallest pools."""
    engine = toy_engine(slots, 3, max_requests=rows, num_kv_blocks=120)
    random = Random(slots)
    texts = [[random.randrange(29) for _ in range(24)] for _ in range(5)]
    for turn in range(6):
        pins = []
        for text in random.sample(texts, slots):
            engine.warm(text)
            try:
                pins.append(engine.pin(text))
            except ValueError:  # its state was refused, or is in host memory again
                assert resumable(engine.context, text) < 24
        asked = [[*text, turn % 29, 1] for text in random.sample(texts, 3)]
        results = engine.generate(asked, ONE)
        for prompt in asked:
            ask(engine, prompt[:-1], 3)
        assert len(results) == 3
        engine.check_integrity()
        assert_cache_is_right(engine)
        for pinned in pins:
            engine.unpin(pinned)
    assert tiers_of(engine).stats().num_states_fetched > 0
    assert resumed(engine) > 0
    assert_idle(engine)


# ---- one memory for states and KV (SGLang's unified memory)


def shared_engine(num_units: int, **settings: Any) -> ms.DynamicInferenceEngine:
    """Of one memory with so many units beyond those that always hold KV."""
    spec = small_model().state_spec()
    sizes = UnitSizes(spec.slot_bytes, spec.kv_block_bytes(8))
    settings |= {"num_kv_blocks": None, "num_mamba_slots": None, "max_sequence_length": 64, "max_requests": 2}
    with pytest.raises(ValueError, match="total_gb is") as refused:
        small_engine(total_gb=1e-9, **settings)
    least = float(str(refused.value).split("at least ")[1].split()[0])  # rounded: half a unit more
    unit = UnitShape.of([sizes]).unit_bytes(sizes) / (1 << 30)
    return small_engine(total_gb=least + (num_units + 0.5) * unit, **settings)


@pytest.mark.disaster(number=18)
@pytest.mark.parametrize("kind", ["Mamba-2", "delta net", "short convolution"], indirect=True)
@pytest.mark.in_turn("mode")
@pytest.mark.parametrize("mode", ["plain", "drafts", "replay"])
def test_one_side_starves_while_the_other_is_idle_and_memory_moves(kind: str, mode: str) -> None:
    """Long prefixes, which are mostly KV, until units move; then short ones, which are mostly states."""
    settings = {"plain": {}, "drafts": {"num_speculative_tokens": 2}, "replay": {"decode_by_replay": True}}
    engine, hits = shared_engine(2, poisoned=True, **settings[mode]), 0
    moves = counted_moves(engine)
    for turn, (length, side) in enumerate([(50, 1), (8, 0)]):
        before = moves[side]
        for seed in range(40):
            if moves[side] > before:
                break
            text = random_tokens(length, 1000 * turn + seed)
            serve_checked(engine, [text, [*text[:-1], 3]], length=1)
            (result,) = serve_checked(engine, [[*text, 7]], length=1)
            hits += result.num_resumed_tokens
            engine.check_integrity()
        assert moves[side] > before, "memory does not move"
        assert_cache_is_right(engine)
    assert hits > 0
    assert_idle(engine)


@pytest.mark.disaster(number=18)
@pytest.mark.parametrize("kind", WITH_ATTENTION, indirect=True)
def test_pins_on_one_side_starve_the_other_and_no_request_waits_for_ever(kind: str) -> None:
    engine = shared_engine(9)
    pins = []
    for seed in range(12):
        text = random_tokens(17, 300 + seed)
        try:
            serve_checked(engine, [text], length=1)
        except (
            ms.KVBlockCapacityError
        ) as error:  # pins may take all KV; a request is refused, and room is made
            engine.cancel(error.request_id)
            for _ in range(2):
                engine.unpin(pins.pop())
            break
        if resumable(engine.context, text):
            try:
                pins.append(engine.pin(text))
            except (ms.MambaSlotCapacityError, ms.KVBlockCapacityError):
                break
        engine.check_integrity()
    assert pins
    served = refused = 0
    for seed in range(6):
        prompt = random_tokens(24 if seed % 2 else 50, 400 + seed)
        request_id = engine.add_request(prompt, TEN)
        try:
            assert_answers(prompt, run_checked(engine)[request_id])
            served += 1
        except ms.KVBlockCapacityError as error:
            engine.cancel(error.request_id)
            refused += 1
        engine.check_integrity()
    assert served > 0
    for pinned in pins:
        engine.unpin(pinned)
    for seed in range(6):
        serve_checked(engine, [random_tokens(50, 400 + seed)], length=8)
    assert_cache_is_right(engine)
    assert_idle(engine)
