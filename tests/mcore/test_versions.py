"""A few engine cases on the other versions of megatron-core, which the Makefile puts beside this one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.parametrize(
    ("version", "case"),
    [("0.19.0", "1_mod"), ("0.19.0", "turn_on")],
)
def test_an_engine_case_on(version: str, case: str) -> None:
    folder = ROOT / ".venv" / f"megatron-{version}"
    if not (folder / "megatron").is_dir():
        pytest.skip(f"megatron-core {version} could not be installed")
    inside = (
        "import sys, pytest, megatron.core; print(megatron.core.__version__, flush=True); "
        "sys.exit(pytest.main(sys.argv[1:]))"
    )
    chosen = f"answers_are and {case}"
    options = ["-p", "no:cacheprovider"]
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", inside, *options, "-k", chosen, "tests/mcore/test_engine.py"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith(version), done.stdout + done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
