"""The examples of docs/distributed.md that need torchrun, as a reader starts them."""

import re
import subprocess
import sys
from pathlib import Path

PAGE = (Path(__file__).parents[3] / "docs/distributed.md").read_text()
RANKS = 2


def test_the_example_for_several_ranks_runs_under_torchrun(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```python torchrun\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    checks = "assert len(result.tokens) == 16\nassert result.finish_reason == 'length'\n"
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
