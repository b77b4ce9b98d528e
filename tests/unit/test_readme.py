"""What the README shows runs, and says what it says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text()
PYTHON: list[str] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_in_process_example_runs_and_resumes_what_its_comment_says() -> None:
    example, _, _ = PYTHON
    claimed = re.search(r"again\.num_resumed_tokens +# (\d+) of (\d+)", example)
    assert claimed is not None
    names: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), names)
    again = names["again"]
    assert (again.num_resumed_tokens, again.num_prompt_tokens) == tuple(map(int, claimed.groups()))  # type: ignore[attr-defined]
    assert again.tokens == names["first"].tokens  # type: ignore[attr-defined]


def test_the_drop_in_goes_in_as_it_says() -> None:
    pytest.importorskip("megatron.core", exc_type=ImportError)
    _, example, _ = PYTHON
    names: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), names)
    names["mambaslots"].mcore.uninstall()  # type: ignore[attr-defined]


def test_the_example_for_several_ranks_runs_under_torchrun(tmp_path: Path) -> None:
    _, _, example = PYTHON
    (tmp_path / "serve.py").write_text(
        f"{example}\nassert len(result.tokens) == 16\ndist.destroy_process_group()"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run(
        [*torchrun, "serve.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert run.returncode == 0, run.stderr
    assert len(list((tmp_path / "prefixes").glob("*.safetensors"))) == 2


def test_every_file_it_names_exists() -> None:
    root = Path(__file__).parents[2]
    for path in re.findall(r"`((?:core|tests|examples|benchmarks)/[^`*]*)`", README):
        assert (root / path).exists(), path
    for script in re.findall(r"python ((?:examples|benchmarks)/\S+\.py)", README):
        assert (root / script).is_file(), script


def test_no_block_is_still_to_be_filled_in() -> None:
    blocks = re.findall(r"```\w*\n(.*?)```", README, re.DOTALL)
    assert not [block for block in blocks if re.fullmatch(r"[A-Z\s]*", block)]
