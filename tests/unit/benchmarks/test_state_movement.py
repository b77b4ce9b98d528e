"""The benchmark of moving states runs without a GPU, and judges one only where there is one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    figures = tmp_path_factory.mktemp("state_movement") / "figures.json"
    command = [sys.executable, "benchmarks/state_movement.py", "--device", "cpu"]
    command += ["--calls", "1", "--repeats", "1", "--json", str(figures)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(figures.read_text())


@pytest.mark.long
def test_every_row_is_measured(run):
    _, figures = run
    what = [(row["what"], row["n"]) for row in figures["rows"]]
    each = [(what, n) for what in ("commit", "restore") for n in (1, 4, 16)]
    assert what == [*each, ("zero", 4), ("idle", 32), ("capture", 256)] * 2
    assert all(row["seconds"]["ours"] > 0 for row in figures["rows"])
    assert all(row["ratio"] > 0 for row in figures["rows"] if row["what"] in ("commit", "restore"))


@pytest.mark.long
def test_on_the_cpu_nothing_is_judged(run):
    printed, figures = run
    assert figures["requirements"] == []
    assert "nothing here is about a GPU" in printed
    assert "nothing to judge here" in printed
