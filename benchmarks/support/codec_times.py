"""How long do states take to encode and decode, beside a copy of as many bytes? For `encoded_states.py`."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from mambaslots.config import DURABLE_DTYPES
from mambaslots.inference.contexts.request_states import StatePool, coded_tensors
from mambaslots.inference.kernels.state_copy import decode_states, encode_states
from mambaslots.state_spec import StateTensor, durable_tensors, gated_delta_net_states, mamba2_states
from support.graph_timing import graph_us

LIMITS = {"H100": 3.35e12, "H200": 4.8e12}
"""Bytes a second of the memory of these GPUs, by their makers' data sheets (SXM)."""
MODELS = ("Nemotron-H-8B", "Qwen3.5-4B")
PAIRS = (1, 4, 16)


def measured(
    shapes: Mapping[str, tuple[StateTensor, ...]], device: str, calls: int
) -> list[dict[str, object]]:
    """Print and return the times of all models, encodings and numbers of states."""
    gpu = torch.cuda.get_device_name() if device == "cuda" else ""
    limit = next((rate for name, rate in LIMITS.items() if name in gpu), None)
    print(gpu or "a CPU: tiny shapes, the reference; nothing here is about a GPU")
    print("| model | stored as | what | n | MB moved | us | GB/s | of a copy | of the memory's limit |")
    print("|" + " --- |" * 9)
    found = []
    for model in MODELS:
        states = shapes[model] if device == "cuda" else tiny(model)
        for dtype in DURABLE_DTYPES:
            for pairs in PAIRS:
                for row in rows_of(states, dtype, pairs, device, calls):
                    rate, copied = row["bytes"] / row["us"] * 1e6, row["bytes"] / row["copy_us"] * 1e6
                    shares = f"{rate / copied:.0%} | " + (f"{rate / limit:.0%}" if limit else "-")
                    print(
                        f"| {model} | {dtype} | {row['what']} | {pairs} | {row['bytes'] / 1e6:.1f} | "
                        f"{row['us']:.1f} | {rate / 1e9:.0f} | {shares} |",
                        flush=True,
                    )
                    found.append(row | {"model": model, "stored_as": dtype, "n": pairs, "gpu": gpu})
    print()
    return found


def tiny(model: str) -> tuple[StateTensor, ...]:
    """A few layers and heads of the model's kind."""
    bf16, fp32 = torch.bfloat16, torch.float32
    if model == "Nemotron-H-8B":
        return mamba2_states(2, 4, 64, 1, 128, 4, bf16, fp32, 256)
    return gated_delta_net_states(2, 1, 128, 2, 128, 4, bf16, fp32)


def rows_of(
    states: tuple[StateTensor, ...], dtype: str, pairs: int, device: str, calls: int
) -> list[dict[str, Any]]:
    """Both directions for `pairs` states, which lie apart in pools of random numbers."""
    live = StatePool(states, pairs, pairs, device)
    durable = StatePool(durable_tensors(states, dtype), 0, 2 * pairs, device)
    for tensor in live.tensors:
        tensor.normal_()
    coded = coded_tensors(live, durable)
    of, to = (torch.arange(first, 2 * pairs, 2, device=device) for first in (0, 1))
    num_bytes = pairs * sum(state.state_bytes for state in states)
    num_bytes += pairs * sum(tensor.state_bytes for tensor in durable.states)
    source, copy = (torch.zeros(num_bytes // 2, dtype=torch.uint8, device=device) for _ in range(2))
    copy_us = microseconds(lambda: copy.copy_(source), device, calls)
    return [
        {"what": what, "bytes": num_bytes, "us": microseconds(call, device, calls), "copy_us": copy_us}
        for what, call in (
            ("encode", lambda: encode_states(coded, of, to)),
            ("decode", lambda: decode_states(coded, to, of)),
        )
    ]


def microseconds(call: Callable[[], object], device: str, calls: int) -> float:
    """Of one call: on a GPU without its launch, in a CUDA graph of `calls` calls."""
    if device == "cuda":
        return graph_us(call, calls)
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)
