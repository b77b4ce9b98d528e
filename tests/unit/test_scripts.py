"""Every script of `examples/`, `benchmarks/` and `tools/` says with `--help` what it is."""

import ast
from pathlib import Path

import pytest
from oracle.ask_for_help import helps

ROOT = Path(__file__).parents[2]
SCRIPTS = [
    *(path for folder in ("examples", "benchmarks", "tools") for path in (ROOT / folder).glob("*.py")),
    *(ROOT / "benchmarks/replay" / name for name in ("rows.py", "routed.py")),
]
FILES = [path for path in SCRIPTS if "parse_args()" in path.read_text()]


def test_help_is_printed_and_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    said = helps(FILES, tmp_path / "said")
    assert said.keys() == set(map(str, FILES))
    for path, text in said.items():
        source = Path(path).read_text()
        headline = (ast.get_docstring(ast.parse(source)) or "").splitlines()[0]
        assert headline in text, f"{path} --help does not say: {headline}"
        assert text.startswith("usage:"), path
