"""The benchmark of attention in segments: what it says without a GPU, and its cases."""

from pathlib import Path

import pytest
import torch
from oracle.fresh_process import run_script

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure for a minute")
def test_without_a_gpu_it_says_so():
    done = run_script("benchmarks/attention_segments.py")
    assert done.returncode == 0, done.stderr
    assert "nothing measured: this needs a GPU" in done.stdout


def test_cases_are_named_by_what_they_compute(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from attention_segments import CASES

    names = [str(case) for case in CASES]
    assert len(set(names)) == len(names)
    assert {"decode, 8 x 32767", "decode of 4 tokens, 1 x 32764", "prefill of 4096, 1 x 28672"} <= set(names)
