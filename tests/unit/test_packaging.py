"""How the package is installed: a wrong Python, and the steps of the Dockerfile."""

import json
import re
import runpy
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
from mambaslots.cli.main import make_parser

ROOT = Path(__file__).parents[2]
STEPS = [
    step.replace("\\\n", " ").split(maxsplit=1)
    for step in re.findall(r"^[A-Z]+ .*(?:\\\n.*)*", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
]
EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def test_a_wrong_python_is_refused_by_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 11, 7, "final", 0))
    with pytest.raises(SystemExit) as refused:
        runpy.run_path(str(ROOT / "setup.py"), run_name="__main__")
    assert refused.value.code == f"mambaslots needs Python 3.12 or newer; {sys.executable} is Python 3.11."


def test_the_dockerfile_copies_what_there_is_and_all_that_the_build_reads() -> None:
    copied = [path for name, rest in STEPS if name == "COPY" for path in rest.split()[:-1]]
    assert [path for path in copied if not (ROOT / path).exists()] == []
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE", "core"} <= set(copied)


def test_the_dockerfile_installs_extras_that_exist() -> None:
    named = re.findall(r"EXTRAS=(\S+)", (ROOT / "Dockerfile").read_text())
    assert len(named) == 2
    for extras in named:
        assert set(extras.split(",")) <= EXTRAS


def test_the_dockerfile_starts_commands_that_the_command_line_takes() -> None:
    words = dict(step for step in STEPS if step[0] in ("ENTRYPOINT", "CMD"))
    assert json.loads(words["ENTRYPOINT"]) == ["mambaslots"]
    shown = re.findall(r"docker run .* mambaslots (serve .*)", (ROOT / "Dockerfile").read_text())
    for command in (json.loads(words["CMD"]), *map(shlex.split, shown)):
        assert make_parser("serve").parse_args(command).host == "0.0.0.0"
