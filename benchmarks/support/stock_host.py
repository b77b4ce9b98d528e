"""megatron-core's inference classes on a machine without a GPU, and the hosts that its allocators need.

A comparison with ours runs both sides under `cpu_as_gpu`, which is that of `examples/mcore_rig`. The
builders make a host for the two slot allocators, and a real stock `DynamicInferenceContext` without a model.
Nothing here launches a kernel.
"""

import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from mcore_rig import cpu_as_gpu as cpu_as_gpu

with warnings.catch_warnings():  # of optional packages that are not here
    warnings.simplefilter("ignore")
    from megatron.core.inference.config import (
        InferenceConfig,
        MambaInferenceStateConfig,
        PrefixCachingEvictionPolicy,
    )
    from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
    from megatron.core.inference.contexts.kv_block_allocator import KVBlockAllocator
    from megatron.core.inference.contexts.mamba_slot_allocator import (
        MambaSlotAllocator as MambaSlotAllocator,
    )
    from megatron.core.inference.inference_request import DynamicInferenceRequest
    from megatron.core.inference.sampling_params import SamplingParams
    from megatron.core.transformer.transformer_config import TransformerConfig

GIGABYTE = 1 << 30
LRU = PrefixCachingEvictionPolicy.LRU


class SlotHost:
    """What either slot allocator reads of its host, with stock's own KV allocator; tiny states, one layer."""

    block_size_tokens = 64
    mamba_chunk_size = 16
    max_requests = 16
    max_mamba_intermediate_states_per_step = 0
    prefix_cache_lru_clock = 0

    def __init__(self, num_kv_blocks: int, policy: PrefixCachingEvictionPolicy = LRU) -> None:
        """`num_kv_blocks` counts stock's dummy block, the last one."""
        self.prefix_caching_eviction_policy = policy
        self.kv_block_allocator: Any = KVBlockAllocator(self, num_kv_blocks, 0, True, policy)
        self.mamba_conv_states = torch.zeros(1, self.max_requests, 2)
        self.mamba_ssm_states = torch.zeros(1, self.max_requests, 2)

    def slot_allocator(self, allocator: type[Any], max_slots: int) -> Any:
        """An allocator of that class; subscribes stock's to deregistrations, ours does itself."""
        slots = allocator(
            context=self,
            max_slots=max_slots,
            num_mamba_layers=1,
            conv_states_shape=(2,),
            ssm_states_shape=(2,),
            conv_states_dtype=torch.float32,
            ssm_states_dtype=torch.float32,
        )
        if isinstance(slots, MambaSlotAllocator):
            self.kv_block_allocator.on_blocks_deregistered = slots.on_kv_blocks_deregistered
        return slots


@dataclass(frozen=True)
class ContextSizes:
    """What stock's context and ours are both built from: one Mamba layer, one attention layer, float32."""

    block_size_tokens: int
    ssd_chunk_size: int
    max_requests: int
    max_tokens: int
    max_sequence_length: int
    num_kv_blocks: int
    num_mamba_slots: int
    conv_states_shape: tuple[int, ...] = (8, 4)
    ssm_states_shape: tuple[int, ...] = (2, 4, 4)
    num_heads: int = 1
    head_dim: int = 4

    @property
    def state_bytes(self) -> int:
        return 4 * (torch.Size(self.conv_states_shape).numel() + torch.Size(self.ssm_states_shape).numel())

    @property
    def kv_block_bytes(self) -> int:
        return 4 * 2 * self.block_size_tokens * self.num_heads * self.head_dim


def stock_context(sizes: ContextSizes) -> DynamicInferenceContext:
    """megatron-core's context for an "M*-" model, with LRU, without chunked prefill; within `cpu_as_gpu`.

    It takes budgets in GB, out of which come a dummy KV block and scratch for the states of one step; here
    they are chosen so that `num_kv_blocks` and `num_mamba_slots` are left.
    """
    scratch = min(-(-sizes.max_tokens // sizes.block_size_tokens), 3 * sizes.max_requests)
    kv_bytes = (sizes.num_kv_blocks + 1) * sizes.kv_block_bytes
    live_bytes = sizes.max_requests * sizes.state_bytes
    model = TransformerConfig(
        num_layers=3,
        hidden_size=sizes.num_heads * sizes.head_dim,
        num_attention_heads=sizes.num_heads,
        params_dtype=torch.float32,
        is_hybrid_model=True,
        use_cpu_initialization=True,
    )
    context = DynamicInferenceContext(
        model,
        InferenceConfig(
            block_size_tokens=sizes.block_size_tokens,
            max_requests=sizes.max_requests,
            max_tokens=sizes.max_tokens,
            max_sequence_length=sizes.max_sequence_length,
            buffer_size_gb=(kv_bytes + live_bytes + sizes.kv_block_bytes // 2) / GIGABYTE,  # type: ignore[arg-type]
            prefix_caching_mamba_gb=(sizes.num_mamba_slots + scratch + 0.5) * sizes.state_bytes / GIGABYTE,
            mamba_inference_state_config=MambaInferenceStateConfig(
                layer_type_list=["M", "*", "-"],
                conv_states_shape=sizes.conv_states_shape,
                ssm_states_shape=sizes.ssm_states_shape,
                conv_states_dtype=torch.float32,
                ssm_states_dtype=torch.float32,
                mamba_chunk_size=sizes.ssd_chunk_size,
            ),
            enable_prefix_caching=True,
            prefix_caching_eviction_policy=LRU,
            use_cuda_graphs_for_non_decode_steps=False,
        ),
    )
    built = (context.kv_block_allocator.total_count - 1, context.mamba_slot_allocator.max_slots)
    if built != (sizes.num_kv_blocks, sizes.num_mamba_slots):
        raise RuntimeError(f"stock made {built} blocks and slots of the budget for {sizes}")
    return context


def stock_request(request_id: int, tokens: list[int], sizes: ContextSizes) -> DynamicInferenceRequest:
    """A request of a stock context, its prompt's blocks hashed; it never ends of itself."""
    return DynamicInferenceRequest(
        request_id=request_id,
        prompt_tokens=torch.tensor(tokens),
        sampling_params=SamplingParams(num_tokens_to_generate=sizes.max_sequence_length, termination_id=-1),
        block_size_tokens=sizes.block_size_tokens,
        enable_prefix_caching=True,
    )
