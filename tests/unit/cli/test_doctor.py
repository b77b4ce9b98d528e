"""What the doctor says, and that its self-test finds what is wrong."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mambaslots.cli import doctor, doctor_checks
from mambaslots.cli.main import main
from mambaslots.inference.contexts.cache.prefix_cache import PrefixCache
from mambaslots.inference.contexts.step_inputs import StepInputs
from mambaslots.models import HybridLM
from mambaslots.version import NEWEST_TESTED, untested
from packaging.requirements import Requirement

TORCH = importlib.metadata.version("torch")


@pytest.fixture
def _model_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "check_model", lambda model: "not checked")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_doctor_says_what_is_there_and_works(
    device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "findings.json"
    assert main(["doctor", "--device", device, "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    findings = json.loads(path.read_text())
    assert printed.splitlines()[-1] == "works"
    assert f"torch {TORCH}" in findings["packages"]
    (outlook,) = findings["megatron"]
    assert f"\nwhat `mambaslots run` would do:\n  {outlook}\n" in printed
    assert outlook.startswith(("install on megatron-core ", "refuse megatron-core ", "nothing: "))
    assert any(line.startswith("attention") for line in findings["kernels"])
    assert all(check["passed"] for check in findings["checks"])


class Off(HybridLM):
    """Decodes are off by a little."""

    def __call__(self, inputs: StepInputs) -> torch.Tensor:
        return super().__call__(inputs) * (1 + 1e-6 * (inputs.num_decodes > 0))


def test_a_model_that_computes_something_else_does_not_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor_checks, "HybridLM", Off)
    assert main(["doctor", "--device", "cpu"]) == 1
    printed = capsys.readouterr().out
    assert "WRONG the self-test runs to its end: ModelError: DECODE DIFFERS" in printed
    assert printed.splitlines()[-1] == "does not work"


def test_newer_versions_than_the_tested_ones_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NEWEST_TESTED:
        monkeypatch.setitem(NEWEST_TESTED, name, "9999.0")
    assert untested() == []
    minor = ".".join(TORCH.split(".")[:2])
    monkeypatch.setitem(NEWEST_TESTED, "torch", minor)
    assert untested() == []  # a patch of a tested minor version is
    monkeypatch.setitem(NEWEST_TESTED, "torch", "2.10")
    monkeypatch.setitem(NEWEST_TESTED, "no-such-package", "1.0")
    assert untested() == [f"torch {TORCH} (newest tested: 2.10)"]


@pytest.mark.usefixtures("_model_unchecked")
def test_a_cache_that_misses_does_not_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(PrefixCache, "commit", lambda cache, step: (cache.slots.release_all(), {})[1])
    assert main(["doctor", "--device", "cpu"]) == 1
    assert "WRONG a repeated prompt resumes: 0 of 100 tokens" in capsys.readouterr().out


def test_an_error_is_a_finding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*arguments: object, **more: object) -> None:
        raise RuntimeError("no kernel image\nis available")

    monkeypatch.setattr(doctor_checks, "small_model", fail)
    assert main(["doctor", "--device", "cpu"]) == 1
    printed = capsys.readouterr().out
    assert "  nothing: RuntimeError: no kernel image is available\n" in printed
    assert "WRONG the self-test runs to its end: RuntimeError: no kernel image is available" in printed
    assert printed.splitlines()[-1] == "does not work"


@pytest.mark.parametrize(
    ("requirement", "said"),
    [
        (f"torch>={TORCH}", f"torch {TORCH}"),
        ("torch<2", f"torch {TORCH}: NOT SUPPORTED; needed: <2"),
        ("no-such-package>1", "no-such-package: not installed; `pip install mambaslots` brings it"),
    ],
)
def test_packages_are_named_with_what_is_wrong(requirement: str, said: str) -> None:
    assert doctor.describe_package(Requirement(requirement)) == said


def test_an_extra_that_is_missing_names_its_installation() -> None:
    missing = Requirement("no-such-package")
    missing.extras = {"hf"}
    assert "`pip install 'mambaslots[hf]'` brings it" in doctor.describe_package(missing)
    assert {"torch", "fastapi"} <= {requirement.name for requirement in doctor.requirements()}


def test_a_source_tree_without_an_installation_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "PACKAGE", "no-such-package")
    monkeypatch.setattr(doctor_checks, "checks", lambda device: iter(()))
    assert main(["doctor", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    said = "no-such-package: not installed; `pip install no-such-package` brings it"
    assert f"\npackages:\n  {said}\n" in printed


def test_versions_are_printed_before_torch_is_imported() -> None:
    script = (
        "import os, sys\n"
        "class Ends:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch': os._exit(3)\n"
        "sys.meta_path.insert(0, Ends())\n"
        "from mambaslots.cli.main import main\n"
        "main(['doctor'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 3
    assert done.stdout.startswith("Python 3.")
    assert f"\n  torch {TORCH}\n" in done.stdout
