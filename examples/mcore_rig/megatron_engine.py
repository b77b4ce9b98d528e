"""A hybrid model, megatron-core's engine around it, and requests through the engine."""

import gc
import itertools
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any

import torch

from .layer_spec import hybrid_stack_spec
from .shapes import TINY, Shape

with warnings.catch_warnings():  # of optional packages that are not here
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state
    from megatron.core.inference.config import (
        InferenceConfig,
        MambaInferenceStateConfig,
        PrefixCachingEvictionPolicy,
    )
    from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
    from megatron.core.inference.engines import DynamicInferenceEngine
    from megatron.core.inference.inference_request import DynamicInferenceRequest
    from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
    from megatron.core.inference.sampling_params import SamplingParams
    from megatron.core.inference.text_generation_controllers.text_generation_controller import (
        TextGenerationController,
    )
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

SSD_CHUNK = TINY.ssd_chunk
BLOCK = TINY.block
VOCABULARY = TINY.vocabulary  # bytes
GIGABYTE = 1 << 30
_request_ids = itertools.count()


def hybrid_model(
    pattern: str | None = None, seed: int = 1, dtype: torch.dtype = torch.float32, shape: Shape = TINY
) -> HybridModel:
    """A model of random weights, built on the GPU where there is one. `pattern`: other layers.

    With pipeline parallelism this process's part of `pattern`, which has a "|" between stages; with tensor
    parallelism this process's heads of all layers.
    """
    pattern = shape.pattern if pattern is None else pattern
    if torch.cuda.is_available():
        model_parallel_cuda_manual_seed(seed, inference_rng_tracker=True, force_reset_rng=True)
    # On a CPU a rank draws all ranks' weights and takes its own. The tracker for inference has one generator.
    rank = parallel_state.get_tensor_model_parallel_rank() if torch.cuda.is_available() else 0
    torch.manual_seed(seed + rank)
    with warnings.catch_warnings():  # of what megatron-core deprecates in its own defaults
        warnings.simplefilter("ignore")
        config = _config(shape, len(pattern.replace("|", "")), dtype)
        model = HybridModel(
            config=config,
            hybrid_stack_spec=hybrid_stack_spec(shape.ssd_chunk),
            vocab_size=shape.vocabulary,
            max_sequence_length=4 * shape.max_sequence_length,
            parallel_output=True,
            hybrid_layer_pattern=pattern,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
        )
    model.shape = shape
    if shape.far_reaching:
        _reach_far(model)
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm | torch.nn.RMSNorm):
            module.to(dtype)  # torch's norms know nothing of the config's
    return model.to(torch.cuda.current_device()).eval()


def _config(shape: Shape, num_layers: int, dtype: torch.dtype) -> TransformerConfig:
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    settings = dict(shape.settings)
    for name, least in (("mamba_num_groups", 1), ("mamba_num_heads", 2)):  # of a rank
        settings[name] = max(settings[name], least * ranks)
    if dtype == torch.float32 and "flash_attention_version" in {
        one.name for one in fields(TransformerConfig)
    }:
        settings["flash_attention_version"] = 2  # FlashAttention-3 has no float32
    return TransformerConfig(
        params_dtype=dtype,
        num_layers=num_layers,
        use_cpu_initialization=not torch.cuda.is_available(),
        cuda_graph_impl="none",
        inference_rng_tracker=True,
        is_hybrid_model=True,
        tensor_model_parallel_size=ranks,
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        pipeline_dtype=dtype,
        **settings,
    )


def _reach_far(model: HybridModel) -> None:
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if name.endswith("A_log"):
                weights.fill_(-3.0)
            elif "weight" in name and weights.dim() == 2:
                weights.mul_(20.0)


def load_stage(model: HybridModel, whole: Mapping[str, Any]) -> None:
    """Give one stage of a pipeline its part of the state dict of the whole model, built in one process."""
    before = model.decoder.layers[0].layer_number - 1

    def name_in_whole(name: str) -> str:
        return re.sub(r"(?<=^decoder\.layers\.)\d+", lambda number: str(int(number[0]) + before), name)

    model.load_state_dict({name: whole[name_in_whole(name)] for name in model.state_dict()})


