"""`mambaslots doctor`: what is installed, what would run, and whether it works."""

import argparse
import importlib.metadata
import json
import platform
from collections.abc import Iterator
from typing import Any

import torch
from packaging.requirements import Requirement

from ..inference.contexts.pool_sizes import GIGABYTE
from .options import add_device, add_json
from .self_test import Check, self_test, small_engine, small_model, tried_dtype
from .setup import chosen_device

TEXT = """Say what is installed and which kernels would run, and test them on a small model.

The last line is "works" or "does not work". The self-test takes some seconds on a CPU; the first time on a
GPU, Triton compiles kernels for a minute or two."""
PACKAGE = "mambaslots"
TUNED_FOR = ("H100", "H200")
UNUSED = ("dev",)  # extras that serve nothing


def add_options(parser: argparse.ArgumentParser) -> None:
    add_device(parser)
    parser.add_argument("--no-self-test", action="store_true", help="only say what is there")
    add_json(parser, "all findings")


def run(options: argparse.Namespace) -> int:
    device = chosen_device(options)
    findings: dict[str, Any] = {"platform": f"Python {platform.python_version()}, {platform.platform()}"}
    print(findings["platform"])
    findings["packages"] = [describe_package(requirement) for requirement in requirements()]
    findings["devices"] = describe_devices()
    findings["kernels"] = describe_kernels(device)
    for title, lines in (("packages", "packages"), ("GPUs", "devices"), ("what would run", "kernels")):
        print(f"\n{title}:")
        for line in findings[lines]:
            print(f"  {line}")
    works = True
    if not options.no_self_test:
        print(f"\nself-test on {device}:", flush=True)
        findings["checks"] = []
        for check in checks(device):
            print(f"  {'ok' if check.passed else 'WRONG':5} {check.name}: {check.finding}", flush=True)
            findings["checks"].append(vars(check))
        works = all(check["passed"] for check in findings["checks"])
        print("\nworks" if works else "\ndoes not work")
    if options.json:
        options.json.write_text(json.dumps(findings, indent=2) + "\n")
    return 0 if works else 1


def describe_kernels(device: torch.device) -> list[str]:
    """What would run, a line each; one line with the error where not even a small model can be built."""
    try:
        engine = small_engine(small_model(device, tried_dtype(device)), caching=True)
    except Exception as error:  # whatever is wrong with this machine
        return [f"nothing: {_one_line(error)}"]
    return engine.describe().splitlines()


def checks(device: torch.device) -> Iterator[Check]:
    """The self-test; an error that ends it is a check that failed."""
    try:
        yield from self_test(device)
    except Exception as error:
        yield Check("the self-test runs to its end", False, _one_line(error))


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"


def requirements() -> list[Requirement]:
    """What the package and its extras need on this platform, each package once."""
    found: dict[str, Requirement] = {}
    for line in importlib.metadata.requires(PACKAGE) or ():
        requirement = Requirement(line)
        marker = str(requirement.marker or "")
        extra = marker.partition('extra == "')[2].partition('"')[0]
        if extra in UNUSED or requirement.name == PACKAGE:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            requirement.extras = {extra} if extra else set()
            found.setdefault(requirement.name, requirement)
    return list(found.values())


def describe_package(requirement: Requirement) -> str:
    """One line: the version, and what is wrong with it."""
    name, accepted = requirement.name, str(requirement.specifier)
    extra = next(iter(requirement.extras), None)
    how = f"pip install '{PACKAGE}[{extra}]'" if extra else f"pip install {PACKAGE}"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return f"{name}: not installed; `{how}` brings it"
    if not requirement.specifier.contains(version.partition("+")[0], prereleases=True):
        return f"{name} {version}: NOT TESTED; tested: {accepted}"
    return f"{name} {version}"


def describe_devices() -> list[str]:
    """One line for each GPU that torch sees."""
    if not torch.cuda.is_available():
        return [f"none that torch {torch.__version__} sees"]
    lines = []
    for index in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_name(index)
        free, total = (size / GIGABYTE for size in torch.cuda.mem_get_info(index))
        major, minor = torch.cuda.get_device_capability(index)
        line = f"{index}: {name}, compute capability {major}.{minor}, {free:.1f} of {total:.1f} GiB free"
        if not any(tuned in name for tuned in TUNED_FOR):
            line += f"; kernels are tuned for {' and '.join(TUNED_FOR)}, and were not tested here"
        lines.append(line)
    return lines
