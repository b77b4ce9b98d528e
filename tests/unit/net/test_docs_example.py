"""The examples of docs/distributed.md that need torchrun, as a reader starts them.

On ranks that are there already, tests/net/test_docs_example.py runs them.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[3] / "docs/distributed.md").read_text()
RANKS = 2


CHECKS = (
    "assert 'results' not in globals() or [len(result.tokens) for result in results] == [16] * 3\n",
    "assert len(result.tokens) == 16\nassert result.finish_reason == 'length'\n",
)


@pytest.mark.long
@pytest.mark.parametrize("number", [0, 1])
def test_the_examples_for_several_ranks_run_under_torchrun(tmp_path: Path, number: int) -> None:
    examples = re.findall(r"^```python torchrun\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert len(examples) == len(CHECKS)
    example, checks = examples[number], CHECKS[number]
    (tmp_path / "serve.py").write_text(f"{example}\n{checks}")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run = subprocess.run(
        [*torchrun, "--nproc-per-node", str(RANKS), "serve.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert len(list((tmp_path / "prefixes").glob("*.safetensors"))) == RANKS
