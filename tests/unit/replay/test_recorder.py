"""A recorder: what it writes reads back with the structure of the traffic, and discloses nothing else."""

import json
import logging
import os
import stat
from itertools import combinations
from pathlib import Path
from typing import Any

import mambaslots as ms
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.replay import recorder as recorder_module
from mambaslots.replay.engine_replay import EngineReplay
from mambaslots.replay.read_trace import read_trace
from mambaslots.replay.recorder import TraceRecorder
from mambaslots.replay.setting import StepCost
from oracle.budget import dear
from oracle.serving import random_tokens, small_engine

PARAMS = ms.SamplingParams(max_tokens=9)


def common(left: np.ndarray, right: np.ndarray) -> int:
    """How many leading tokens are equal."""
    shorter = min(len(left), len(right))
    differ = np.flatnonzero(left[:shorter] != right[:shorter])
    return int(differ[0]) if len(differ) else shorter


def converse(engine: ms.DynamicInferenceEngine, openings: list[list[int]], turns: int) -> list[list[int]]:
    """All prompts and their answers, joined, in order; each turn sends the history of its conversation."""
    sequences, histories = [], [list(opening) for opening in openings]
    for turn in range(turns):
        for number, history in enumerate(histories):
            history += random_tokens(3 + number, seed=10 * turn + number)
            history += engine.generate([history], PARAMS)[0].tokens
            sequences.append(list(history))
    return sequences


def test_a_recording_has_the_shape_of_the_traffic(tmp_path: Path) -> None:
    engine = small_engine()
    size = engine.config.block_size_tokens
    head = random_tokens(2 * size + 1, seed=0)
    with TraceRecorder(engine, tmp_path / "own.jsonl") as recorder:
        sequences = converse(engine, [head, [*head, 1], random_tokens(size, seed=5)], turns=4)
    assert recorder.num_requests == len(sequences) == 12
    trace = read_trace(tmp_path / "own.jsonl")
    whole = [np.concatenate([one.prompt, one.answer]) for one in trace.requests]
    assert [len(one) for one in whole] == [len(one) for one in sequences]
    assert all(len(one.answer) == 9 for one in trace.requests)
    for left, right in combinations(range(12), 2):
        same = common(np.array(sequences[left]), np.array(sequences[right]))
        assert common(whole[left], whole[right]) // size == same // size
    for number, one in enumerate(trace.requests):
        assert one.session == trace.requests[number % 3].session
    assert len({one.session for one in trace.requests}) == 3


@pytest.mark.sampled(num_slots=(3, 5))
@pytest.mark.parametrize(("num_slots", "policy"), [(3, "value"), (5, "lru"), (64, "value")])
def test_a_replay_resumes_what_the_engine_resumed(tmp_path: Path, num_slots: int, policy: str) -> None:
    engine = small_engine(num_mamba_slots=num_slots, num_kv_blocks=80, eviction_policy=policy, max_requests=1)
    rng, head = np.random.default_rng(7), random_tokens(19, seed=0)
    histories = [[*head, *random_tokens(5 + 9 * number, seed=number)] for number in range(4)]
    resumed = []
    with TraceRecorder(engine, tmp_path / "own.jsonl"):
        for _ in range(14):
            history = histories[rng.integers(len(histories))]
            history += random_tokens(int(rng.integers(1, 12)), seed=int(rng.integers(1000)))
            del history[160:]
            (result,) = engine.generate([history], PARAMS)
            resumed.append(result.num_resumed_tokens)
            history += result.tokens
    trace = read_trace(tmp_path / "own.jsonl")
    replay = EngineReplay(trace, engine.context.spec, engine.config, StepCost())
    assert list(replay.run().resumed_lengths) == resumed
    assert 0 < sum(resumed) < trace.num_prompt_tokens


