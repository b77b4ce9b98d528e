"""The example of speculative decoding, small, as a user starts it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.long
def test_a_small_run(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    command = [sys.executable, "examples/speculative_decoding.py", "--tokens", "60", "--json", str(path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.splitlines()[-1] == "outputs identical: yes"
    figures = json.loads(path.read_text())
    assert figures["identical"] is True
    assert figures["repetitive"]["acceptance"] > figures["free"]["acceptance"]
    for text in ("repetitive", "free"):
        assert figures[text]["steps"]["drafted"] < figures[text]["steps"]["cached"]
        assert figures[text]["num_resumed_tokens"] > 0
        assert figures[text]["log_prob_difference"] < 1e-9
