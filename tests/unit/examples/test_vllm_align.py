"""The example of vLLM's align mode: right as it stands, and wrong where a call of the scheme is left out."""

import sys
from pathlib import Path

import pytest
import vllm_align
from oracle.fresh_process import run_script

ROOT = Path(__file__).parents[3]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["vllm_align.py", *arguments])
    return vllm_align.main()


def test_as_a_user_starts_it() -> None:
    done = run_script("examples/vllm_align.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "all states right: yes"


def test_help_runs_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(vllm_align, "Host", None)
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, "--help")
    assert stopped.value.code == 0
    assert "--drafts" in capsys.readouterr().out


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("drafts", "block"), [(1, 2), (3, 4), (4, 16)])
def test_other_sizes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], seed: int, drafts: int, block: int
) -> None:
    sizes = ("--seed", str(seed), "--drafts", str(drafts), "--block", str(block), "--requests", "2")
    assert run(monkeypatch, *sizes) == 0
    assert "0 wrong" in capsys.readouterr().out


@pytest.mark.parametrize("left_out", ["precopy_align", "postprocess_align"])
def test_the_comparison_notices_what_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], left_out: str
) -> None:
    from mambaslots.vllm import align_reference

    monkeypatch.setattr(align_reference, left_out, lambda *_: None)
    assert run(monkeypatch) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "all states right: no"
