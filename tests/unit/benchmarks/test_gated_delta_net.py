"""The benchmark of the gated delta net: what it says without a GPU, and what its table shows."""

from pathlib import Path

import pytest
import torch
from oracle.fresh_process import run_script

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure for minutes")
def test_without_a_gpu_it_says_so():
    done = run_script("benchmarks/gated_delta_net.py")
    assert done.returncode == 0, done.stderr
    assert "nothing measured: this needs a GPU" in done.stdout


def test_the_table_shows_both_sides_and_their_ratio(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import gated_delta_net

    row = gated_delta_net.Figures("prefill 1 x 4096", 130.0, 100.0, 90.0, 100.0, 1e-3, 95.0, {"norm": 5.0})
    lines = gated_delta_net.table([row])
    assert "| prefill 1 x 4096 | 130.0 | 100.0 | 1.30 | 90.0 | 100.0 | 0.90 | 95.0 | 1.0e-03 |" in lines
    assert "| norm | 5.0 |" in lines
