"""Prefixes from one engine to another of the same model, in one process."""

import hashlib
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import mambaslots as ms
import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.inference.contexts.cache.hashing import PUBLIC_ROOT, PrefixHashChain
from mambaslots.inference.contexts.cache.state_slots import StateSlots
from mambaslots.net import decode_prefixes, encode_prefixes, export_prefixes, import_prefixes, load_prefixes
from mambaslots.net.transfer import exports as export_module
from mambaslots.net.transfer import placement
from mambaslots.net.transfer.format import TensorFormat, TransferError
from mambaslots.net.transfer.placement import ImportReport, Placement, PrefixCounts
from oracle.budget import costly
from oracle.kv_index import eviction_order
from oracle.model_kinds import MIX, kind_of_model
from oracle.serving import assert_answers, random_tokens, run_checked, serve_checked, small_model
from oracle.transfers import engine_of, maps_of, tensors_of
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.usefixtures("kind")

SYSTEM = random_tokens(21, 0)
PROMPTS = [
    SYSTEM + random_tokens(30, 1), SYSTEM + random_tokens(17, 2), random_tokens(40, 3), random_tokens(24, 4),
]  # fmt: skip
SALTS = [None, None, None, b"tenant"]
NONE = PrefixCounts()


def serve(engine: ms.DynamicInferenceEngine, prompts: Any = None, salts: Any = None) -> list[int]:
    """Resumed tokens of each; every answer is the recurrence's."""
    prompts, salts = prompts or PROMPTS, salts or SALTS
    params = ms.SamplingParams(max_tokens=5, return_log_probs=True)
    resumed = []
    for prompt, salt in zip(prompts, salts, strict=True):
        result = engine.generate([prompt], params, cache_salt=salt)[0]
        engine.context.check_integrity()
        assert_answers(prompt, result)
        resumed.append(result.num_resumed_tokens)
    return resumed


def warm_engine(**overrides: Any) -> ms.DynamicInferenceEngine:
    engine = engine_of(**overrides)
    serve(engine)
    return engine


@cache
def source_of_kind(kind: str) -> ms.DynamicInferenceEngine:
    return warm_engine()


@pytest.fixture
def source(kind: str) -> ms.DynamicInferenceEngine:
    """Only exported from."""
    return source_of_kind(kind)


def moved(
    source: ms.DynamicInferenceEngine, target: ms.DynamicInferenceEngine, names: Any = None
) -> ImportReport:
    report = import_prefixes(target, decode_prefixes(encode_prefixes(export_prefixes(source, names))))
    target.context.check_integrity()
    return report


def total(report: ImportReport) -> PrefixCounts:
    parts = report.imported, report.known, report.left_out
    return PrefixCounts(*(sum(getattr(part, f.name) for part in parts) for f in fields(PrefixCounts)))


def expected_counts(engine: ms.DynamicInferenceEngine) -> PrefixCounts:
    forest = export_prefixes(engine).forest
    return PrefixCounts(len(forest.leaves), len(forest), len(forest.states), 8 * len(forest))


def test_a_fresh_engine_resumes_where_the_source_would(source: ms.DynamicInferenceEngine) -> None:
    target, twin = engine_of(), warm_engine()
    before = maps_of(source)
    report = moved(source, target)
    assert report == ImportReport(imported=expected_counts(source))
    assert maps_of(source) == before
    assert serve(target) == serve(twin)
    assert min(serve(target)) > 0


def test_everything_is_where_it_was_and_as_recent(source: ms.DynamicInferenceEngine) -> None:
    target = engine_of()
    moved(source, target)
    one, other = export_prefixes(source), export_prefixes(target)
    assert other.forest.digest == one.forest.digest
    for name, tensor in one.tensors.items():
        assert torch.equal(tensor, other.tensors[name])


@pytest.mark.parametrize(("there", "here"), [(0, 2), (2, 0), (3, 3)])
def test_engines_that_draft(there: int, here: int) -> None:
    source, target = (engine_of(num_speculative_tokens=drafts) for drafts in (there, here))
    prompts = [[7, 8, 9] * 12, PROMPTS[0]]
    serve(source, prompts, [None, None])
    report = moved(source, target)
    assert report.imported == expected_counts(source)
    assert serve(target, prompts, [None, None]) == [32, 48]


