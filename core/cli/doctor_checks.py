"""The part of `mambaslots doctor` that needs torch: GPUs, kernels, and a test on a small model."""

import time
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..config import InferenceConfig
from ..devices import GIGABYTE
from ..inference.engines.dynamic_engine import DynamicInferenceEngine
from ..models import HybridConfig, HybridLM
from ..params_and_results import SamplingParams
from ..testing import check_model

TUNED_FOR = ("H100", "H200")


class Check(NamedTuple):
    """One check of the self-test, and its finding."""

    name: str
    passed: bool
    finding: str


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
        start_s = time.perf_counter()
        model = small_model(device)
        yield Check("a model's answers are alike in all ways of serving", True, str(check_model(model)))
        prompt = list(range(100))
        params = SamplingParams(max_tokens=1)
        engine = small_engine(model)
        resumed = [engine.generate([prompt], params)[0].num_resumed_tokens for _ in range(2)]
        finding = f"{resumed[1]} of {len(prompt)} tokens; {time.perf_counter() - start_s:.1f} s in all"
        yield Check("a repeated prompt resumes", resumed == [0, 96], finding)
    except Exception as error:
        yield Check("the self-test runs to its end", False, _one_line(error))


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"


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
        if not any(gpu in name for gpu in TUNED_FOR):
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
