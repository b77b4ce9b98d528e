"""The benchmark of align mode's copies runs without a GPU: bytes are counted, and every row is timed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    figures = tmp_path_factory.mktemp("align_copy") / "figures.json"
    command = [sys.executable, "benchmarks/align_copy.py", "--device", "cpu"]
    command += ["--calls", "1", "--repeats", "1", "--json", str(figures)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(figures.read_text())


@pytest.mark.long
def test_copies_are_counted(run):
    _, figures = run
    assert [row["block"] for row in figures["counted"]] == [256] * 4 + [512] * 4 + [1024] * 4
    for row in figures["counted"]:
        # One copy a block on either side: at most what all accepted, read and written, is of the forward.
        once_a_block = 2 * row["accepted"] / row["block"] / 5
        for copied in ("precopy", "postcopy"):
            assert 0.9 * once_a_block < row[copied] / row["forward"] < 1.1 * once_a_block


@pytest.mark.long
def test_every_row_is_timed(run):
    printed, figures = run
    assert "nothing here is about a GPU" in printed
    what = [(row["what"], row["n"]) for row in figures["launches"] if row["bias"] == 0]
    pairs = [(what, n) for n in (0, 1, 4, 32) for what in ("precopy", "postprocess")]
    assert what == [("preprocess", 0), *pairs]
    assert [row["n"] for row in figures["steps"]] == [0, 0, 1, 1, 4, 4, 32, 32]
    assert all(row["queue"] > 0 for row in figures["launches"] + figures["steps"])
