"""Engines of `oracle.toy_lm`, and one prompt at a time, held against the plain answer."""

from collections.abc import Sequence
from typing import Any

import mambaslots as ms
from mambaslots.inference.contexts.cache.state_tiers import StateTiers
from oracle.toy_answers import Ask, answer
from oracle.toy_lm import ToyLM

BLOCK = 4


def toy_engine(
    num_slots: int, num_host_slots: int = 0, model: ToyLM | None = None, **settings: Any
) -> ms.DynamicInferenceEngine:
    """With room for much KV, and for so many states on the device and in host memory."""
    model = model or ToyLM()
    drafter = settings.pop("drafter", None)
    config = ms.InferenceConfig(
        **{
            "block_size_tokens": BLOCK, "max_requests": 2, "max_tokens_per_step": 32,
            "max_sequence_length": 96,
            "num_kv_blocks": 200, "num_mamba_slots": num_slots,
            "host_cache_gb": num_host_slots * model.state_spec().slot_bytes / (1 << 30),
        } | settings
    )  # type: ignore[arg-type]  # fmt: skip
    return ms.DynamicInferenceEngine(model, config, drafter=drafter)


def tiers_of(engine: ms.DynamicInferenceEngine) -> StateTiers:
    assert engine.context.prefix_cache.tiers is not None
    return engine.context.prefix_cache.tiers


def ask(
    engine: ms.DynamicInferenceEngine, prompt: Sequence[int], length: int, version: int = 0
) -> ms.RequestResult:
    """Serve a prompt; its answer is that of the toy's weights of this version."""
    (result,) = engine.generate([prompt], ms.SamplingParams(max_tokens=length))
    kind = engine.model.kind if isinstance(engine.model, ToyLM) else ToyLM().kind
    assert tuple(result.tokens) == answer(Ask(tuple(prompt), length, version, kind=kind)).tokens
    return result


def resumed(engine: ms.DynamicInferenceEngine) -> int:
    """Prompt tokens that all requests of an engine have resumed."""
    return engine.stats().cache.num_resumed_tokens
