"""The example of prefill apart from decode, as a user starts it, and its benchmark."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from oracle.fresh_process import run_script

ROOT = Path(__file__).parents[3]


@pytest.mark.long
def test_the_decode_engine_resumes_what_the_worker_has_computed() -> None:
    command = [sys.executable, "examples/disaggregated_prefill.py"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stdout + run.stderr
    *requests, last = run.stdout.splitlines()
    assert last == "outputs identical: yes"
    found = [re.match(r"request \d  prompt tokens +(\d+)  resumed +(\d+)  (\w+)", line) for line in requests]
    tokens = [(int(line[1]), int(line[2]), line[3]) for line in found if line]
    assert tokens == [
        (700, 672, "prefill"), (520, 512, "prefill"), (333, 320, "prefill"), (600, 576, "prefill"),
        (40, 0, "computed"),
    ]  # fmt: skip


@pytest.mark.long
def test_the_benchmark_measures_all_ways(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    run = run_script(
        "benchmarks/disaggregated_prefill.py", "--shape", "tiny", "--device", "cpu", "--layers", "8",
        "--streams", "2", "--json", str(figures),
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    rows = json.loads(figures.read_text())["rows"]
    assert [(row["prompt"], row["way"]) for row in rows] == [
        (prompt, way) for prompt in (128, 512) for way in ("1 + 1", "2 mixed", "1 mixed")
    ]
    assert all(row["hand-over median"] > 0 for row in rows if row["way"] == "1 + 1")
    assert all(row["first token median"] > 0 and row["gap max"] > 0 for row in rows)
    assert "prefill apart from decode pays" in run.stdout
