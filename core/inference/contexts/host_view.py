"""A `DynamicInferenceContext` under the attribute names of megatron-core's context."""

from typing import Protocol

from torch import Tensor

from ...config import InferenceConfig
from ...state_spec import HybridStateSpec
from .cache.checkpoint_plan import CheckpointPlan
from .cache.kv_block_allocator import KVBlockAllocator
from .device_memory import DeviceMemory
from .mamba_metadata import MambaMetadata
from .request_step import RequestStep
from .state_pool import StatePool
from .step_builder import BatchDimensions


class _Context(Protocol):
    """The part of a `DynamicInferenceContext` that `HostView` reads."""

    spec: HybridStateSpec
    config: InferenceConfig
    memory: DeviceMemory
    mamba_metadata: MambaMetadata

    @property
    def request_to_kv_block_ids(self) -> Tensor: ...
    @property
    def kv_block_allocator(self) -> KVBlockAllocator: ...
    @property
    def steps(self) -> tuple[RequestStep, ...]: ...


class HostView:
    """What `MambaSlotAllocator` reads of its host, where the host is a `DynamicInferenceContext`.

    The engine of this package reads nothing here. `context.mamba_slot_allocator` builds a HostView at its
    first read, for hosts that drive the context by megatron-core's calls.
    """

    def __init__(self, context: _Context) -> None:
        self._context = context
        self.block_size_tokens = context.config.block_size_tokens
        self.mamba_chunk_size = context.spec.chunk_tokens(context.config.block_size_tokens)
        self.max_requests = context.config.max_requests
        self.prefix_caching_eviction_policy = context.config.eviction_policy
        self.checkpoint_plan: CheckpointPlan = context.config.checkpoint_plan
        self.mamba_metadata = context.mamba_metadata
        self.paused_request_count = 0  # here, paused requests have no rows in front of the others

    @property
    def kv_block_allocator(self) -> KVBlockAllocator:
        return self._context.kv_block_allocator

    @property
    def state_pool(self) -> StatePool:
        return self._context.memory.state_pool

    @property
    def mamba_conv_states(self) -> Tensor:
        return self._context.memory.state_pool.live("conv")

    @property
    def mamba_ssm_states(self) -> Tensor:
        return self._context.memory.state_pool.live("ssm")

    @property
    def request_to_kv_block_ids(self) -> Tensor:
        return self._context.request_to_kv_block_ids

    @property
    def batch_dimensions(self) -> BatchDimensions:
        decodes = sum(step.decoding for step in self._context.steps)
        return BatchDimensions(decodes, len(self._context.steps) - decodes)
