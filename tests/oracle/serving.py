"""Engines under test beside the token-by-token model: what every request must answer."""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import mambaslots as ms
import numpy as np
import torch
from mambaslots.inference.contexts.cache.hashing import PUBLIC_ROOT, PrefixHashChain
from mambaslots.inference.contexts.dynamic_context import DynamicInferenceContext
from oracle.memory_poison import poison
from oracle.model_kinds import OF_TRANSFORMERS, PLAIN, SHAPES, kind_of_model, present_kind
from oracle.recurrent_lm import RecurrentLM
from oracle.stored_states import stored_apart

TOLERANCE = 1e-9  # of log-probs, float64


SEED = 3


def small_model(chunk_size: int | None = None, dtype: torch.dtype = torch.float64) -> Any:
    """A float64 model with short chunks, so that short prompts cross many boundaries.

    The model is of the present kind, a `HybridLM` or a `TransformersLM`. `chunk_size` takes the place of the
    kind's chunks of every scan.
    """
    if present_kind() in OF_TRANSFORMERS:
        from oracle.transformers_lm import whole_model

        return whole_model(OF_TRANSFORMERS[present_kind()])
    return _model(present_kind(), chunk_size, dtype)


def small_model_over(groups: ms.ParallelGroups | None, device: torch.device) -> Any:
    """`small_model`, split over ranks."""
    if present_kind() in OF_TRANSFORMERS:
        from oracle.transformers_lm import TransformersLM

        return TransformersLM(OF_TRANSFORMERS[present_kind()], groups)
    return ms.models.HybridLM(small_config(), seed=SEED, groups=groups).to(device)


@cache
def _model(kind: str, chunk_size: int | None, dtype: torch.dtype) -> ms.models.HybridLM:
    with kind_of_model(kind):
        return ms.models.HybridLM(small_config(chunk_size, dtype), seed=SEED)


def small_config(
    chunk_size: int | None = None, dtype: torch.dtype = torch.float64, pattern: str | None = None
) -> ms.models.HybridConfig:
    """The shape of `small_model`, or of one with other layers."""
    kind = SHAPES.get(present_kind(), SHAPES[PLAIN])
    return ms.models.HybridConfig.tiny(
        dtype=dtype, hidden_size=32, mamba_num_heads=4, mamba_num_groups=2, mamba_state_dim=8,
        mamba_head_dim=8, mlp_hidden_size=32, pattern=pattern or kind.pattern,
        ssd_chunk_size=chunk_size or kind.ssd_chunk_size,
        delta_chunk_size=chunk_size or kind.delta_chunk_size,
        delta_num_key_heads=2, delta_key_dim=8, delta_num_value_heads=4, delta_value_dim=8,
    )  # fmt: skip


def tiny_model(dtype: torch.dtype, device: torch.device | str = "cpu") -> ms.models.HybridLM:
    """A model of the present kind with chunks of 16 and 32 tokens, as kernels of GPUs take; on `device`."""
    kind = SHAPES[present_kind()]
    config = ms.models.HybridConfig.tiny(
        dtype, pattern=kind.pattern, ssd_chunk_size=4 * kind.ssd_chunk_size,
        delta_chunk_size=4 * kind.delta_chunk_size,
    )  # fmt: skip
    return ms.models.HybridLM(config, seed=SEED).to(device)


DEFAULTS: dict[str, object] = {}
"""What `small_engine` takes for given; see `oracle.drafters.speculating`."""


