"""`mambaslots doctor`: what is installed, what would run, and a test on a small model."""

import argparse
import importlib.metadata
import json
import platform
from collections.abc import Sequence
from typing import Any

from packaging.requirements import Requirement

from ..version import untested
from .options import add_device, add_json

TEXT = """\
The last line is "works" or "does not work". The self-test takes a few seconds on a CPU, with one thread
unless --threads says otherwise; the first time on a GPU, Triton compiles kernels for a minute or two."""
PACKAGE = "mambaslots"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_device(parser)
    add_json(parser, "all findings")


def run(options: argparse.Namespace) -> int:
    findings: dict[str, Any] = {"platform": f"Python {platform.python_version()}, {platform.platform()}"}
    findings["packages"] = [describe_package(requirement) for requirement in requirements()]
    findings["packages"] += [f"NOT TESTED: {newer}" for newer in untested()]
    print(findings["platform"])
    _print_section("packages", findings["packages"])
    from ..mcore.installation import describe_outlook
    from .doctor_checks import checks, describe_devices, describe_kernels
    from .engine_setup import chosen_device

    options.threads = options.threads or 1  # tensors are small: more threads wait for one another
    device = chosen_device(options)
    findings["devices"] = describe_devices()
    _print_section("GPUs", findings["devices"])
    findings["kernels"] = describe_kernels(device)
    _print_section("what would run", findings["kernels"])
    findings["megatron"] = [describe_outlook()]
    _print_section("what `mambaslots run` would do", findings["megatron"])
    print(f"\nself-test on {device}:", flush=True)
    findings["checks"] = []
    for check in checks(device):
        print(f"  {'ok' if check.passed else 'WRONG':5} {check.name}: {check.finding}", flush=True)
        findings["checks"].append(check._asdict())
    works = all(check["passed"] for check in findings["checks"])
    print("\nworks" if works else "\ndoes not work")
    if options.json:
        options.json.write_text(json.dumps(findings, indent=2) + "\n")
    return 0 if works else 1


def _print_section(title: str, lines: Sequence[str]) -> None:
    print(f"\n{title}:", *lines, sep="\n  ", flush=True)


def requirements() -> list[Requirement]:
    """What the package and its extras need here, each package once; the package where it is not installed."""
    requirement_of_name: dict[str, Requirement] = {}
    try:
        lines = importlib.metadata.requires(PACKAGE) or ()
    except importlib.metadata.PackageNotFoundError:
        return [Requirement(PACKAGE)]
    for line in lines:
        requirement = Requirement(line)
        marker = str(requirement.marker or "")
        extra = marker.partition('extra == "')[2].partition('"')[0]
        if extra == "dev" or requirement.name == PACKAGE:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            requirement.extras = {extra} if extra else set()
            requirement_of_name.setdefault(requirement.name, requirement)
    return list(requirement_of_name.values())


def describe_package(requirement: Requirement) -> str:
    """One line: the version, and what is wrong with it."""
    name = requirement.name
    extra = next(iter(requirement.extras), None)
    command = f"pip install '{PACKAGE}[{extra}]'" if extra else f"pip install {PACKAGE}"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return f"{name}: not installed; `{command}` brings it"
    if not requirement.specifier.contains(version.partition("+")[0], prereleases=True):
        return f"{name} {version}: NOT SUPPORTED; needed: {requirement.specifier}"
    return f"{name} {version}"
