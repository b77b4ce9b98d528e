"""The benchmark of decode by replay: what it says without a GPU, and what its table shows."""

from pathlib import Path

import pytest
import torch
from oracle.fresh_process import run_script

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure for minutes")
def test_without_a_gpu_it_says_so():
    done = run_script("benchmarks/replay_delta.py")
    assert done.returncode == 0, done.stderr
    assert "nothing measured: this needs a GPU" in done.stdout


def test_the_table_shows_both_sides_and_their_ratio(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import replay_delta

    rows = [replay_delta.Figures("32 rows", 30.0, 20.0, 1e-3), replay_delta.Figures("kept", 5.0)]
    assert replay_delta.table(rows)[2:] == [
        "| 32 rows | 30.0 | 20.0 | 1.50 | 1.0e-03 |",
        "| kept | 5.0 | - | - | - |",
    ]