def test_the_export_is_changed_by_nothing_later() -> None:
    engine = warm_engine()
    export = export_prefixes(engine)
    data = encode_prefixes(export)
    engine.reset()
    serve(engine, [random_tokens(100, seed) for seed in range(8)], [None] * 8)
    assert all(torch.equal(t, decode_prefixes(data).tensors[name]) for name, t in export.tensors.items())


def test_named_prefixes_only(source: ms.DynamicInferenceEngine) -> None:
    target = engine_of()
    report = moved(source, target, [(PROMPTS[0], None), (PROMPTS[3], "tenant"), (PROMPTS[2], b"other")])
    assert report.imported.blocks == 48 // 8 + 24 // 8
    resumed = serve(target)
    assert resumed[2] == 0
    assert resumed[3] == 16
    assert resumed[0] == 48
    nothing = moved(source, target, [(random_tokens(40, 77), None)])
    assert nothing == ImportReport()


def test_salts_stay_apart(source: ms.DynamicInferenceEngine) -> None:
    target = engine_of()
    moved(source, target)
    assert serve(target, [PROMPTS[3], PROMPTS[3]], [None, b"tenant"]) == [0, 16]


def test_salts_under_another_key_find_nothing_and_say_so(
    source: ms.DynamicInferenceEngine, caplog: pytest.LogCaptureFixture
) -> None:
    target = engine_of(salt_key="another key of the tests")
    report = moved(source, target)
    assert report.other_key == PrefixCounts(prefixes=1, blocks=3, states=report.other_key.states, tokens=24)
    assert report.left_out == NONE
    assert report.imported.prefixes == 3
    assert source.salt_key.key_id in caplog.text
    assert target.salt_key.key_id in caplog.text
    assert "1 prefixes are left out" in caplog.text
    assert serve(target)[2:] == [32, 0]


def test_prefixes_without_salts_move_between_keys(
    source: ms.DynamicInferenceEngine, caplog: pytest.LogCaptureFixture
) -> None:
    named = [(prompt, None) for prompt in PROMPTS[:3]]
    target = engine_of(salt_key=None)
    report = moved(source, target, named)
    assert (report.other_key, caplog.text) == (NONE, "")
    theirs = encode_prefixes(export_prefixes(target, named))
    assert import_prefixes(source, theirs).known.prefixes == 3
    assert export_prefixes(source, named).forest.salt_key_id == ""


def test_no_salt_is_kept_or_exported() -> None:
    engine, salt = engine_of(salt_key=None), b"a tenant's secret name" + bytes([33])
    num_references = sys.getrefcount(salt)
    engine.generate([PROMPTS[2]], cache_salt=salt)
    running = engine.add_request(PROMPTS[2], cache_salt=salt)
    engine.step()
    assert sys.getrefcount(salt) == num_references
    engine.cancel(running)
    data = encode_prefixes(export_prefixes(engine))
    unkeyed = hashlib.sha256(b"mambaslots.root\0" + salt).digest()
    for hidden in (salt, unkeyed):
        assert hidden not in data
        assert hidden.hex().encode() not in data
    assert engine.salt_key.root(salt) in data


def test_twice_imports_nothing_new(source: ms.DynamicInferenceEngine) -> None:
    target = engine_of()
    moved(source, target)
    maps, tensors = maps_of(target), tensors_of(target)
    report = moved(source, target)
    assert report == ImportReport(known=expected_counts(source))
    assert maps_of(target) == maps
    assert all(map(torch.equal, tensors, tensors_of(target)))


@pytest.mark.sampled(known=2)
@pytest.mark.parametrize("known", [[0], [1], [2, 3], [0, 1, 2, 3]])
def test_into_a_half_warm_engine(source: ms.DynamicInferenceEngine, known: list[int]) -> None:
    target = engine_of()
    serve(target, [PROMPTS[i] for i in known], [SALTS[i] for i in known])
    report = moved(source, target)
    assert total(report) == expected_counts(source)
    assert report.left_out == NONE
    assert report.known.blocks >= 24 // 8
    assert serve(target) == serve(warm_engine())
    assert min(serve(target)) > 0


def test_known_kv_without_a_state_gets_one(source: ms.DynamicInferenceEngine) -> None:
    target = engine_of()
    moved(source, target)
    slots = target.context.prefix_cache.slots
    for block in list(slots.cached_states.slot_of_block):
        slots.remove_unpinned(block)
    report = moved(source, target)
    assert report.known == replace(expected_counts(source), prefixes=0, states=0)
    assert report.imported.states == expected_counts(source).states
    assert serve(target) == serve(warm_engine())
    assert min(serve(target)) > 0


