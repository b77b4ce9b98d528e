"""An evicted state comes back from host memory or a file, or its tokens are computed; never other tokens."""

import os
from pathlib import Path
from random import Random

import mambaslots as ms
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from mambaslots.inference.contexts.cache.state_tiers import Tier
from mambaslots.inference.contexts.state_files import StateFiles
from mambaslots.inference.contexts.tier_copies import HostCopies
from oracle.budget import costly
from oracle.faulty_copies import make_faulty
from oracle.file_starts import wait_for
from oracle.fresh_process import printed_by
from oracle.scrubbed import assert_scrubbed
from oracle.toy_answers import Ask, answer
from oracle.toy_engine import ask, resumed, tiers_of, toy_engine
from oracle.toy_lm import TOYS, ToyLM


def converse(engine: ms.DynamicInferenceEngine, talks: int = 4, turns: int = 3, version: int = 0) -> None:
    """Several conversations in turn: the oracle's answers, whose files are written before the next answer."""
    random = Random(1)
    tier = engine.context.prefix_cache.tiers
    texts = [[random.randrange(29) for _ in range(9)] for _ in range(talks)]
    for _ in range(turns):
        for number, text in enumerate(texts):
            prompt = text + [random.randrange(29) for _ in range(3)]
            texts[number] = prompt + ask(engine, prompt, 4, version).tokens
            engine.check_integrity()
            if tier is not None and isinstance(tier.copies, HostCopies) and tier.copies._files is not None:
                wait_for(tier.copies._files)


def test_a_tier_resumes_what_an_unlimited_pool_resumes() -> None:
    unlimited, small, tiered = toy_engine(200, 0), toy_engine(2, 0), toy_engine(2, 60)
    for engine in (unlimited, small, tiered):
        converse(engine)
    assert resumed(small) < resumed(unlimited) == resumed(tiered)
    stats = tiered.stats().cache.tiers
    assert stats.num_states_fetched > 0
    assert stats.num_host_states > 0
    assert unlimited.context.prefix_cache.tiers is None


def test_files_hold_what_host_memory_has_no_room_for(tmp_path: Path) -> None:
    disk = {"disk_cache": (str(tmp_path), 1e-4)}
    unlimited, tiered = toy_engine(200, 0), toy_engine(2, 2, **disk)
    converse(unlimited)
    converse(tiered)
    converse(tiered, turns=1)
    stats = tiered.stats().cache.tiers
    assert stats.num_states_fetched_from_disk > 0
    assert resumed(tiered) > resumed(unlimited) // 2
    files = list(tmp_path.glob("*/*.state"))
    assert files
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files)
    tiered.reset_prefix_cache()
    copies = tiers_of(tiered).copies
    assert isinstance(copies, HostCopies)
    assert copies._files is not None
    wait_for(copies._files)
    assert not list(tmp_path.glob("*/*.state"))


def test_damaged_bytes_cost_tokens_and_change_none() -> None:
    engine = toy_engine(1, 40)
    converse(engine, turns=2)
    copies = tiers_of(engine).copies
    assert isinstance(copies, HostCopies)
    copies.memory[:, 3] ^= 1
    before = engine.stats().cache.tiers.num_states_fetched
    converse(engine, turns=2)
    stats = engine.stats().cache.tiers
    assert stats.num_copies_damaged > 0
    assert stats.num_states_fetched >= before


def test_rows_that_change_places_are_damaged() -> None:
    engine = toy_engine(1, 40)
    converse(engine, turns=1)
    tier = tiers_of(engine)
    assert isinstance(tier.copies, HostCopies)
    for values in (tier.copies.memory, tier.copies._sums):  # each row with its own checksum
        values.copy_(values.roll(1, 0).clone())
    converse(engine, turns=1)
    assert tier.stats().num_copies_damaged > 0


