"""The fuzz finds nothing in a sample of its inputs, and finds what is wrong."""

import sys
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from mambaslots.replay import hashed_requests, trace

sys.path.append(str(Path(__file__).parents[3] / "tools"))
import fuzz
from fuzzing import files as fuzz_files
from fuzzing import target as fuzz_target
from fuzzing.target import ACCEPTED, REFUSED, Target, end_of

INPUTS = 120


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> list[Target]:
    """Those of files."""
    return fuzz_files.targets(tmp_path_factory.mktemp("fuzz"))


def check_sample(targets: list[Target], num_inputs: int) -> None:
    tallies = fuzz.run(targets, num_inputs, 7, fuzz.WEIGHTS)
    assert [str(one) for tally in tallies.values() for one in tally.findings] == []
    ends = sum((tally.ends for tally in tallies.values()), start=fuzz.Tally().ends)
    assert ends.total() > num_inputs // 2
    assert min(ends[ACCEPTED], ends[REFUSED]) > ends.total() // 10
    assert "all" in fuzz.table(tallies)


def test_a_sample_of_inputs_finds_nothing(targets: list[Target]) -> None:
    slow = ("transformers", "own checkpoint")  # which import transformers
    check_sample([target for target in targets if not target.name.startswith(slow)], INPUTS)


@pytest.mark.long
def test_a_sample_of_all_targets_finds_nothing(tmp_path: Path) -> None:
    targets = fuzz.all_targets(tmp_path)
    assert {target.name for target in targets} >= fuzz.REMEMBERING | fuzz.WEIGHTS.keys()
    check_sample(targets, 8 * INPUTS)
    for target in targets:
        getattr(target, "close", lambda: None)()


def test_equal_seeds_draw_equal_inputs(targets: list[Target]) -> None:
    traces = fuzz.chosen(targets, "traces")[0]
    assert traces.draw(Random("a")) == traces.draw(Random("a")) != traces.draw(Random("b"))


class Faulty:
    """A target that does what `what` says."""

    name = "faulty"
    documented = (ValueError,)

    def __init__(self, what: str) -> None:
        self.what = what

    def draw(self, random: Random) -> object:
        return random.random()

    def size_of(self, drawn: object) -> int:
        return 8

    def feed(self, drawn: object) -> str:
        if self.what == "error":
            raise KeyError(drawn)
        if self.what == "state":
            raise AssertionError("the state has changed")
        if self.what == "hidden memory":
            return end_of(_hide_memory, self.documented)
        if self.what == "written memory":
            np.ones((fuzz_target.FREE_MIB + 32) << 17)  # eight bytes each
        if self.what == "unwritten memory":
            np.zeros(1 << 34)
        if self.what == "hang":
            while True:
                pass
        return ACCEPTED


def _hide_memory() -> None:
    try:
        bytearray(1 << 40)
    except Exception as error:
        raise ValueError("refused") from error


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        ("error", "undocumented error"),
        ("state", "state"),
        ("hidden memory", "memory"),
        ("written memory", "memory"),
        ("unwritten memory", "memory"),
        ("hang", "time"),
    ],
)
def test_each_kind_of_finding_is_found(what: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "memory":  # which a busy machine may write slowly
        monkeypatch.setattr(fuzz, "watched", partial(fuzz.watched, limit_s=30.0))
    end, text = fuzz.feed_one(Faulty(what), 0, 0)
    assert (end, bool(text)) == (kind, True)
    assert fuzz.feed_one(Faulty("nothing"), 0, 0) == (ACCEPTED, "")


class Third(Faulty):
    """A target whose third input is wrong."""

    fed = 0

    def feed(self, drawn: object) -> str:
        self.fed += 1
        assert self.fed < 3
        return ACCEPTED


def test_an_input_of_a_target_that_remembers_comes_behind_those_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    findings = fuzz.run([Third("")], 3, 0, {})["faulty"].findings
    assert [one.index for one in findings] == [2]
    assert fuzz.feed_only(Third(""), 0, 2) == ACCEPTED
    monkeypatch.setattr(fuzz, "REMEMBERING", {"faulty"})
    with pytest.raises(AssertionError):
        fuzz.feed_only(Third(""), 0, 2)


def _line_without_answer(line: trace.TokenLine) -> trace.TraceLine:
    tokens = np.asarray(line.tokens, np.int32)
    return trace.TraceLine(arrival_s=0.0, num_prompt=len(tokens), num_answer=0, tokens=tokens)


@pytest.mark.parametrize(
    ("name", "place", "attribute", "value"),
    [
        ("traces", trace, "_of_tokens", _line_without_answer),
        ("traces", hashed_requests.HashedRequests, "__len__", lambda self: len(self.lines) + 1),
    ],
)
def test_a_fault_that_is_put_in_is_found(
    targets: list[Target], monkeypatch: pytest.MonkeyPatch, name: str, place: Any, attribute: str, value: Any
) -> None:
    monkeypatch.setattr(place, attribute, value)
    tally = fuzz.run(fuzz.chosen(targets, name), 100, 0, {})[name]
    assert tally.findings


def test_damages_differ_from_what_they_damage() -> None:
    content = b'{"arrival_s": 0, "tokens": [1, 2]}'
    damaged = {fuzz_target.damaged_bytes(Random(seed), content) for seed in range(200)}
    assert len(damaged) > 150
