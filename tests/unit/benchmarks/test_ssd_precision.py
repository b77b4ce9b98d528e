"""The benchmark of precisions runs without a GPU, and what it holds its errors against is the recurrence."""

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
@pytest.mark.parametrize(("precision", "most"), [("ieee", 1e-5), ("float16", 2**-10)])
def test_a_precision_in_the_interpreter(precision, most):
    command = [sys.executable, "benchmarks/ssd_precision.py", "--device", "cpu", "--only", precision]
    environment = os.environ | {"TRITON_INTERPRET": "1", "MAMBA_DETERMINISTIC": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert set(figures["us"]) >= {"chunk_scan", "all"}
    assert all(0 < error < most for error in figures["errors"].values())