def test_a_row_that_was_not_overwritten_is_not_taken_for_a_new_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same prefix under new weights, in the same row: the copy of the new state fails unseen."""
    model = ToyLM()
    engine = toy_engine(1, 1, model)
    prompt = [1, 2, 3, 4] * 5
    for text in (prompt, [7] * 20):
        ask(engine, text, 1)
    model.version = 1
    engine.set_weights_version(1)
    monkeypatch.setattr(HostCopies, "_copy_to_host", lambda *arguments: None)
    for text in (prompt, [7] * 20, prompt):
        result = ask(engine, text, 1, version=1)
    assert result.num_resumed_tokens == 0
    assert tiers_of(engine).stats().num_copies_damaged > 0


@pytest.mark.parametrize("which", ["reset_prefix_cache", "weights", "suspend", "reset"])
def test_copies_are_forgotten_with_their_weights(which: str) -> None:
    model = ToyLM()
    engine = toy_engine(1, 40, model)
    converse(engine, turns=2)
    assert len(tiers_of(engine).host) > 0
    if which == "weights":
        model.version = 1
        engine.set_weights_version(1)
    elif which == "suspend":
        engine.suspend()
        engine.resume()
    else:
        getattr(engine, which)()
    assert len(tiers_of(engine).host) == 0
    engine.check_integrity()
    converse(engine, turns=2, version=model.version)


def test_a_copy_dies_with_its_kv() -> None:
    engine, forgotten = toy_engine(1, 40, num_kv_blocks=30), list[int]()
    host = tiers_of(engine).host
    remove = host.remove
    host.remove = lambda keys: forgotten.extend(freed := remove(keys)) or freed  # type: ignore[method-assign]
    for seed in range(12):
        random = Random(seed)
        ask(engine, [random.randrange(29) for _ in range(30)], 3)
        engine.check_integrity()
    assert forgotten


def test_salts_share_no_copies() -> None:
    engine = toy_engine(1, 40)
    prompt = [1, 2, 3, 4] * 5
    params = ms.SamplingParams(max_tokens=1)
    for salt in ("a", "b", "a"):
        (result,) = engine.generate([prompt], params, cache_salt=salt)
    assert result.num_resumed_tokens == 16
    (other,) = engine.generate([prompt], params, cache_salt="c")
    assert other.num_resumed_tokens == 0


def test_fewer_tokens_than_the_minimum_are_computed() -> None:
    engine = toy_engine(1, 40)
    tiers_of(engine).min_tokens = 21
    prompt = list(range(20))
    for text in (prompt, [7] * 20, prompt):
        result = ask(engine, text, 1)
    assert result.num_resumed_tokens == 0
    tiers_of(engine).min_tokens = 16
    ask(engine, [7] * 20, 1)
    assert ask(engine, prompt, 1).num_resumed_tokens == 16


def test_ranks_agree_on_a_copy_that_is_bad_elsewhere() -> None:
    engine = toy_engine(1, 40)
    tiers_of(engine)._agree = lambda good: False
    converse(engine, turns=2)
    stats = engine.stats().cache.tiers
    assert stats.num_states_fetched == 0
    assert stats.num_copies_damaged > 0


def test_a_file_that_was_never_written_is_not_called_damaged(tmp_path: Path) -> None:
    """As where states leave faster than the disk takes them."""
    engine = toy_engine(1, 2, disk_cache=(str(tmp_path), 1e-4))
    copies = tiers_of(engine).copies
    copies.save = lambda host_slot, file, serial: None  # type: ignore[method-assign]
    converse(engine)
    tiers = engine.stats().cache.tiers
    assert tiers.num_states_fetched_from_disk == 0
    assert tiers.num_copies_damaged == 0
    assert tiers.num_copies_not_written > 0


def test_a_file_with_a_damaged_head_is_not_called_unwritten(tmp_path: Path) -> None:
    engine = toy_engine(1, 2, disk_cache=(str(tmp_path), 1e-4))
    converse(engine)
    for file in tmp_path.glob("*/*.state"):
        file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    before = engine.stats().cache.tiers
    converse(engine, turns=1)
    tiers = engine.stats().cache.tiers
    assert tiers.num_copies_damaged > before.num_copies_damaged == 0
    assert tiers.num_copies_not_written == before.num_copies_not_written


@pytest.mark.parametrize("length", [0, 30, 70, -1])
def test_a_file_that_ends_early_is_damaged(tmp_path: Path, length: int) -> None:
    files, row = StateFiles(str(tmp_path), 8, "model"), torch.zeros(8, dtype=torch.uint8)
    files.save(0, 1, row, lambda: 5)
    wait_for(files)
    assert files.load(0, 2, row) is None  # another state's
    (file,) = files.directory.glob("*.state")
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(ValueError, match=r"0\.state is damaged"):
        files.load(0, 1, row)
    files.close()


def test_a_pipe_in_place_of_a_file_is_a_miss(tmp_path: Path) -> None:
    """Opened as a file is, it would block the engine until it is written to."""
    files, row = StateFiles(str(tmp_path), 8, "model"), torch.zeros(8, dtype=torch.uint8)
    os.mkfifo(files.directory / "0.state")
    assert files.load(0, 1, row) is None
    files.save(0, 1, row, lambda: 5)
    wait_for(files)
    assert files.load(0, 1, row) == 5
    files.close()


STARTED_TOGETHER = """
import sys
from multiprocessing import get_context
sys.path.append("tests")
from oracle.file_starts import start_in_threads
with get_context("fork").Pool(3) as processes:
    print(processes.starmap(start_in_threads, [(sys.argv[1], 40)] * 3))
