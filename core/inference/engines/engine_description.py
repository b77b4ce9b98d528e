"""What serves a model, as an operator reads it."""

import torch

from ..contexts.dynamic_context import DynamicInferenceContext
from ..kernels.kernel_set import kernel_set
from .cuda_graphs import GraphRunner


def description_of(context: DynamicInferenceContext, graphs: GraphRunner | None) -> tuple[str, ...]:
    """A line each: device, kernels and why no better ones, graphs, scheduling, decodes, evicted states."""
    spec, config = context.spec, context.config
    device = torch.cuda.get_device_name(spec.device) if spec.device.type == "cuda" else "no GPU"
    captured = "none; on a GPU, num_cuda_graphs captures them, except in float64"
    steps = "launched before the tokens of the step before are read"
    if (because := config.why_not_async(spec.device)) is not None:
        steps = f"wait for the tokens of the step before, because of {because}"
    return (
        f"device: {spec.device} ({device}), KV in {str(spec.kv_dtype).removeprefix('torch.')}",
        *kernel_set(spec.device, spec.kv_dtype).describe(spec),
        f"CUDA graphs: {captured if graphs is None else graphs.describe()}",
        f"decode steps: {steps}",
        f"decodes: {_decodes(context)}",
        f"evicted states: {_evicted_states(context)}",
    )


def _decodes(context: DynamicInferenceContext) -> str:
    spec, config = context.spec, context.config
    if not any(tensor.num_layers for tensor in spec.states):
        return "the model has no states"
    if not config.replays:
        return "update a state at each token"
    chunk = spec.chunk_tokens(config.block_size_tokens)
    return f"replay the inputs since the last multiple of {chunk} tokens, where a state is written"


def _evicted_states(context: DynamicInferenceContext) -> str:
    tiers = context.prefix_cache.tiers
    if tiers is None:
        return "are dropped; host_cache_gb keeps them in host memory"
    in_files, saves = "", f"{tiers.min_tokens} tokens"
    if tiers.files.num_slots:
        in_files = f", {tiers.files.num_slots} in files"
        saves += f", from a file {tiers.min_tokens_from_file}"
    return f"{tiers.host.num_slots} in host memory{in_files}; come back where that saves at least {saves}"