@pytest.mark.sampled
@pytest.mark.parametrize("blocks", [1, 3, 6, 8, 9, 12, 15])
@pytest.mark.parametrize("slots", [1, 2, 5, 64])
def test_too_small_an_engine_takes_what_fits(
    source: ms.DynamicInferenceEngine, blocks: int, slots: int
) -> None:
    target = engine_of(num_kv_blocks=blocks, num_mamba_slots=slots)
    report = moved(source, target)
    assert total(report) == expected_counts(source)
    assert report.imported.blocks <= blocks
    held = target.context.prefix_cache.slots
    assert (
        report.imported.states
        == len(held.cached_states.slot_of_block)
        <= held.num_slots
        == slots + target.config.max_requests
    )
    if blocks >= 6:  # the most recently used longest prefix
        assert report.imported.states
    export = export_prefixes(target)
    assert len(export.forest) == report.imported.blocks  # no block without a state below it
    whole = export_prefixes(source)
    order = {whole.forest.hashes[node]: rank for rank, node in enumerate(whole.forest.states)}
    kept = [order[export.forest.hashes[node]] for node in export.forest.states]
    assert kept == sorted(kept)


def test_a_full_engine_gives_way_as_when_computing(source: ms.DynamicInferenceEngine) -> None:
    target = engine_of(num_kv_blocks=24, num_mamba_slots=12)
    others = [random_tokens(70, seed) for seed in range(20, 23)]
    serve(target, others, [None] * 3)
    report = moved(source, target)
    assert report.left_out == NONE
    assert serve(target, PROMPTS[:1], SALTS[:1]) == [48]


def resumable_tokens(engine: ms.DynamicInferenceEngine, tokens: list[int]) -> int:
    chain = PrefixHashChain(engine.config.block_size_tokens)
    chain.extend_to(tokens)
    return engine.context.prefix_cache.resumable_tokens(chain)


def test_what_is_pinned_or_held_stays(source: ms.DynamicInferenceEngine) -> None:
    target = engine_of(num_kv_blocks=16, num_mamba_slots=4)
    kept = random_tokens(64, 30)
    target.warm(kept)
    pin = target.pin(kept)
    running = target.add_request(random_tokens(20, 31), ms.SamplingParams(max_tokens=20))
    target.step()
    target.context.check_integrity()
    report = moved(source, target)
    assert total(report) == expected_counts(source)
    assert report.left_out.blocks > 0
    assert resumable_tokens(target, kept) == 64
    results = run_checked(target)
    assert len(results[running].tokens) == 20
    target.unpin(pin)
    serve_checked(target, [[*kept, 1, 2, 3]])


def test_nothing_fits_beside_what_is_pinned(source: ms.DynamicInferenceEngine) -> None:
    target = engine_of(num_kv_blocks=9, num_mamba_slots=3)
    kept = random_tokens(64, 30)
    target.warm(kept)
    target.pin(kept)
    before = maps_of(target)
    report = moved(source, target)
    assert report.imported.blocks <= 1
    assert resumable_tokens(target, kept) == 64
    full = engine_of(num_kv_blocks=9, num_mamba_slots=3)
    full.warm(kept)
    full.pin(kept)
    blocker = full.add_request([1, 2, 3], ms.SamplingParams(max_tokens=3))
    full.step()
    before = maps_of(full)
    assert moved(source, full) == ImportReport(left_out=expected_counts(source))
    assert maps_of(full) == before
    full.cancel(blocker)


def test_while_requests_run_in_both() -> None:
    source, target = warm_engine(), engine_of()
    params = ms.SamplingParams(max_tokens=30, return_log_probs=True)
    here = source.add_request(PROMPTS[0], params)
    there = target.add_request(PROMPTS[0], params)
    for engine in (source, target):
        for _ in range(5):
            engine.step()
            engine.context.check_integrity()
    report = moved(source, target)
    assert report.known.blocks > 0
    for engine, request in ((source, here), (target, there)):
        assert_answers(PROMPTS[0], run_checked(engine)[request])
    assert min(serve(target)) > 0


