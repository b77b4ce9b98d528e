"""A small hybrid model that is served with and without the cache: does this machine give right answers?"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ..config import InferenceConfig
from ..inference.engines.dynamic_engine import DynamicInferenceEngine
from ..models import HybridConfig, HybridLM
from ..request import SamplingParams

BLOCK = 128
ANSWER = 24
PROMPT = 4 * BLOCK - 9  # so that the answer crosses a boundary
TOLERANCES = {torch.float64: 1e-9, torch.bfloat16: 0.25}
"""How far log-probs may lie from those of float64 on the CPU, in nats."""


@dataclass(frozen=True)
class Check:
    """One thing that was tried.

    Attributes:
        name: what it was.
        passed: whether it came out right.
        finding: what came out.
    """

    name: str
    passed: bool
    finding: str


def tried_dtype(device: torch.device) -> torch.dtype:
    """The dtype in which models are served on a device, unless said otherwise."""
    return torch.bfloat16 if device.type == "cuda" else torch.float64


def small_model(device: torch.device, dtype: torch.dtype, like: HybridLM | None = None) -> HybridLM:
    """Mamba-2, gated delta net, attention and MLP layers with random weights, or with those of `like`.

    The model with the weights of `like` is in float64 on the CPU.
    """
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
        block_size_tokens=BLOCK, max_requests=2, max_tokens=2 * BLOCK, max_sequence_length=8 * BLOCK,
        num_kv_blocks=32, num_mamba_slots=16 if caching else None, enable_prefix_caching=caching,
    )  # fmt: skip
    return DynamicInferenceEngine(model, sizes)


def self_test(device: torch.device) -> Iterator[Check]:
    """Serve a prompt and its continuation on `device`, and compare with float64 on the CPU, without a cache.

    Yields each check as it is made. Synchronises the device.
    """
    dtype = tried_dtype(device)
    started = time.perf_counter()
    drawn = torch.Generator().manual_seed(0)
    prompt = torch.randint(256, (PROMPT,), generator=drawn).tolist()
    params = SamplingParams(num_tokens_to_generate=ANSWER, return_log_probs=True)
    model = small_model(device, dtype)
    engine = small_engine(model, caching=True)
    (first,) = engine.generate([prompt], params)
    yield Check("a prompt is served", len(first.tokens) == ANSWER, f"{len(first.tokens)} tokens")
    following = prompt + first.tokens + prompt[:BLOCK]
    again = engine.generate([prompt, following], params)
    wanted = [PROMPT // BLOCK * BLOCK, (PROMPT + ANSWER - 1) // BLOCK * BLOCK]
    resumed = [result.num_resumed_tokens for result in again]
    finding = ", ".join(
        f"{result.num_resumed_tokens} of {result.num_prompt_tokens} tokens" for result in again
    )
    yield Check("its repeat and its continuation resume", resumed == wanted, finding)
    exact = small_engine(small_model(device, dtype, like=model), caching=False)
    pairs = [(prompt, first), (prompt, again[0]), (following, again[1])]
    furthest = max(_distance(exact, asked, result.tokens, result.log_probs or []) for asked, result in pairs)
    limit = TOLERANCES[dtype]
    finding = f"log-probs differ by at most {furthest:.2g}; accepted for {str(dtype)[6:]}: {limit:g}"
    yield Check("answers agree with float64 on the CPU, without a cache", furthest <= limit, finding)
    try:
        engine.check_integrity()
    except AssertionError as error:
        yield Check("the books are in order", False, str(error))
    else:
        yield Check("the books are in order", True, f"{time.perf_counter() - started:.1f} s in all")


def _distance(
    exact: DynamicInferenceEngine, prompt: list[int], tokens: list[int], log_probs: list[float]
) -> float:
    """The largest difference between an answer's log-probs and those that `exact` gives the same tokens."""
    (scored,) = exact.score([prompt + tokens], len(prompt))
    if len(log_probs) != len(scored.log_probs):
        return float("inf")
    return max(abs(a - b) for a, b in zip(log_probs, scored.log_probs, strict=True))
