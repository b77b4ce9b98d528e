"""Files of traces: what is known, what is inferred, and what is refused."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.replay.generate import generate
from mambaslots.replay.read_trace import read_trace
from mambaslots.replay.trace import Trace, TraceRequest


def write(path: Path, lines: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def common(left: np.ndarray, right: np.ndarray) -> int:
    """How many leading tokens are equal."""
    shorter = min(len(left), len(right))
    differ = np.flatnonzero(left[:shorter] != right[:shorter])
    return int(differ[0]) if len(differ) else shorter


def mooncake(at_ms: int, num_prompt: int, num_answer: int, hash_ids: list[int]) -> dict:
    return {
        "timestamp": at_ms, "input_length": num_prompt, "output_length": num_answer, "hash_ids": hash_ids
    }  # fmt: skip


SAMPLE = [
    mooncake(0, 1500, 300, [0, 1, 2]),
    mooncake(500, 1100, 20, [0, 3, 4]),
    mooncake(60_000, 2000, 100, [0, 1, 5, 6]),  # goes on from the first
    mooncake(61_500, 1500, 300, [0, 1, 2]),  # the first again
    mooncake(70_000, 1500, 10, [0, 1, 7]),  # another end of equal length
    mooncake(90_000, 2560, 64, [0, 1, 5, 8, 9]),  # goes on from the third
    mooncake(95_000, 700, 64, [0, 10]),
    mooncake(99_000, 700, 64, [0, 11]),
    *(mooncake(100_000 + 10 * number, 900, 8, [0, 20 + number]) for number in range(8)),
]


@pytest.fixture
def sample(tmp_path: Path) -> Trace:
    return read_trace(write(tmp_path / "sample.jsonl", SAMPLE))


def test_a_mooncake_file_has_its_lengths_and_arrivals(sample: Trace) -> None:
    assert sample.name == "sample.jsonl"
    lengths = [(one.arrival_s, len(one.prompt), len(one.answer)) for one in sample.requests]
    assert lengths == [(x["timestamp"] / 1e3, x["input_length"], x["output_length"]) for x in SAMPLE]
    assert all(one.prompt.dtype == one.answer.dtype == np.int32 for one in sample.requests)
    assert sample.num_prompt_tokens == sum(x["input_length"] for x in SAMPLE)


def test_equal_hashes_give_equal_tokens_and_other_hashes_other_tokens(sample: Trace) -> None:
    first, other, third, again, alike = sample.requests[:5]
    assert np.array_equal(first.prompt, again.prompt)
    assert common(first.prompt, other.prompt) == 512
    assert common(first.prompt, alike.prompt) == 1024
    assert common(first.prompt, third.prompt) == 1500
    assert common(sample.requests[6].prompt, sample.requests[7].prompt) == 512


def test_a_request_that_goes_on_shows_the_answer_and_belongs_to_the_session(sample: Trace) -> None:
    first, other, third, again, _, last, *_ = sample.requests
    for before, after in ((first, third), (third, last)):
        whole = np.concatenate([before.prompt, before.answer])
        assert common(whole, after.prompt) == len(whole)
        assert before.session == after.session
    assert first.session != other.session
    assert common(first.answer, again.answer) == 0
    assert len(set(np.concatenate([again.answer, other.answer]).tolist())) == 2


def test_two_readings_are_equal_and_slices_are_lists(sample: Trace) -> None:
    for left, right in zip(sample.requests, sample.requests[:], strict=True):
        assert np.array_equal(left.prompt, right.prompt)
        assert np.array_equal(left.answer, right.answer)
    with pytest.raises(IndexError):
        sample.requests[len(SAMPLE)]
    assert sample.requests[-1].session == sample.requests[len(SAMPLE) - 1].session


def own_lines(trace: Trace) -> list[dict]:
    return [
        {
            "arrival_s": one.arrival_s, "session": one.session,
            "tokens": one.prompt.tolist(), "answer_tokens": one.answer.tolist(),
        }
        for one in trace.requests
    ]  # fmt: skip


def test_tokens_come_back_as_they_were_written(tmp_path: Path) -> None:
    trace = generate("chat", 1, scale=0.02)
    read = read_trace(write(tmp_path / "own.jsonl", own_lines(trace)[::-1]))
    for before, after in zip(trace.requests, read.requests, strict=True):
        assert before.arrival_s == after.arrival_s
        assert np.array_equal(before.prompt, after.prompt)
        assert np.array_equal(before.answer, after.answer)
    pairs = {(a.session, b.session) for a, b in zip(trace.requests, read.requests, strict=True)}
    assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})


def prefix_hashes(tokens: Sequence[int], size: int) -> list[str]:
    return [repr(tuple(tokens[:stop])) for stop in range(size, len(tokens) + 1, size)]


def hashed_line(at_s: float, prompt: list[int], answer: list[int], size: int) -> dict:
    hashes = prefix_hashes([*prompt, *answer], size)
    whole = len(prompt) // size
    return {
        "arrival_s": at_s, "token_count": len(prompt), "prefix_hashes": hashes[:whole],
        "answer_count": len(answer), "answer_hashes": hashes[whole:], "hash_tokens": size,
    }  # fmt: skip


few_tokens = st.lists(st.integers(0, 1), min_size=1, max_size=7)


@given(texts=st.lists(st.tuples(few_tokens, few_tokens), min_size=1, max_size=8), size=st.integers(1, 4))
def test_made_tokens_are_equal_where_whole_blocks_are(
    tmp_path_factory: pytest.TempPathFactory, texts: list[tuple[list[int], list[int]]], size: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "hashes.jsonl"
    read = read_trace(write(path, [hashed_line(i, *text, size) for i, text in enumerate(texts)]))

    def whole(one: TraceRequest) -> np.ndarray:
        return np.concatenate([one.prompt, one.answer])

    for (prompt, answer), left in zip(texts, read.requests, strict=True):
        assert (len(left.prompt), len(left.answer)) == (len(prompt), len(answer))
        for (other_prompt, other_answer), right in zip(texts, read.requests, strict=True):
            known = common(np.array([*prompt, *answer]), np.array([*other_prompt, *other_answer])) // size
            assert common(whole(left), whole(right)) >= size * known
            if left is not right and known < min(len(whole(left)), len(whole(right))) // size:
                assert common(whole(left), whole(right)) // size == known


OWN = {"arrival_s": 0.0, "session": 1, "tokens": [1, 2], "answer_tokens": [3]}
HASHED = {
    "arrival_s": 0.0, "token_count": 9, "prefix_hashes": ["a", "b"], "answer_count": 4, "hash_tokens": 4
}  # fmt: skip
MOON = mooncake(0, 600, 5, [0, 1])


def without(line: dict, *names: str, **others: object) -> dict:
    return {**{name: value for name, value in line.items() if name not in names}, **others}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (without(OWN, "arrival_s"), ".* missing required field `arrival_s`"),
        (without(OWN, arrival_s=-1), r"Expected `float` >= 0.0 - at `\$.arrival_s`"),
        (without(OWN, arrival_s=float("nan")), "JSON is malformed"),
        (without(OWN, arrival_s="0"), r"Expected `float`, got `str` - at `\$.arrival_s`"),
        (without(OWN, tokens=[]), r"Expected `array` of length >= 1 - at `\$.tokens`"),
        (without(OWN, tokens=[1, -2]), r"Expected `int` >= 0 - at `\$.tokens\[.*\]`"),
        (without(OWN, tokens=[1, True]), r"Expected `int`, got `bool` - at `\$.tokens\[.*\]`"),
        (without(OWN, tokens=[1 << 30]), r"Expected `int` <= 1073741823 - at `\$.tokens"),
        (without(OWN, "answer_tokens"), "accepted: either answer_tokens or answer_count"),
        (without(OWN, answer_count=2), "accepted: either answer_tokens or answer_count"),
        (without(OWN, session=[1]), r"Expected .* - at `\$.session`"),
        (without(OWN, token_count=2), ".* unknown field `token_count`"),
        (without(OWN, text="x"), ".* unknown field `text`"),
        (without(HASHED, "token_count"), ".* missing required field `token_count`"),
        (without(HASHED, "hash_tokens"), "hash_tokens is missing"),
        (without(HASHED, hash_tokens=0), r"Expected `int` >= 1 - at `\$.hash_tokens`"),
        (without(HASHED, prefix_hashes=["a"]), "prefix_hashes has 1 hashes; accepted: 2 or 3"),
        (without(HASHED, prefix_hashes="ab"), r"Expected `array`, got `str` - at `\$.prefix_hashes`"),
        (without(HASHED, prefix_hashes=["a", 1.5]), r"Expected .* - at `\$.prefix_hashes\[.*\]`"),
        (without(HASHED, answer_hashes=[]), "answer_hashes has 0 hashes; accepted: 1"),
        (without(HASHED, answer_count=0), r"Expected `int` >= 1 - at `\$.answer_count`"),
        (without(HASHED, answer_tokens=[1]), ".* unknown field `answer_tokens`"),
        (without(MOON, "output_length"), ".* missing required field `output_length`"),
        (without(MOON, hash_ids=[0]), "hash_ids has 1 hashes; accepted: 2"),
        (without(MOON, timestamp=None), r"Expected `float`, got `null` - at `\$.timestamp`"),
        (without(MOON, input_length=0), r"Expected `int` >= 1 - at `\$.input_length`"),
        ([1], "Expected `object`, got"),
        (5, "Expected `object`, got"),
    ],
)
def test_a_bad_line_is_named_with_its_file_and_field(tmp_path: Path, line: object, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    write(path, [line])
    with pytest.raises(ValueError, match=f"bad.jsonl, line 1: {message}"):
        read_trace(path)


def test_a_cut_line_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "cut.jsonl", [OWN, OWN])
    path.write_text(path.read_text()[:-9])
    with pytest.raises(ValueError, match=r"cut.jsonl, line 2: Input data was truncated"):
        read_trace(path)


def test_lines_of_two_kinds_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "mixed.jsonl", [OWN, HASHED])
    with pytest.raises(
        ValueError, match=r"line 2: hash_tokens: the line has hashes of 4 tokens; accepted: tok"
    ):
        read_trace(path)
    write(path, [HASHED, without(HASHED, hash_tokens=8, prefix_hashes=["a"])])
    with pytest.raises(ValueError, match=r"line 2: hash_tokens: the line has hashes of 8 tokens"):
        read_trace(path)


def test_hash_tokens_need_to_stand_in_the_first_line_alone(tmp_path: Path) -> None:
    later = without(HASHED, "hash_tokens", arrival_s=1.0)
    first, second = read_trace(write(tmp_path / "own.jsonl", [HASHED, later])).requests
    assert first.prompt[:8].tolist() == second.prompt[:8].tolist() == [0] * 4 + [1] * 4


def test_a_file_without_lines_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "empty.jsonl", [])
    with pytest.raises(ValueError, match=r"empty.jsonl has no line"):
        read_trace(path)
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "none.jsonl")


def test_partial_hashes_that_contradict_themselves_end(tmp_path: Path) -> None:
    """Two prompts of different lengths cannot have one hash of all tokens up to their ends."""
    lines = [mooncake(0, 513, 1, [1, 9]), mooncake(5, 1500, 1, [1, 2, 9])]
    requests = read_trace(write(tmp_path / "trace.jsonl", lines)).requests
    assert [len(request.prompt) for request in requests] == [513, 1500]
    assert common(requests[0].prompt, requests[1].prompt) >= 512


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (mooncake(0, 2**31 - 1, 1, []), "input_length"),
        (mooncake(0, 1, 2**31 - 1, [1]), "output_length"),
        ({"arrival_s": 0, "tokens": [1], "answer_count": 2**22 + 1}, "answer_count"),
        (
            {
                "arrival_s": 0,
                "token_count": 2**30,
                "prefix_hashes": [],
                "hash_tokens": 2**31 - 1,
                "answer_count": 1,
            },
            "token_count",
        ),
    ],
)
def test_more_tokens_than_a_request_can_have_are_refused(tmp_path: Path, line: dict, name: str) -> None:
    with pytest.raises(ValueError, match=rf"line 1: Expected `int` <= 4194304 - at `\$.{name}`"):
        read_trace(write(tmp_path / "trace.jsonl", [line]))


def test_answers_of_unknown_tokens_take_no_memory(tmp_path: Path) -> None:
    lines = [{"arrival_s": at, "tokens": [at], "answer_count": 2**22} for at in range(200)]
    requests = read_trace(write(tmp_path / "trace.jsonl", lines)).requests
    assert {len(request.answer) for request in requests} == {2**22}
    assert len({int(request.answer[0]) for request in requests}) == 200
    assert all(request.answer.strides == (0,) for request in requests)