"""


def test_engines_that_start_together_on_one_path_keep_their_files(tmp_path: Path) -> None:
    """Each removes what dead engines have left, and no directory that another one is about to lock."""
    assert printed_by(STARTED_TOGETHER, str(tmp_path)) == "[0, 0, 0]\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("scrubs", [False, True])
@pytest.mark.parametrize("link", ["symbolic", "hard", "folder"])
def test_links_in_a_dead_engines_folder_lead_to_no_file_of_others(
    tmp_path: Path, link: str, scrubs: bool
) -> None:
    """A user who may write to the folder could otherwise have any file of the engine's user overwritten."""
    others, root = tmp_path / "others", tmp_path / "states"
    others.mkdir()
    root.mkdir()
    for name in ("lock", "own.state", "own.part"):
        (others / name).write_text("precious")
    dead = root / "mambaslots-dead"
    if link == "folder":
        dead.symlink_to(others)
    else:
        dead.mkdir()
        (dead / "lock").touch()
        (dead / "left.state").write_text("left")
        linked = dead / "linked.state"
        linked.symlink_to(others / "own.state") if link == "symbolic" else linked.hardlink_to(
            others / "own.state"
        )
    StateFiles(str(root), 8, "model", scrubs).close()
    assert {file.name: file.read_text() for file in others.iterdir()} == dict.fromkeys(
        ("lock", "own.state", "own.part"), "precious"
    )
    assert dead.exists() == (link == "folder")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host_cache_gb": -1.0}, "host_cache_gb is -1.0"),
        ({"disk_cache": ("x", 1.0)}, "disk_cache is .*; accepted: None where host"),
        ({"host_cache_gb": 1.0, "disk_cache": 1.0}, "disk_cache is 1.0; accepted: a directory"),
        ({"host_cache_gb": 1.0, "disk_cache": ("", 1.0)}, "disk_cache is .*; accepted: a directory"),
        ({"host_cache_gb": 1.0, "disk_cache": ("x", -1)}, r"disk_cache\[1\] is -1"),
        ({"host_cache_gb": 1.0, "enable_prefix_caching": False}, "enable_prefix_caching is False"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ms.InferenceConfig(num_kv_blocks=50, num_mamba_slots=2, **settings)  # type: ignore[arg-type]


def test_a_budget_that_buys_no_state_is_refused() -> None:
    with pytest.raises(ValueError, match="host_cache_gb is 1e-09; accepted: at least"):
        toy_engine(1, 0, host_cache_gb=1e-9)


def test_a_directory_that_cannot_be_had_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="disk_cache is"):
        toy_engine(1, 3, disk_cache=(str(tmp_path / "file" / "below"), 1e-4))


