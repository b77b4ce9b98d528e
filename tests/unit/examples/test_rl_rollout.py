"""The example of rollouts and scores, small, as a user starts it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


def figures_of(path: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """The figures of a run, and its last line."""
    command = [sys.executable, "examples/rl_rollout.py", "--iterations", "2", "--json", str(path), *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(path.read_text()), run.stdout.splitlines()[-1]


@pytest.mark.long
def test_a_small_run(tmp_path: Path) -> None:
    figures, last_line = figures_of(tmp_path / "figures.json", "--tokens", "6")
    assert "equal bits on a GPU only" in last_line
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


@pytest.mark.gpu
def test_on_a_gpu_rollout_and_score_have_equal_bits(tmp_path: Path) -> None:
    figures, _ = figures_of(tmp_path / "figures.json", "--tokens", "40", "--device", "cuda")
    assert figures["num_positions"] == 2 * 2 * 16 * 40
    assert figures["largest_difference"] == 0.0
    assert [iteration["num_unequal"] for iteration in figures["iterations"]] == [0, 0]
