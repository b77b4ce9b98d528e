"""The memory of a load, in processes of their own, is at most the weights and the largest merged tensor."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[3]


@pytest.mark.long
def test_a_load_takes_at_most_the_weights_and_the_largest_merged_tensor(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "benchmarks/load_checkpoint.py", "--megabytes", "300", "--json", str(figures)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    loads = {load["name"]: load for load in json.loads(figures.read_text())}
    assert loads.keys() == {"ours", "ours, float32", "transformers"}
    assert loads["ours, float32"]["weights"] == 2 * loads["ours"]["weights"]
    for name in ("ours", "ours, float32"):
        assert loads[name]["weights"] < loads[name]["peak"] <= loads[name]["floor"]