def small_engine(**overrides: object) -> ms.DynamicInferenceEngine:
    """`overrides`: settings; also `model`, `make_drafter`, called for a drafter, `in_place`, `seed`,
    `poisoned`: whether free memory holds NaN, and `encoded`: whether durable slots are a store of their own,
    which rounds nothing.
    """
    settings: dict[str, object] = (
        {
            "block_size_tokens": 8,
            "max_requests": 4,
            "max_tokens_per_step": 64,
            "max_sequence_length": 256,
            "num_kv_blocks": 128,
            "num_mamba_slots": 64,
        }
        | DEFAULTS
        | overrides
    )
    if not settings.get("enable_prefix_caching", True):
        settings["num_mamba_slots"] = None
    seed = settings.pop("seed", 0)
    make_drafter, in_place = settings.pop("make_drafter", None), settings.pop("in_place", False)
    model = settings.pop("model", None) or small_model()
    is_poisoned = settings.pop("poisoned", False)
    if DEFAULTS.get("decode_by_replay"):  # which refuses the smallest steps of some scenarios
        least = model.state_spec().chunk_tokens(settings["block_size_tokens"]) + settings["max_requests"] - 1
        settings["max_tokens_per_step"] = max(settings["max_tokens_per_step"], least)
    if in_place:
        from oracle.drafters import InPlaceModel

        model = InPlaceModel(model)
    with stored_apart(settings) if settings.pop("encoded", False) else nullcontext():
        config = ms.InferenceConfig(**settings)  # type: ignore[arg-type]
        drafter = make_drafter and make_drafter()
        engine = ms.DynamicInferenceEngine(model, config, drafter=drafter, seed=seed)
    return poison(engine) if is_poisoned else engine


def is_async(engine: ms.DynamicInferenceEngine) -> bool:
    """Whether a step is planned before the tokens of the one before are read."""
    return engine.config.why_not_async(engine.context.spec.device) is None


def expected_answer(prompt: tuple[int, ...], length: int) -> tuple[list[int], list[float]]:
    """Greedy tokens and log-probs of the model's oracle, token by token, in float64."""
    return _expected_answer(small_model(), prompt, length)


def oracle_of(model: Any) -> Any:
    """What says the logits and greedy answers of `small_model`: nothing of ours, and no cache."""
    if isinstance(model, ms.models.HybridLM):
        return RecurrentLM(model)
    from oracle.transformers_lm import TransformersOracle

    return TransformersOracle(model.case)


kept_oracle = cache(oracle_of)
"""It remembers the beginnings of prompts."""


_answers: defaultdict[tuple[Any, tuple[int, ...]], tuple[list[int], list[float]]] = defaultdict(
    lambda: ([], [])
)
"""The longest answer so far of a model to a prompt."""


def _expected_answer(model: Any, prompt: tuple[int, ...], length: int) -> tuple[list[int], list[float]]:
    tokens, log_probs = _answers[model, prompt]
    if len(tokens) < length:
        more = kept_oracle(model).generate_greedy([*prompt, *tokens], length - len(tokens))
        tokens += map(int, more[0])
        log_probs += map(float, more[1])
    return tokens[:length], log_probs[:length]


def assert_answers(prompt: Sequence[int], result: ms.RequestResult) -> None:
    """The greedy result of a request that asked for log-probs is the recurrence's."""
    tokens, log_probs = expected_answer(tuple(prompt), len(result.tokens))
    assert result.tokens == tokens
    assert result.log_probs is not None
    np.testing.assert_allclose(result.log_probs, log_probs, rtol=0, atol=TOLERANCE)


def run_checked(engine: ms.DynamicInferenceEngine) -> dict[int, ms.RequestResult]:
    """Step to the end, checking integrity after every step; results by request."""
    results: dict[int, ms.RequestResult] = {}
    while engine.has_unfinished_requests():
        for result in engine.step().finished:
            results[result.request_id] = result
        engine.context.check_integrity()
    return results


def serve_checked(
    engine: ms.DynamicInferenceEngine, prompts: Sequence[Sequence[int]], length: int = 5
) -> list[ms.RequestResult]:
    """Serve prompts at once and hold every answer against the recurrence."""
    params = ms.SamplingParams(max_tokens=length, return_log_probs=True)
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    results = run_checked(engine)
    for prompt, request_id in zip(prompts, ids, strict=True):
        assert_answers(prompt, results[request_id])
    return [results[request_id] for request_id in ids]


def resumable(context: DynamicInferenceContext, tokens: Sequence[int], root: bytes = PUBLIC_ROOT) -> int:
    """How many of a prefix's tokens a longer prompt could resume now."""
    chain = PrefixHashChain(context.config.block_size_tokens, root)
    chain.extend_to(tokens)
    return context.prefix_cache.resumable_tokens(chain)


def random_tokens(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()
