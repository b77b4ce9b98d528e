"""Driving a context by hand, a chunk and a step at a time."""

from itertools import count

import mambaslots as ms
import torch
from mambaslots.inference.contexts.cache.hashing import PrefixHashChain
from mambaslots.inference.contexts.dynamic_context import DynamicInferenceContext
from mambaslots.inference.contexts.dynamic_request import DynamicInferenceRequest, ScheduledRequest
from oracle.serving import small_model

BLOCK = 8
new_ids = count()


def make_context(**overrides: object) -> DynamicInferenceContext:
    settings: dict[str, object] = {
        "block_size_tokens": BLOCK,
        "max_requests": 3,
        "max_tokens_per_step": 64,
        "max_sequence_length": 128,
        "num_kv_blocks": 40,
        "num_mamba_slots": 20,
    } | overrides
    return DynamicInferenceContext(small_model().state_spec(), ms.InferenceConfig(**settings))  # type: ignore[arg-type]


def make_request(tokens: list[int], plan: ms.CheckpointPlan | None = None) -> DynamicInferenceRequest:
    return DynamicInferenceRequest(
        request_id=next(new_ids),
        prompt_tokens=tokens,
        sampling=ms.SamplingParams(),
        plan=plan or ms.CheckpointPlan(),
        chain=PrefixHashChain(BLOCK),
        arrival_s=0.0,
    )


def schedule(
    context: DynamicInferenceContext, request: DynamicInferenceRequest, budget: int = 64
) -> ScheduledRequest:
    chunk = context.admission.schedule_request(request, budget)
    assert chunk is not None
    return chunk


def run(context: DynamicInferenceContext, *chunks: ScheduledRequest) -> torch.Tensor:
    """One whole step; logits."""
    with torch.inference_mode():
        logits = small_model()(context.begin_step(chunks))
    context.end_step()
    context.check_integrity()
    return logits


def prefill(
    context: DynamicInferenceContext, request: DynamicInferenceRequest, budget: int = 64
) -> torch.Tensor:
    while True:
        chunk = schedule(context, request, budget)
        logits = run(context, chunk)
        if chunk.samples_token:
            return logits
