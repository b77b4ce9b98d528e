"""`mambaslots doctor`: what is installed, what would run, and a test on a small model."""

import argparse
import importlib.metadata
import json
import platform
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from packaging.requirements import Requirement

from ..config import InferenceConfig
from ..inference.contexts.pool_sizes import GIGABYTE
from ..inference.engines.dynamic_engine import DynamicInferenceEngine
from ..mcore.install import describe_outlook
from ..models import HybridConfig, HybridLM
from ..request import SamplingParams
from ..testing import check_model
from ..version import untested
from .options import add_device, add_json
from .setup import chosen_device

TEXT = """\
The last line is "works" or "does not work". The self-test takes a few seconds on a CPU, with one thread
unless --threads says otherwise; the first time on a GPU, Triton compiles kernels for a minute or two."""
PACKAGE = "mambaslots"
TUNED_FOR = ("H100", "H200")
UNUSED = ("dev",)  # extras that serve nothing


class Check(NamedTuple):
    """One check of the self-test, and its finding."""

    name: str
    passed: bool
    finding: str


def add_options(parser: argparse.ArgumentParser) -> None:
    add_device(parser)
    add_json(parser, "all findings")


def run(options: argparse.Namespace) -> int:
    options.threads = options.threads or 1  # tensors are small: more threads wait for one another
    device = chosen_device(options)
    findings: dict[str, Any] = {"platform": f"Python {platform.python_version()}, {platform.platform()}"}
    print(findings["platform"])
    findings["packages"] = [describe_package(requirement) for requirement in requirements()]
    findings["packages"] += [f"NOT TESTED: {newer}" for newer in untested()]
    findings["devices"] = describe_devices()
    findings["kernels"] = describe_kernels(device)
    findings["megatron"] = [describe_outlook()]
    titles = {
        "packages": "packages",
        "devices": "GPUs",
        "kernels": "what would run",
        "megatron": "what `mambaslots run` would do",
    }
    for lines, title in titles.items():
        print(f"\n{title}:")
        for line in findings[lines]:
            print(f"  {line}")
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


def describe_kernels(device: torch.device) -> list[str]:
    """What would run, a line each; one line with the error where not even a small model can be built."""
    try:
        engine = small_engine(small_model(device))
    except Exception as error:  # whatever is wrong with this machine
        return [f"nothing: {_one_line(error)}"]
    return engine.describe().splitlines()


def checks(device: torch.device) -> Iterator[Check]:
    """The self-test; an error that ends it is a check that failed."""
    try:
        started, model = time.perf_counter(), small_model(device)
        yield Check("a model's answers are alike in all ways of serving", True, str(check_model(model)))
        prompt, params = list(range(100)), SamplingParams(max_tokens=1)
        engine = small_engine(model)
        resumed = [engine.generate([prompt], params)[0].num_resumed_tokens for _ in range(2)]
        finding = f"{resumed[1]} of {len(prompt)} tokens; {time.perf_counter() - started:.1f} s in all"
        yield Check("a repeated prompt resumes", resumed == [0, 96], finding)
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
        return f"{name} {version}: NOT SUPPORTED; needed: {accepted}"
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


def small_model(device: torch.device) -> HybridLM:
    """Layers of all kinds with random weights."""
    config = HybridConfig.tiny(
        torch.bfloat16 if device.type == "cuda" else torch.float64, pattern="M-G-*-", delta_num_key_heads=2,
        delta_key_dim=16, delta_num_value_heads=4, delta_value_dim=16,
    )  # fmt: skip
    return HybridLM(config, seed=0, device=device)


def small_engine(model: HybridLM) -> DynamicInferenceEngine:
    """An engine with room for the self-test."""
    sizes = InferenceConfig(
        block_size_tokens=32, max_requests=2, max_tokens_per_step=64, max_sequence_length=256,
        num_kv_blocks=32, num_mamba_slots=16,
    )  # fmt: skip
    return DynamicInferenceEngine(model, sizes)
