"""`mambaslots doctor`: what is installed, what would run, and a test on a small model."""

import argparse
import importlib.metadata
import json
import platform
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from packaging.requirements import Requirement

from ..config import InferenceConfig
from ..inference.contexts.pool_sizes import GIGABYTE
from ..inference.engines.dynamic_engine import DynamicInferenceEngine
from ..mcore.install import describe_outlook
from ..models import HybridConfig, HybridLM
from ..request import SamplingParams
from ..version import untested
from .options import add_device, add_json
from .setup import chosen_device

TEXT = """\
The last line is "works" or "does not work". The self-test takes a few seconds on a CPU, with one thread
unless --threads says otherwise; the first time on a GPU, Triton compiles kernels for a minute or two."""
PACKAGE = "mambaslots"
TUNED_FOR = ("H100", "H200")
UNUSED = ("dev",)  # extras that serve nothing


BLOCK = 128
ANSWER = 24
PROMPT = 4 * BLOCK - 9  # so that the answer crosses a boundary
TOLERANCES = {torch.float64: 1e-9, torch.bfloat16: 0.25}
"""How far log-probs may lie from those of float64 on the CPU, in nats."""


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


def tried_dtype(device: torch.device) -> torch.dtype:
    """The dtype in which models are served on a device, unless said otherwise."""
    return torch.bfloat16 if device.type == "cuda" else torch.float64


def small_model(device: torch.device, dtype: torch.dtype, like: HybridLM | None = None) -> HybridLM:
    """Layers of all kinds with random weights, or with those of `like`, then in float64 on the CPU."""
    config = HybridConfig(
        vocab_size=256, hidden_size=256, pattern="M-G-*-", dtype=torch.float64,
        mamba_num_heads=8, mamba_head_dim=64, mamba_num_groups=1, mamba_state_dim=128, conv_kernel=4,
        ssd_chunk_size=128, num_attention_heads=4, num_kv_heads=2, head_dim=64, mlp_hidden_size=512,
        delta_num_key_heads=2, delta_key_dim=128, delta_num_value_heads=4, delta_value_dim=128,
        delta_chunk_size=64,
    )  # fmt: skip
    if like is None:
        return HybridLM(replace(config, dtype=dtype), seed=0, device=device)
    model = HybridLM(config, seed=0)
    model.load_state_dict(like.state_dict())
    return model


def small_engine(model: HybridLM, *, caching: bool) -> DynamicInferenceEngine:
    """An engine with room for the self-test."""
    sizes = InferenceConfig(
        block_size_tokens=BLOCK, max_requests=2, max_tokens_per_step=2 * BLOCK, max_sequence_length=8 * BLOCK,
        num_kv_blocks=32, num_mamba_slots=16 if caching else None, enable_prefix_caching=caching,
    )  # fmt: skip
    return DynamicInferenceEngine(model, sizes)


def self_test(device: torch.device) -> Iterator[Check]:
    """Serve a prompt and its continuation on `device`, and compare with float64 on the CPU, uncached."""
    dtype = tried_dtype(device)
    started = time.perf_counter()
    drawn = torch.Generator().manual_seed(0)
    prompt = torch.randint(256, (PROMPT,), generator=drawn).tolist()
    params = SamplingParams(max_tokens=ANSWER, return_log_probs=True)
    model = small_model(device, dtype)
    engine = small_engine(model, caching=True)
    (first,) = engine.generate([prompt], params)
    yield Check("a prompt is served", len(first.tokens) == ANSWER, f"{len(first.tokens)} tokens")
    next_turn = prompt + first.tokens + prompt[:BLOCK]
    again = engine.generate([prompt, next_turn], params)
    wanted = [PROMPT // BLOCK * BLOCK, (PROMPT + ANSWER - 1) // BLOCK * BLOCK]
    resumed = [result.num_resumed_tokens for result in again]
    finding = ", ".join(
        f"{result.num_resumed_tokens} of {result.num_prompt_tokens} tokens" for result in again
    )
    yield Check("its repeat and its continuation resume", resumed == wanted, finding)
    exact = small_engine(small_model(device, dtype, like=model), caching=False)
    pairs = [(prompt, first), (prompt, again[0]), (next_turn, again[1])]
    furthest = max(_distance(exact, asked, result.tokens, result.log_probs or []) for asked, result in pairs)
    limit = TOLERANCES[dtype]
    finding = f"log-probs differ by at most {furthest:.2g}; accepted for {str(dtype)[6:]}: {limit:g}"
    yield Check("answers agree with float64 on the CPU, without a cache", furthest <= limit, finding)
    engine.check_integrity()
    yield Check("the bookkeeping is consistent", True, f"{time.perf_counter() - started:.1f} s in all")


def _distance(
    exact: DynamicInferenceEngine, prompt: list[int], tokens: list[int], log_probs: list[float]
) -> float:
    """The largest difference between an answer's log-probs and those that `exact` gives the same tokens."""
    (scored,) = exact.score([prompt + tokens], len(prompt))
    if len(log_probs) != len(scored.log_probs):
        return float("inf")
    return max(abs(a - b) for a, b in zip(log_probs, scored.log_probs, strict=True))
