"""With `free_memory="zero"`, free memory is zero after every call, and new owners get zeros."""

import sys
from collections.abc import Iterable
from pathlib import Path

import mambaslots as ms
import pytest
import torch
from mambaslots.inference.contexts.cache.free_entries import DirtyEntries
from mambaslots.inference.contexts.tier_copies import HostCopies
from mambaslots.inference.engines.engine_core import EngineCore
from oracle import drafters
from oracle.file_starts import wait_for
from oracle.model_kinds import MIX
from oracle.scrubbed import NewOwners, assert_scrubbed
from oracle.serving import random_tokens, serve_checked, small_engine, small_model, tiny_model
from oracle.synchronisation import no_synchronisation

pytestmark = pytest.mark.usefixtures("kind")


def pressed(**settings: object) -> ms.DynamicInferenceEngine:
    """Few slots and blocks, so that memory changes its owner all the time."""
    return small_engine(
        **(
            {"free_memory": "zero", "num_kv_blocks": 14, "num_mamba_slots": 3, "max_tokens_per_step": 24}
            | settings
        )
    )


def serve(engine: ms.DynamicInferenceEngine, prompts: list[list[int]], length: int = 9) -> None:
    """Step to the end; after each step all that is free is zero."""
    params = ms.SamplingParams(max_tokens=length)
    for prompt in prompts:
        engine.add_request(prompt, params)
    while engine.has_unfinished_requests():
        engine.step()
        assert_scrubbed(engine)


STEM = random_tokens(30, seed=1)
PROMPTS = [STEM, STEM[:17] + random_tokens(9, seed=2), STEM + random_tokens(20, seed=3), STEM]


@pytest.mark.sampled(mode=("", "mixed", "encoded, mixed", "replay, mixed"))
@pytest.mark.parametrize("mode", ["", *drafters.MODES])
def test_free_memory_is_zero_and_new_owners_get_zeros(mode: str) -> None:
    engine = pressed(**(drafters.MODES[mode] if mode else {}))
    owners = NewOwners(engine)
    serve_checked(engine, PROMPTS, length=9)
    assert_scrubbed(engine)
    serve(engine, [STEM, random_tokens(50, seed=7), STEM[:20]])
    stats = engine.stats().cache
    assert stats.num_states_evicted
    assert stats.num_resumed_tokens
    assert owners.num_checked > 10


def test_it_is_off_unless_asked_for() -> None:
    engine = pressed(free_memory="keep")
    serve_checked(engine, PROMPTS)
    engine.reset_prefix_cache()
    with pytest.raises(AssertionError, match="is free and not zero"):
        assert_scrubbed(engine)


def pressed_by_all() -> None:
    """Traffic and calls that free memory in every way, with a check after each."""
    for mode in ("mixed", "encoded, mixed", "replay, mixed"):
        engine = pressed(**drafters.MODES[mode], eviction_policy="lru", max_requests=2)
        NewOwners(engine)
        serve(engine, PROMPTS)
        for seed in range(4):  # idle rows hold cached states
            serve(engine, [random_tokens(50, seed)], length=1)
        serve(engine, [random_tokens(50, seed=seed) for seed in range(3)])
        request = engine.add_request(random_tokens(40, seed=9))
        engine.step()
        engine.cancel(request)
        assert_scrubbed(engine)
        engine.reset_prefix_cache()
        assert_scrubbed(engine)
        engine.add_request(STEM)
        engine.step()
        engine.reset()
        assert_scrubbed(engine)


FOUND = r"not zero|bytes of others|got a block with bytes|inputs of others"
PLACES = {
    "kv_block_allocator._add_free": "blocks that are released or evicted",
    "kv_block_allocator._reset_free_list": "blocks that a reset forgets",
    "state_slots._add_free": "slots that are freed",
    "admission.release live": "live slots of a pool of their own",
    "admission.release inputs": "inputs of a row",
    "request_states.gather": "staged states",
}