@dear()
@given(
    openings=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    turns=st.integers(1, 3),
)
def test_equal_whole_blocks_are_equal_in_any_recording(
    tmp_path_factory: pytest.TempPathFactory, openings: list[int], turns: int
) -> None:
    engine = small_engine()
    size = engine.config.block_size_tokens
    path = tmp_path_factory.mktemp("recorded") / "own.jsonl"
    with TraceRecorder(engine, path):
        sequences = converse(
            engine, [random_tokens(8 + size * one, seed=one // 2) for one in openings], turns
        )
    requests = read_trace(path).requests
    for (left, one), (right, other) in combinations(zip(sequences, requests, strict=True), 2):
        same = common(np.array(left), np.array(right)) // size
        made = [np.concatenate([x.prompt, x.answer]) for x in (one, other)]
        assert common(*made) // size == same or same == min(len(left), len(right)) // size


def test_a_recording_discloses_no_token_and_no_two_recordings_compare(tmp_path: Path) -> None:
    lines = []
    for number in range(2):
        engine = small_engine()
        with TraceRecorder(engine, tmp_path / f"{number}.jsonl"):
            engine.generate([random_tokens(40, seed=1)], PARAMS)
            engine.generate([random_tokens(40, seed=1)], PARAMS, cache_salt="tenant")
        lines += [json.loads(line) for line in (tmp_path / f"{number}.jsonl").read_text().splitlines()]
    fields = {"arrival_s", "token_count", "prefix_hashes", "answer_count", "answer_hashes", "hash_tokens"}
    assert all(line.keys() == fields for line in lines)
    firsts = [line["prefix_hashes"][0] for line in lines]
    assert len(set(firsts)) == 4  # salts part, recordings too
    assert all(len(one) == 16 for one in firsts)


def test_the_file_is_its_owners_and_new(tmp_path: Path) -> None:
    engine = small_engine()
    path = tmp_path / "own.jsonl"
    before = os.umask(0)
    try:
        TraceRecorder(engine, path).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(ValueError, match="which exists; accepted: a new file"):
        TraceRecorder(engine, path)
    with pytest.raises(ValueError, match="engine is 5"):
        TraceRecorder(5, tmp_path / "other.jsonl")  # type: ignore[arg-type]
    assert not (tmp_path / "other.jsonl").exists()


def test_a_closed_recorder_records_nothing_more(tmp_path: Path) -> None:
    engine = small_engine()
    recorder = TraceRecorder(engine, tmp_path / "own.jsonl")
    engine.generate([random_tokens(12, seed=1)], PARAMS)
    assert not (tmp_path / "own.jsonl").read_text()  # it waits for more
    recorder.flush()
    assert (tmp_path / "own.jsonl").read_text().count("\n") == 1
    recorder.close()
    recorder.close()
    recorder.flush()
    engine.generate([random_tokens(12, seed=2)], PARAMS)
    assert recorder.num_requests == 1
    assert (tmp_path / "own.jsonl").read_text().count("\n") == 1


def test_what_waits_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "_BUFFER_BYTES", 100)
    engine = small_engine()
    with TraceRecorder(engine, tmp_path / "own.jsonl"):
        engine.generate([random_tokens(40, seed=1)], PARAMS)
        assert (tmp_path / "own.jsonl").read_text().count("\n") == 1


def test_a_full_disk_ends_the_recording_and_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recorder_module, "_FLUSH_EVERY_S", 0.0)
    engine = small_engine()
    recorder = TraceRecorder(engine, tmp_path / "own.jsonl")
    assert recorder._file is not None
    recorder._file.close()
    full = open("/dev/full", "wb")  # noqa: SIM115
    monkeypatch.setattr(recorder, "_file", full)
    with caplog.at_level(logging.WARNING):
        results = engine.generate([random_tokens(12, seed=1), random_tokens(12, seed=2)], PARAMS)
    assert full.closed
    assert [len(result.tokens) for result in results] == [9, 9]
    assert recorder.failed
    assert "the recording" in caplog.text
    assert "No space left on device" in caplog.text
    recorder.close()
    engine.check_integrity()


def test_an_end_that_is_reported_twice_is_recorded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = small_engine()
    request_ended = TraceRecorder.request_ended

    def twice(self: TraceRecorder, *end: Any) -> None:
        request_ended(self, *end)
        request_ended(self, *end)

    monkeypatch.setattr(TraceRecorder, "request_ended", twice)
    with TraceRecorder(engine, tmp_path / "own.jsonl") as recorder:
        engine.generate([random_tokens(12, seed=1), random_tokens(12, seed=1)], PARAMS)
        assert recorder.num_requests == 2


def test_scores_are_left_out(tmp_path: Path) -> None:
    engine = small_engine()
    with TraceRecorder(engine, tmp_path / "own.jsonl") as recorder:
        engine.score([random_tokens(12, seed=1)])
        assert recorder.num_requests == 0
