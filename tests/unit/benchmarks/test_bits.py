"""The benchmark of bits: it runs on a CPU, counts every difference, and always draws the same requests."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


@pytest.mark.long
def test_a_run_on_a_cpu_finds_no_difference_under_any_condition(tmp_path):
    path = tmp_path / "figures.json"
    command = [
        sys.executable, "benchmarks/bits.py", "--shape", "tiny", "--device", "cpu", "--models", "HybridLM-8B",
        "--only", "cache", "conversations", "cuts", "scores", "--json", str(path),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(path.read_text())["models"]["HybridLM-8B"]
    rows = {row["condition"]: row for row in figures["comparisons"]}
    assert not any(row["differing_requests"] for row in rows.values())
    assert 0 < max(row["largest"] for row in rows.values()) < 1e-9
    assert rows["cache, all seen before"]["evidence"]["resumed requests"] > 3
    assert rows["conversations of 3 turns, cached"]["evidence"]["resumed inside an answer"] > 0
    assert rows["prompts in steps of 64"]["evidence"] == {"points cut at": 7, "off the grid": 0}
    assert rows["scores of answers"]["evidence"]["resumed requests"] > 3
    assert figures["total"]["requests"] == sum(row["requests"] for row in rows.values()) > 80
    assert figures["total"]["positions"] == sum(row["positions"] for row in rows.values()) > 4000
    assert figures["grid"] == {"points": 15, "cut_at": 7}


def test_every_kind_of_difference_is_counted():
    from bits_answers import Answer, Differences, total

    expected = Answer([5, 6, 7], [-1.0, -2.0, -3.0], [-0.5])
    same, other = Differences("same"), Differences("other")
    same.add(expected, expected)
    same.add(expected, Answer([5, 6], [-1.0, -2.0]))  # a shorter answer, and no log-probs of the prompt
    assert same.equal
    assert (same.requests, same.positions, same.differing_bits) == (2, 6, 0)
    other.add(expected, Answer([5, 6, 8], [-1.0, -2.0, -3.0], [-0.5]))
    other.add(expected, Answer([5, 6, 7], [-1.0, -(2.0 + 2**-22), -3.0]))  # the last of 24 bits
    other.add(expected, Answer([5, 6, 7], [-1.0, -2.0, float("nan")]))
    assert (other.differing_requests, other.differing_tokens, other.differing_log_probs) == (3, 1, 2)
    assert other.differing_bits >= 2
    assert total([same, other]).positions == 6 + 4 + 3 + 3
    with pytest.raises(ValueError, match="got has 4 log-probs; accepted: 3"):
        other.add(expected, Answer([5, 6, 7, 8], [-1.0, -2.0, -3.0, -4.0]))


def test_log_probs_within_the_tolerance_do_not_differ():
    from bits_answers import Answer, Differences

    row = Differences("float64")
    row.add(Answer([1], [-1.0]), Answer([1], [-1.0 - 1e-12]), tolerance=1e-9)
    assert row.equal
    assert 0 < row.largest < 1e-11
    row.add(Answer([1], [-1.0]), Answer([1], [-1.0 - 1e-8]), tolerance=1e-9)
    assert row.differing_log_probs == 1


def test_requests_are_the_same_at_every_run_and_answers_cross_grid_points():
    from bits_traffic import FULL, Traffic

    requests, again = (Traffic(1000, seed=1).requests(FULL, 128) for _ in range(2))
    assert requests == again
    assert len(requests) == sum(batch.count for batch in FULL.batches)
    crossing = [
        request
        for request in requests
        if len(request.prompt) // 128
        < (len(request.prompt) + request.sampling.num_tokens_to_generate - 1) // 128
    ]
    assert len(crossing) > len(requests) // 3
    lengths = [len(request.prompt) + request.sampling.num_tokens_to_generate for request in requests]
    assert max(lengths) <= FULL.max_length
    assert len({request.prompt[0] for request in requests}) < len(requests)  # some share their first tokens


def test_answers_keep_their_bits_in_a_file(tmp_path):
    from bits_answers import Answer, read_answers, write_answers

    answers = [Answer([1, 2], [-0.1, -1 / 3], [-2 / 3])]
    write_answers(tmp_path / "answers.json", answers)
    assert read_answers(tmp_path / "answers.json") == answers