def make_engine(
    model: HybridModel,
    *,
    prefix_caching: bool = True,
    num_kv_blocks: int = 128,
    num_mamba_slots: int | None = 32,
    max_requests: int = 4,
    max_tokens: int = 512,
    max_sequence_length: int | None = None,
    cuda_graphs: bool = False,
    **options: Any,
) -> DynamicInferenceEngine:
    """Sizes in counts instead of gigabytes: KV blocks without the dummy one, durable state slots.

    `num_mamba_slots=None` caches KV and no states ("memory only"). `max_sequence_length=None`: the shape's.
    `cuda_graphs`: decode steps are captured; the graphs of an engine that was made before are deleted.
    `options`: InferenceConfig's. A rank gets the memory that its own layers and heads need for these counts.
    """
    shape, config = model.shape, model.config
    block = shape.block
    use_cuda_graphs(model, cuda_graphs)
    states = MambaInferenceStateConfig.from_model(model)
    layers = model.decoder.layer_type_list
    recurrent = layers.count("M") + layers.count("G")
    state_bytes = recurrent and recurrent * (
        torch.Size(states.conv_states_shape).numel() * states.conv_states_dtype.itemsize
        + torch.Size(states.ssm_states_shape).numel() * states.ssm_states_dtype.itemsize
    )
    kv_heads = config.num_query_groups // config.tensor_model_parallel_size
    token_bytes = 2 * kv_heads * config.kv_channels * config.params_dtype.itemsize
    kv_bytes = layers.count("*") * block * token_bytes
    if prefix_caching:
        options.setdefault("prefix_caching_eviction_policy", PrefixCachingEvictionPolicy.LRU)
        if num_mamba_slots is not None:
            scratch = min(-(-max_tokens // block), 3 * max_requests)  # of one step, off this budget
            options["prefix_caching_mamba_gb"] = (num_mamba_slots + scratch + 0.5) * state_bytes / GIGABYTE
    defaults = {"materialize_only_last_token_logits": False, "num_cuda_graphs": -1 if cuda_graphs else None}
    context = DynamicInferenceContext(
        config,
        InferenceConfig(
            block_size_tokens=block,
            buffer_size_gb=((num_kv_blocks + 1.5) * kv_bytes + max_requests * state_bytes) / GIGABYTE,
            max_requests=max_requests,
            max_tokens=max_tokens,
            max_sequence_length=max_sequence_length or shape.max_sequence_length,
            mamba_inference_state_config=states,
            enable_prefix_caching=prefix_caching,
            use_cuda_graphs_for_non_decode_steps=False,
            sampling_backend="torch",
            **(defaults | options),
        ),
    )
    slots = None if context.mamba_slot_allocator is None else context.mamba_slot_allocator.max_slots
    built = (num_blocks(context) - 1, slots)
    if built != (num_kv_blocks, num_mamba_slots if prefix_caching else None):
        raise RuntimeError(f"megatron-core made {built} KV blocks and state slots of {options}")
    wrapper = GPTInferenceWrapper(model, context)
    wrapper.model_is_pipeline_parallel = config.pipeline_model_parallel_size > 1
    tokenizer = SimpleNamespace(
        vocab_size=shape.vocabulary, detokenize=lambda tokens: "".join(map(chr, tokens))
    )
    controller = TextGenerationController(inference_wrapped_model=wrapper, tokenizer=tokenizer)
    return DynamicInferenceEngine(controller, context)


def num_blocks(context: DynamicInferenceContext) -> int:
    """KV blocks with the dummy one: `total_count` in 0.19, `pool_size` in 0.20."""
    kv = context.kv_block_allocator
    return int(kv.pool_size if hasattr(kv, "pool_size") else kv.total_count)


def free_blocks(context: DynamicInferenceContext) -> int:
    """KV blocks in the free pool: `total_avail` in 0.19, `pool_avail` in 0.20."""
    kv = context.kv_block_allocator
    return int(kv.pool_avail if hasattr(kv, "pool_avail") else kv.total_avail)


def use_cuda_graphs(model: HybridModel, wanted: bool) -> None:
    """Switch the graphs of the model's forward on or off; those that exist are deleted.

    A graph serves the engine it was captured for. A process group cannot end while a graph uses it.
    """
    if not wanted and not hasattr(model, "cudagraph_manager"):
        return
    from megatron.core.transformer.cuda_graphs import delete_cuda_graphs
    from megatron.core.transformer.enums import InferenceCudaGraphScope

    torch.cuda.synchronize()
    if hasattr(model, "cudagraph_manager"):
        del model.cudagraph_manager
        gc.collect()
        delete_cuda_graphs()
    model.config.cuda_graph_impl = "local" if wanted else "none"
    scopes = InferenceCudaGraphScope
    model.config.inference_cuda_graph_scope = scopes.block if wanted else scopes.none
    if wanted:
        model.create_mcore_cudagraph_manager(model.config)


@dataclass
class Served:
    """What a request came to.

    Attributes:
        num_resumed_tokens: known of one request served alone, else None.
        ttft_s: seconds from `add` to the first token.
        gaps: by token, between the two best log-probs, where `top_n_logprobs=2` was asked for.
    """

    num_prompt_tokens: int
    num_resumed_tokens: int | None = None
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    ttft_s: float | None = None
    gaps: list[float] = field(default_factory=list)


def add(
    engine: DynamicInferenceEngine,
    prompt: Iterable[int],
    new_tokens: int = 4,
    *,
    hashed: bool = True,
    **sampling: Any,
) -> int:
    """Queue a request, greedy and with log-probs unless `sampling` says otherwise, and return its number."""
    number = next(_request_ids)
    context = engine.context
    request = DynamicInferenceRequest(
        request_id=number,
        prompt_tokens=torch.tensor(list(prompt), device=torch.cuda.current_device()),
        sampling_params=SamplingParams(
            num_tokens_to_generate=new_tokens,
            termination_id=-1,
            **{"top_k": 1, "return_log_probs": True, "skip_prompt_log_probs": True} | sampling,
        ),
        block_size_tokens=context.block_size_tokens,
        enable_prefix_caching=context.enable_prefix_caching and hashed,
    )
    engine._add_request(request)
    return number


def _make_with_room() -> Callable[[Callable[[], Any]], Any]:
    """A function that calls its argument, in a frame so large that what it calls has room beside it.

    CPython keeps frames in chunks of 16 KB, and gives an empty chunk back at once. Where interpreted kernels
    happen to run across the end of one, as they do under pytest, each of their calls maps and unmaps memory:
    a third of the time. A frame of 40 KB brings a chunk of 64 KB.
    """
    scope: dict[str, Any] = {}
    exec(f"def with_room(call, {', '.join(f'v{i}=0' for i in range(5000))}):\n    return call()", scope)
    return scope["with_room"]


_with_room = _make_with_room()


def step(engine: DynamicInferenceEngine) -> dict[int, Served]:
    """Advance the engine once; the requests that finished, by number."""
    with torch.inference_mode():
        records = _with_room(engine.step_modern)["finished_request_records"]
    done = {record.request_id: record.merge() for record in records}
    return {
        number: Served(
            len(request.prompt_tokens),
            tokens=[int(token) for token in request.generated_tokens],
            log_probs=[float(log_prob) for log_prob in request.generated_log_probs or ()],
            ttft_s=request.ttft,
            gaps=[max(best.values()) - min(best.values()) for best in request.generated_top_n_logprobs or ()],
        )
        for number, request in done.items()
    }


def finish(engine: DynamicInferenceEngine) -> dict[int, Served]:
    """Step until nothing is left; the requests that finished, by number."""
    done: dict[int, Served] = {}
    while engine.has_unfinished_requests():
        done |= step(engine)
    return done


def serve(
    engine: DynamicInferenceEngine, prompts: Iterable[Iterable[int]], new_tokens: int = 4, **sampling: Any
) -> list[Served]:
    """One request after another, each alone in the engine."""
    results = []
    for prompt in prompts:
        before = engine.context.lifetime_prefill_token_count
        number = add(engine, prompt, new_tokens, **sampling)
        result = finish(engine)[number]
        computed = engine.context.lifetime_prefill_token_count - before
        result.num_resumed_tokens = result.num_prompt_tokens - computed
        results.append(result)
    return results