def test_what_a_process_left_behind_is_removed(tmp_path: Path) -> None:
    left = tmp_path / "mambaslots-left"
    left.mkdir()
    (left / "lock").touch()
    (left / "0.state").write_bytes(b"old")
    alive = toy_engine(1, 3, disk_cache=(str(tmp_path), 1e-4))
    assert not left.exists()
    second = toy_engine(1, 3, disk_cache=(str(tmp_path), 1e-4))
    directories = list(tmp_path.iterdir())
    assert len(directories) == 2
    assert all(os.stat(directory).st_mode & 0o777 == 0o700 for directory in directories)
    del alive, second


class TierMachine(RuleBasedStateMachine):
    """Heads of a few texts come again and again, while copies are late, change places, fail or turn bad."""

    @initialize(
        seed=st.integers(0, 2**30),
        kind=st.sampled_from(list(TOYS)),
        in_place=st.booleans(),
        slots=st.sampled_from([1, 2, 4]),
        host_slots=st.sampled_from([1, 3, 40]),
        num_files=st.sampled_from([0, 0, 5, 100]),
        kv_blocks=st.sampled_from([26, 40, 200]),
        share=st.sampled_from([0.0, 0.1, 0.4]),
        scrub=st.booleans(),
    )
    def start(
        self, seed: int, kind: str, in_place: bool, slots: int, host_slots: int, num_files: int,
        kv_blocks: int, share: float, scrub: bool,
    ) -> None:  # fmt: skip
        self.random, self.kind = Random(seed), TOYS[kind]
        self.engine = toy_engine(
            slots, host_slots, ToyLM(in_place, self.kind), num_kv_blocks=kv_blocks, max_requests=3,
            free_memory="zero" if scrub else "keep",
        )  # fmt: skip
        tier = tiers_of(self.engine)
        tier.files = Tier(num_files)  # without a thread: files that hold nothing answer no
        self.copies = make_faulty(tier, self.random, share)
        self.texts = [[self.random.randrange(29) for _ in range(40)] for _ in range(3)]
        self.prompts: dict[int, list[int]] = {}

    @rule(which=st.integers(0, 2), head=st.integers(1, 40), tail=st.integers(0, 5), length=st.integers(1, 9))
    def add(self, which: int, head: int, tail: int, length: int) -> None:
        prompt = self.texts[which][:head] + [self.random.randrange(29) for _ in range(tail)]
        params = ms.SamplingParams(max_tokens=length)
        self.prompts[self.engine.add_request(prompt, params)] = prompt

    @rule(times=st.integers(1, 15))
    def step(self, times: int) -> None:
        for _ in range(times):
            for result in self.engine.step().finished:
                prompt, length = tuple(self.prompts.pop(result.request_id)), len(result.tokens)
                assert tuple(result.tokens) == answer(Ask(prompt, length, kind=self.kind)).tokens
            self.engine.context.check_integrity()

    @rule()
    def forget(self) -> None:
        if self.random.random() < 0.2:
            self.engine.reset_prefix_cache()

    @invariant()
    def nothing_contradicts_itself(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check_integrity()
            if self.engine.config.free_memory == "zero":
                assert_scrubbed(self.engine)

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            while self.engine.has_unfinished_requests():
                self.step(1)


class TestTierMachine(TierMachine.TestCase):  # type: ignore[misc, valid-type]
    settings = costly()


def test_copies_are_made_without_a_gradient_or_an_inference_tensor() -> None:
    engine = toy_engine(1, 3)
    copies = tiers_of(engine).copies
    assert isinstance(copies, HostCopies)
    assert not copies.memory.is_inference()
    assert copies.memory.dtype is torch.uint8