@costly()
@given(st.data())
def test_random_traffic_between_two_engines(data: st.DataObject) -> None:
    """Small pools, prompts of a few families, imports in both directions in between."""
    sizes = {"num_kv_blocks": data.draw(st.integers(8, 24)), "num_mamba_slots": data.draw(st.integers(1, 8))}
    engines = [engine_of(**sizes), engine_of(num_kv_blocks=20, num_mamba_slots=6)]
    prompts = [SYSTEM[:n] + random_tokens(m, seed) for n in (0, 9, 21) for m, seed in ((4, 5), (20, 6))]
    for _ in range(data.draw(st.integers(2, 8))):
        i = data.draw(st.integers(0, 1))
        if data.draw(st.booleans()):
            serve(
                engines[i], [data.draw(st.sampled_from(prompts))], [data.draw(st.sampled_from([None, b"s"]))]
            )
        else:
            report = moved(engines[i], engines[1 - i])
            assert total(report) == expected_counts(engines[i])


def test_a_hash_that_names_another_prefix_here(source: ms.DynamicInferenceEngine) -> None:
    """As after a collision: what lies below it is left out, the rest comes."""
    target, export = engine_of(), export_prefixes(source)
    forest, kv = export.forest, target.context.prefix_cache.kv_blocks
    (block,) = kv.allocate_memory_blocks(1)
    root = forest.parents.index(-1 - forest.roots.index(PUBLIC_ROOT))
    kv.register_chain(PUBLIC_ROOT, [block], [forest.hashes[root]], [b"other tokens"])
    kv.release_memory_blocks([block])
    free = kv.total_avail
    report = import_prefixes(target, export)
    target.context.check_integrity()
    assert total(report) == expected_counts(source)
    assert report.left_out.blocks > 0
    assert report.imported.blocks > 0
    assert kv.total_avail == free - report.imported.blocks
    assert serve(target)[3] == 16


def test_what_the_allocators_report(source: ms.DynamicInferenceEngine) -> None:
    target = engine_of()
    moved(source, target)
    kv, slots = target.context.prefix_cache.kv_blocks, target.context.prefix_cache.slots
    assert sorted(eviction_order(slots)) == sorted(slots.cached_states.slot_of_block.values())
    for block in range(kv.total_count):
        assert (block in kv.tree) == (block in kv.tree.block_of_hash.values())


def timestamps(engine: ms.DynamicInferenceEngine, blocks: Any) -> list[int]:
    return [engine.context.prefix_cache.tree.leaves.timestamps[block] for block in blocks]


def test_what_is_known_gives_way_to_nothing_imported() -> None:
    """A pool that is full of one prefix, and an export of it and of another that was used later."""
    old, new = random_tokens(40, 50), random_tokens(40, 51)
    source, target = engine_of(), engine_of(num_kv_blocks=7, num_mamba_slots=64)
    serve(source, [old, new], [None] * 2)
    serve(target, [old], [None])
    before = maps_of(target)
    report = moved(source, target)
    assert (report.known.blocks, report.known.prefixes) == (5, 1)
    assert report.known.states == len(before["state keys"])
    assert before["blocks"].items() <= maps_of(target)["blocks"].items()
    assert resumable_tokens(target, [*old, 1]) == 40


def test_known_states_give_way_to_nothing_imported() -> None:
    old, new = random_tokens(40, 50), random_tokens(40, 51)
    source, twin = engine_of(), engine_of()
    serve(source, [old, new], [None] * 2)
    serve(twin, [old], [None])
    held = len(maps_of(twin)["state keys"])
    target = engine_of(num_mamba_slots=held, max_requests=1)
    serve(target, [old], [None])
    report = moved(source, target)
    assert (report.known.states, report.imported.states) == (held, 1)  # in the slot of the idle row
    assert resumable_tokens(target, [*old, 1]) == 40


def test_an_import_is_a_use_of_what_is_known() -> None:
    """Of blocks and of states, among what is new in the order of the exporter."""
    known, new, other = (random_tokens(40, seed) for seed in (50, 51, 52))
    for first, second in ((known, new), (new, known)):
        source, target = engine_of(), engine_of()
        serve(source, [first, second], [None] * 2)
        serve(target, [known, other], [None] * 2)
        before = maps_of(target)
        forest = export_prefixes(source).forest
        report = moved(source, target)
        assert report.known.states
        assert report.imported.states
        after, keys = maps_of(target), [forest.hashes[node] for node in forest.states]
        slots = [after["states"][after["blocks"][key]] for key in keys]
        others = [slot for slot in before["recency"] if slot not in slots]
        assert after["recency"] == others + slots[::-1]
        times = timestamps(target, [after["blocks"][key] for key in keys])
        assert times == sorted(times, reverse=True)
        rest = before["blocks"].keys() - set(forest.hashes)
        here = [after["blocks"][key] for key in forest.hashes]
        assert max(timestamps(target, [after["blocks"][key] for key in rest])) < min(timestamps(target, here))


