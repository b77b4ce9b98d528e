"""What the README shows runs, and says what it says."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text()
PYTHON: list[str] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_in_process_example_runs_and_resumes_what_its_comment_says() -> None:
    example, _ = PYTHON
    claimed = re.search(r"again\.resumed_tokens +# (\d+) of (\d+)", example)
    assert claimed is not None
    names: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), names)
    again = names["again"]
    assert (again.resumed_tokens, again.prompt_tokens) == tuple(map(int, claimed.groups()))  # type: ignore[attr-defined]
    assert again.tokens == names["first"].tokens  # type: ignore[attr-defined]


def test_the_drop_in_goes_in_as_it_says() -> None:
    pytest.importorskip("megatron.core", exc_type=ImportError)
    _, example = PYTHON
    names: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), names)
    names["mambaslots"].mcore.uninstall()  # type: ignore[attr-defined]


def test_every_file_it_names_exists() -> None:
    root = Path(__file__).parents[2]
    for path in re.findall(r"`((?:core|tests|examples|benchmarks)/[^`*]*)`", README):
        assert (root / path).exists(), path
    for script in re.findall(r"python ((?:examples|benchmarks)/\S+\.py)", README):
        assert (root / script).is_file(), script
