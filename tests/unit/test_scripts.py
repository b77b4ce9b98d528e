"""Every script of `examples/`, `benchmarks/` and `tools/` says with `--help` what it is."""

import ast
import json
import os
from pathlib import Path

from oracle.fresh_process import run_script

ROOT = Path(__file__).parents[2]
RUNNER = ROOT / "tests/oracle/ask_for_help.py"
SCRIPTS = [
    *(path for folder in ("examples", "benchmarks", "tools") for path in (ROOT / folder).glob("*.py")),
    *(ROOT / "benchmarks/replay" / name for name in ("rows.py", "routed.py")),
]
FILES = [path for path in SCRIPTS if "parse_args()" in path.read_text()]


def test_help_is_printed_and_nothing_runs() -> None:
    done = run_script(str(RUNNER), *map(str, FILES), env=os.environ | {"COLUMNS": "200"})
    assert done.returncode == 0, done.stderr
    for path, text in json.loads(done.stdout).items():
        source = Path(path).read_text()
        headline = (ast.get_docstring(ast.parse(source)) or "").splitlines()[0]
        assert headline in text, f"{path} --help does not say: {headline}"
        assert text.startswith("usage:"), path
