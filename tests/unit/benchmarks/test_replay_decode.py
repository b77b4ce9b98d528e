"""The benchmark of replays runs without a GPU, in Triton's interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")
def test_every_call_runs_in_the_interpreter(tmp_path):
    figures = tmp_path / "figures.json"
    command = [sys.executable, "benchmarks/replay_decode.py", "--device", "cpu", "--json", str(figures)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())
    assert {"scan: all", "2 rows: selective_state_update", "2 rows: ssd_replay, half a chunk"} <= found.keys()
    assert all(call["us"] is None for call in found.values())
