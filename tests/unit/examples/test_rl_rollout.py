"""The example of rollouts and scores, small, as a user starts it."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_a_small_run(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    command = [sys.executable, "examples/rl_rollout.py", "--iterations", "2", "--tokens", "6"]
    command += ["--json", str(path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "equal bits on a GPU only" in run.stdout.splitlines()[-1]
    figures = json.loads(path.read_text())
    assert figures["num_positions"] == 2 * 2 * 16 * 6
    assert figures["largest_difference"] < 1e-9
    first, second = figures["iterations"]
    # Each prompt is computed once: the others of its group resume at its last boundary.
    assert first["num_prompt_tokens"] == 16 * (221 + 246)
    assert first["num_computed_tokens"] == 221 + 246 + 15 * (221 - 192 + 246 - 224)
    assert first["num_score_resumed_tokens"] == 16 * (192 + 224)
    assert second["num_computed_tokens"] == first["num_computed_tokens"]
    for iteration in (first, second):
        assert iteration["trainer_difference"] < 1e-9
    assert first["reward"] != second["reward"]