@pytest.mark.sampled(place=("kv_block_allocator._add_free", "state_slots._add_free", "request_states.gather"))
@pytest.mark.parametrize("kind", [MIX], indirect=True)
@pytest.mark.parametrize("place", PLACES)
def test_each_place_that_frees_memory_is_noted(
    kind: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the note of any one of them something is found."""
    add = DirtyEntries.add
    function, _, entries_of = place.partition(" ")
    forgotten = []

    def forgetful(left: DirtyEntries, entries: Iterable[int]) -> None:
        caller = sys._getframe(1)
        is_here = f"{Path(caller.f_code.co_filename).stem}.{caller.f_code.co_name}" == function
        scrubber = getattr(caller.f_locals.get("self"), "_scrubber", None)
        if is_here and (not entries_of or left is getattr(scrubber, entries_of)):
            forgotten.append(place)
        else:
            add(left, entries)

    monkeypatch.setattr(DirtyEntries, "add", forgetful)
    with pytest.raises(AssertionError, match=FOUND):
        pressed_by_all()
    assert forgotten


@pytest.mark.parametrize("kind", [MIX], indirect=True)
@pytest.mark.parametrize("part", ["scrub", "scrub_all", "at the end of a call"])
def test_each_time_of_zeroing_is_needed(kind: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if part == "at the end of a call":
        monkeypatch.setattr(EngineCore, "_complete", lambda core: setattr(core, "repair", None))
    elif part == "scrub":
        scrub = DirtyEntries.scrub

        def only_all(left: DirtyEntries, entries: Iterable[int]) -> None:
            if sys._getframe(1).f_code.co_name == "scrub_all":
                scrub(left, entries)
            else:
                left.remove(entries)

        monkeypatch.setattr(DirtyEntries, "scrub", only_all)
    else:
        monkeypatch.setattr(DirtyEntries, "scrub_all", lambda left: None)
    with pytest.raises(AssertionError, match=FOUND):
        pressed_by_all()


def test_the_memory_of_a_suspended_engine_is_zero_before_it_goes() -> None:
    engine = pressed()
    serve_checked(engine, PROMPTS)
    memory = engine.context.memory
    kept = memory.kv_cache, memory.state_pool.memory
    assert any(tensor.any() for tensor in kept)
    engine.suspend()
    assert not any(tensor.any() for tensor in kept)
    engine.resume()
    serve(engine, PROMPTS)


def test_a_cached_prefix_stays_until_it_is_forgotten() -> None:
    engine = small_engine(free_memory="zero")
    serve_checked(engine, [STEM])
    (again,) = serve_checked(engine, [STEM])
    assert again.num_resumed_tokens > 0
    memory = engine.context.memory
    assert memory.kv_cache.any() or memory.state_pool.memory.any()
    engine.set_weights_version("next")
    assert not memory.kv_cache.any()
    assert not memory.state_pool.memory.any()


def tiered(tmp_path: Path, **settings: object) -> tuple[ms.DynamicInferenceEngine, HostCopies]:
    """An engine with room for few states in host memory, and for many in files."""
    size = small_model().state_spec().slot_bytes / (1 << 30)
    tier = {"host_cache_gb": 3.5 * size, "disk_cache": (str(tmp_path), 60 * size)}
    engine = pressed(num_mamba_slots=1, num_kv_blocks=60, **tier, **settings)
    assert engine.context.prefix_cache.tiers is not None
    copies = engine.context.prefix_cache.tiers.copies
    assert isinstance(copies, HostCopies)
    return engine, copies


def test_rows_of_host_memory_and_files_are_zero_before_they_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last: list[bytes] = []
    unlink = Path.unlink

    def recorded(path: Path, missing_ok: bool = False) -> None:
        if path.exists():
            last.append(path.read_bytes())
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", recorded)
    engine, copies = tiered(tmp_path)
    for _ in range(2):
        serve(engine, [*PROMPTS, *(random_tokens(40, seed) for seed in range(4))])
    assert copies._files is not None
    wait_for(copies._files)
    assert engine.stats().cache.tiers.num_states_fetched > 0
    assert list(tmp_path.glob("*/*.state"))
    engine.reset_prefix_cache()
    assert_scrubbed(engine)
    assert not copies.memory.any()
    wait_for(copies._files)
    assert not list(tmp_path.glob("*/*.state"))
    assert any(len(text) > 100 for text in last)
    assert not any(any(text) for text in last)
    serve(engine, [*PROMPTS, *(random_tokens(40, seed) for seed in range(4))])
    copies._files.close()
    assert not any(any(text) for text in last)
    assert not list(tmp_path.iterdir())


def test_a_failed_copy_leaves_no_bytes_of_the_row_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, copies = tiered(tmp_path)
    serve(engine, [random_tokens(40, seed) for seed in range(4)])
    assert copies.memory.any(dim=1).all()

    def fails(*arguments: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(HostCopies, "_copy_to_host", fails)
    serve(engine, [random_tokens(40, seed) for seed in range(4, 9)])
    assert not copies.memory.any()


def test_what_a_dead_process_left_is_overwritten_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = tmp_path / "mambaslots-left"
    left.mkdir()
    (left / "lock").touch()
    (left / "0.state").write_bytes(b"old" * 500_000)
    opened = (left / "0.state").open("rb")  # the bytes outlive the name
    tiered(tmp_path)
    assert not left.exists()
    with opened:
        assert opened.read() == bytes(1_500_000)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [None, 16])
def test_on_a_gpu_beside_graphs_and_a_tier(graphs: int | None) -> None:
    """Zeroing waits for nothing: steps and copies of states go on while it is launched."""
    model = tiny_model(torch.bfloat16, "cuda")
    tier = {"host_cache_gb": 6.5 * model.state_spec().slot_bytes / (1 << 30)}
    engine = small_engine(
        model=model, free_memory="zero", num_kv_blocks=24, num_mamba_slots=2, max_tokens_per_step=256,
        block_size_tokens=32, max_sequence_length=512, num_cuda_graphs=graphs, **tier,
    )  # fmt: skip
    for turn in range(3):
        prompts = [random_tokens(70 + 40 * i, seed=i + 3 * (turn % 2)) for i in range(3)]
        for prompt in prompts:
            engine.add_request(prompt, ms.SamplingParams(max_tokens=20))
        while engine.has_unfinished_requests():
            engine.step()
            torch.cuda.synchronize()
            assert_scrubbed(engine)
    assert engine.stats().cache.tiers.num_host_states > 0
    with no_synchronisation():
        engine.context.memory.scrubber.blocks.add([1, 3])
        engine.context.memory.scrubber.scrub_all()
    engine.reset_prefix_cache()
    torch.cuda.synchronize()
    assert_scrubbed(engine)
