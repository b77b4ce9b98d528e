"""The example of two replicas, as a user starts it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.long
def test_it_hands_over_and_survives() -> None:
    command = [sys.executable, "examples/torchrun_serving.py"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stdout + run.stderr
    lines = run.stdout.splitlines()
    assert lines[-1] == "outputs identical: yes"
    assert any(re.match(r"hand-over A to B: 3 prefixes, \d+ KV blocks, \d+ states", line) for line in lines)
    # A's conversations on B: what A knew of them is there, but for the block that was not full.
    resumed, prompt = (
        [int(number) for line in lines if (found := re.search(pattern, line)) for number in found.groups()]
        for pattern in (
            r"^turn 3 .*\[0, 1, 2\].*resumed +(\d+)",
            r"^turn 3 .*\[0, 1, 2\].*prompt tokens +(\d+)",
        )
    )
    assert resumed[0] > 0.7 * prompt[0]


@pytest.mark.long
@pytest.mark.parametrize("script", ["torchrun_serving.py", "torchrun_replica.py"])
def test_help_prints_help_and_runs_nothing(script: str) -> None:
    command = [sys.executable, f"examples/{script}", "--help"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(f"usage: {script} [-h]")
    assert "replica A  users" not in run.stdout