def test_slots_are_counted_and_reserved_once(
    source: ms.DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not once a state: counting looks at all pins, and reserving at all reservations."""
    target, calls = engine_of(), []
    count, reserve = StateSlots.num_available.fget, StateSlots.reserve_slots
    assert count is not None

    def counted(self: StateSlots) -> int:
        calls.append("num_available")
        return count(self)

    def reserved(self: StateSlots, blocks: list[int]) -> list[int]:
        calls.append("reserve")
        return reserve(self, blocks)

    monkeypatch.setattr(StateSlots, "num_available", property(counted))
    monkeypatch.setattr(StateSlots, "reserve_slots", reserved)
    assert import_prefixes(target, export_prefixes(source)).imported.states > 2
    assert calls.count("num_available") == 1
    assert calls.count("reserve") == 1


def test_copies_take_no_more_than_they_may(
    source: ms.DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the host too: no tensor is made that is larger than a staged one."""
    target, sizes = engine_of(), []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            known = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in known:
                sizes.append(made.untyped_storage().nbytes())
            return made

    export, write = export_prefixes(source), Placement.write
    limit = 3 * max(tensor[:, :1].nbytes for tensor in export.tensors.values())

    def watched(self: Placement, tensors: Any) -> None:
        with Sizes():
            write(self, tensors)

    monkeypatch.setattr(export_module, "STAGING_BYTES", limit)
    monkeypatch.setattr(Placement, "write", watched)
    import_prefixes(target, export)
    assert limit // 2 < max(sizes) <= limit
    assert serve(target) == serve(warm_engine())
    assert min(serve(target)) > 0


def test_a_slot_that_is_allocated_but_not_registered_is_not_exported() -> None:
    """It holds bytes of another state until its host has filled it."""
    source = warm_engine()
    slots, kv = source.context.prefix_cache.slots, source.context.prefix_cache.kv_blocks
    stateless = [
        block for block in kv.tree.block_of_hash.values() if block not in slots.cached_states.slot_of_block
    ]
    if not stateless:
        stateless = [slots.cached_states.block_of(eviction_order(slots)[0])]
        assert slots.remove_unpinned(stateless[0])
    before = export_prefixes(source)
    allocated = slots.allocate_committed(stateless[:1])
    assert export_prefixes(source).forest.digest == before.forest.digest
    slots.cached_states.set_hashes(stateless[:1], allocated, [kv.tree.hash_of(stateless[0])])
    assert len(export_prefixes(source).forest.states) == len(before.forest.states) + 1


# ---- what is refused, and then changes nothing


def unchanged(target: ms.DynamicInferenceEngine, call: Callable[[], object]) -> str:
    maps, tensors = maps_of(target), tensors_of(target)
    with pytest.raises(TransferError) as error:
        call()
    assert maps_of(target) == maps
    assert all(map(torch.equal, tensors, tensors_of(target)))
    target.context.check_integrity()
    return str(error.value)


def foreign_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return (*value, 1)
    return value + 1 if isinstance(value, int) else value + "?"


@pytest.mark.parametrize("name", ["weights_version", "block_size_tokens", "vocab_size"])
def test_each_foreign_field_is_named(source: ms.DynamicInferenceEngine, name: str) -> None:
    target, export = engine_of(), export_prefixes(source)
    found, own = foreign_value(getattr(export.format, name)), getattr(export.format, name)
    foreign = replace(export, format=msgspec.structs.replace(export.format, **{name: found}))
    text = unchanged(target, lambda: import_prefixes(target, foreign))
    assert f"{name} is {found}; accepted: {own}" in text


@pytest.mark.parametrize("name", TensorFormat.__struct_fields__)
def test_each_foreign_field_of_each_tensor_is_named(source: ms.DynamicInferenceEngine, name: str) -> None:
    target, export = engine_of(), export_prefixes(source)
    for key, tensor in export.format.tensors.items():
        found, own = foreign_value(getattr(tensor, name)), getattr(tensor, name)
        tensors = {**export.format.tensors, key: msgspec.structs.replace(tensor, **{name: found})}
        foreign = replace(export, format=msgspec.structs.replace(export.format, tensors=tensors))
        text = unchanged(target, lambda foreign=foreign: import_prefixes(target, foreign))  # type: ignore[misc]
        assert text.endswith(
            f"the export does not fit: {key}.{name} is {found!r}; accepted: {own!r}, as here"
        )


@pytest.mark.parametrize(("found", "own"), [(1, "1"), ("1", b"1"), (b"1", 1), (1, 2)])
def test_weights_versions_of_another_type_differ(found: Any, own: Any) -> None:
    source, target = warm_engine(weights_version=found), engine_of(weights_version=own)
    data = encode_prefixes(export_prefixes(source))
    text = unchanged(target, lambda: import_prefixes(target, decode_prefixes(data)))
    assert f"weights_version is {found!r}; accepted: {own!r}" in text


@pytest.mark.parametrize(
    "change",
    [
        {"mamba_num_heads": 8}, {"mamba_num_groups": 1}, {"mamba_state_dim": 16}, {"mamba_head_dim": 4},
        {"ssd_chunk_size": 8}, {"delta_num_key_heads": 1}, {"delta_num_value_heads": 2}, {"delta_key_dim": 4},
        {"delta_value_dim": 4}, {"delta_chunk_size": 4}, {"short_conv_kernel": 2}, {"hidden_size": 16},
        {"num_kv_heads": 1}, {"head_dim": 8}, {"conv_kernel": 3}, {"vocab_size": 128},
        {"dtype": torch.float32}, {"pattern": "GM*CC"}, {"pattern": "GM**C"}, {"pattern": "GM*"},
        {"pattern": "M*C"}, {"pattern": "G*C"},
    ],
)  # fmt: skip
def test_exports_of_other_models(change: dict[str, Any]) -> None:
    with kind_of_model(MIX):
        other = engine_of(ms.models.HybridLM(replace(small_model().config, **change), seed=3))
        target = engine_of()
    other.generate([[5] * 30], ms.SamplingParams(max_tokens=1))
    data = encode_prefixes(export_prefixes(other))
    assert "the export does not fit" in unchanged(
        target, lambda: import_prefixes(target, decode_prefixes(data))
    )


def test_another_block_size() -> None:
    source, target = warm_engine(block_size_tokens=16), engine_of()
    text = unchanged(target, lambda: import_prefixes(target, export_prefixes(source)))
    assert "block_size_tokens is 16; accepted: 8" in text


def test_damaged_bytes_change_nothing(source: ms.DynamicInferenceEngine, tmp_path: Path) -> None:
    target, data = warm_engine(), encode_prefixes(export_prefixes(source))
    for at in range(0, len(data), len(data) // 60):
        changed = data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
        unchanged(target, lambda changed=changed: import_prefixes(target, decode_prefixes(changed)))  # type: ignore[misc]


@pytest.mark.parametrize("version", [None, 1.5, True, ("a",), torch.float32])
def test_a_weights_version_must_be_said(version: object) -> None:
    engine = engine_of(weights_version=version)
    with pytest.raises(ValueError, match=r"engine\.weights_version is .*; accepted: a str, int or bytes"):
        export_prefixes(engine)
    good = export_prefixes(engine_of())
    with pytest.raises(ValueError, match=r"engine\.weights_version"):
        import_prefixes(engine, good)


def test_engines_that_cannot_import(source: ms.DynamicInferenceEngine) -> None:
    export = export_prefixes(source)
    with pytest.raises(ValueError, match="enable_prefix_caching is False"):
        import_prefixes(engine_of(enable_prefix_caching=False, num_mamba_slots=None), export)
    suspended = engine_of()
    suspended.suspend()
    for call in (lambda: import_prefixes(suspended, export), lambda: export_prefixes(suspended)):
        with pytest.raises(RuntimeError, match="is called on a suspended engine; resume it first"):
            call()


def test_not_from_inside_a_step(source: ms.DynamicInferenceEngine) -> None:
    export, raised = export_prefixes(source), []

    class Curious:
        def state_spec(self) -> ms.HybridStateSpec:
            return small_model().state_spec()

        def __call__(self, inputs: ms.StepInputs) -> torch.Tensor:
            for call in (lambda: import_prefixes(engine, export), lambda: export_prefixes(engine)):
                try:
                    call()
                except RuntimeError as error:
                    raised.append(str(error))
            return small_model()(inputs)

    engine = engine_of(Curious())
    engine.generate(PROMPTS[3:])
    assert raised
    assert all("during a step" in text for text in raised)


@pytest.mark.parametrize(
    "arguments",
    [[(1, 2)], [([1], 5)], [([-1], None)], [([300], None)], [([1], b"")], [([1], "\ud800")], 5, ["ab"]],
)
def test_prefixes_that_are_none(source: ms.DynamicInferenceEngine, arguments: Any) -> None:
    with pytest.raises(ValueError, match="prefixes"):
        export_prefixes(source, arguments)


def test_pieces_as_bytes(source: ms.DynamicInferenceEngine) -> None:
    export = export_prefixes(source)
    data = encode_prefixes(export)
    for pieces in (data, bytearray(data), memoryview(data), [data], (data, export)):
        target = engine_of()
        assert import_prefixes(target, pieces).imported == expected_counts(source)
        target.context.check_integrity()
    target = engine_of()
    before = maps_of(target)
    for damaged in (data[:-1], [export, data[:-1]], b""):
        with pytest.raises(TransferError, match="truncated"):
            import_prefixes(target, damaged)  # type: ignore[arg-type]
    assert maps_of(target) == before


def test_pieces_that_are_none() -> None:
    for pieces in (5, "ab", [5], None, ["ab"]):
        with pytest.raises(ValueError, match=r"pieces(\[0\])? is"):
            import_prefixes(engine_of(), pieces)  # type: ignore[arg-type]
    with pytest.raises(TransferError, match="pieces is empty"):
        import_prefixes(engine_of(), [])


# ---- what fails half-way


@pytest.mark.sampled(quarter=(0, 2))
@pytest.mark.parametrize("quarter", range(5))
@pytest.mark.parametrize("warm", [[], [0], [2, 3]])
def test_a_copy_that_fails_is_undone(
    source: ms.DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch, quarter: int, warm: list[int]
) -> None:
    """From the first tensor to the last one."""
    target, export = engine_of(), export_prefixes(source)
    fails_at = quarter * (len(export.tensors) - 1) // 4
    if warm:
        serve(target, [PROMPTS[i] for i in warm], [SALTS[i] for i in warm])
    before, written = maps_of(target), []

    def write_entries(*arguments: Any) -> None:
        if len(written) == fails_at:
            raise MemoryError("no room")
        written.append(real(*arguments))

    real = placement.write_entries
    monkeypatch.setattr(placement, "write_entries", write_entries)
    with pytest.raises(RuntimeError, match="could not be imported: no room"):
        import_prefixes(target, export)
    assert maps_of(target) == before
    target.context.check_integrity()
    monkeypatch.undo()
    moved(source, target)
    assert serve(target) == serve(warm_engine())
    assert min(serve(target)) > 0


@pytest.mark.sampled(method=("reserve_slots", "commit_slots", "pin"), after=(0,))
@pytest.mark.parametrize(
    ("method", "after"),
    [
        ("reserve_slots", 0),
        ("commit_slots", 0),
        ("commit_slots", 2),
        ("pin", 0),
        ("pin", 2),
        ("record_use", 1),
    ],
)
def test_bookkeeping_that_fails_leaves_nothing_held(
    source: ms.DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch, method: str, after: int
) -> None:
    target = engine_of()
    serve(target, PROMPTS[:2], SALTS[:2])
    slots, calls = target.context.prefix_cache.slots, []
    owner = slots.cached_states if method == "record_use" else slots
    real = getattr(owner, method)

    def failing(*arguments: Any) -> Any:
        if len(calls) == after:
            raise RuntimeError("broken")
        calls.append(None)
        return real(*arguments)

    monkeypatch.setattr(owner, method, failing)
    with pytest.raises(RuntimeError, match="broken"):
        import_prefixes(target, export_prefixes(source))
    monkeypatch.undo()
    target.context.check_integrity()
    moved(source, target)
    assert serve(target) == serve(warm_engine())
    assert min(serve(target)) > 0


def test_a_damaged_file_changes_nothing(source: ms.DynamicInferenceEngine, tmp_path: Path) -> None:
    target = warm_engine()
    unchanged(target, lambda: load_prefixes(target, tmp_path))
