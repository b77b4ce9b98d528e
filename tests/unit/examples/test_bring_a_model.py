"""The example model is short, keeps all rules, and answers the same with and without the cache."""

import ast
import sys
from pathlib import Path

import bring_a_model
import pytest

SOURCE = Path(bring_a_model.__file__).read_text()


def test_it_checks_and_serves(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bring_a_model.py", "--dtype", "float32", "--drafts", "2"])
    assert bring_a_model.main() == 0
    printed = capsys.readouterr().out
    assert "MovingAverageLM keeps all rules" in printed
    assert "cached: resumed 0 of 70, 64 of 70, 64 of 90, 0 of 60, 32 of 60 tokens; answers equal" in printed
    assert printed.endswith("answers identical: yes\n")


def test_help_runs_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bring_a_model.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        bring_a_model.main()
    assert "usage" in capsys.readouterr().out


def test_the_model_has_at_most_60_lines_and_needs_only_the_public_api() -> None:
    (model,) = (node for node in ast.parse(SOURCE).body if isinstance(node, ast.ClassDef))
    assert model.end_lineno is not None
    lines = [line.strip() for line in SOURCE.splitlines()[model.lineno - 1 : model.end_lineno]]
    assert sum(bool(line) and not line.startswith("#") for line in lines) <= 60
    assert "import mambaslots as ms" in SOURCE
    assert "mambaslots." not in SOURCE.split('"""', 2)[2]
