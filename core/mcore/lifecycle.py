"""Corrections: how the host sizes, resets, suspends and resumes the cache and its requests."""

import importlib
import logging
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..validation import INT32_MAX
from .host_record import record_of
from .overrides import override
from .versions import DYNAMIC_CONTEXT, MAMBA_METADATA

_logger = logging.getLogger(__package__)


@override(DYNAMIC_CONTEXT, "_allocate_mamba_cache", faults=(14, 15))
def allocate_mamba_cache(original: Callable[..., None], self: Any, mamba_gb: float) -> None:
    """Give every pipeline stage as many slots as the poorest one can afford. A collective."""
    kernels: Any = sys.modules.get("megatron.core.transformer.custom_layers.batch_invariant_kernels")
    if kernels is not None and kernels.is_batch_invariant_mode_enabled():
        _logger.warning(
            "batch_invariant_mode is on, and does not cover Mamba layers: the bits of an answer "
            "depend on where the answer resumed, because decodes round states otherwise than prefills do"
        )
    context_module = importlib.import_module(DYNAMIC_CONTEXT.partition(":")[0])
    state = _state_bytes(self)
    scratch = int(self.max_mamba_intermediate_states_per_step)
    num_affordable = int(mamba_gb * 2**30) // state - scratch if state else INT32_MAX
    stage_slots = max(0, min(INT32_MAX, num_affordable))
    slots = stage_slots
    group = self.pipeline_parallel_group
    if context_module.get_pg_size(group) > 1:
        min_slots = torch.tensor(stage_slots, dtype=torch.int64, device=torch.cuda.current_device())
        torch.distributed.all_reduce(min_slots, op=torch.distributed.ReduceOp.MIN, group=group)
        slots = int(min_slots)
    if slots < 1:
        elsewhere = (
            f", room for {stage_slots} durable slots on this pipeline stage, but another stage has room for "
            "fewer than one"
        )
        raise ValueError(
            f"prefix_caching_mamba_gb is {mamba_gb}{elsewhere if stage_slots else ''}; accepted: enough "
            "prefix cache budget for the scratch of one step and one durable state, on every pipeline stage"
        )
    self.mamba_slot_allocator = context_module.MambaSlotAllocator(
        context=self, max_slots=slots, num_mamba_layers=self.num_mamba_layers,
        conv_states_shape=self.mamba_conv_states_shape, ssm_states_shape=self.mamba_ssm_states_shape,
        conv_states_dtype=self.mamba_conv_states_dtype, ssm_states_dtype=self.mamba_ssm_states_dtype,
    )  # fmt: skip
    _logger.info(
        "%d durable slots (%.1f MiB), %d scratch slots (%.1f MiB), %.1f KiB a state",
        slots, slots * state / 2**20, scratch, scratch * state / 2**20, state / 2**10,
    )  # fmt: skip


def _state_bytes(context: Any) -> int:
    conv = math.prod(context.mamba_conv_states_shape) * context.mamba_conv_states_dtype.itemsize
    ssm = math.prod(context.mamba_ssm_states_shape) * context.mamba_ssm_states_dtype.itemsize
    return int(context.num_mamba_layers * (conv + ssm))


@override(DYNAMIC_CONTEXT, "reset_metadata", faults=(6, 7))
def reset_metadata(original: Callable[..., None], self: Any, **options: Any) -> None:
    """Forget states wherever the host forgets KV, and pending restores wherever it forgets requests."""
    original(self, **options)
    for queue in ("_pending_mamba_restores", "_pending_mamba_zeros"):
        getattr(self, queue, []).clear()
    record_of(self).clear()
    allocator = getattr(self, "mamba_slot_allocator", None)
    if allocator is None:
        return
    if options.get("preserve_prefix_cache") and self.enable_prefix_caching:
        allocator.abort_step()
    else:
        allocator.reset()


@override(DYNAMIC_CONTEXT, "deallocate_inference_state_buffers", faults=(14,))
def deallocate_inference_state_buffers(original: Callable[..., None], self: Any) -> None:
    """Free or offload the durable pool with the host's buffers; scratch where it builds a new allocator."""
    allocator = self.mamba_slot_allocator
    mode = self.kv_cache_management_mode.name
    was_allocated = self.is_tensor_state_allocated
    original(self)
    if allocator is None or not was_allocated or mode == "PERSIST":
        return
    if mode == "OFFLOAD":
        allocator.offload_pool()
        return
    record_of(self).clear()
    allocator.deallocate_pool()
    if self.unified_memory_level == 0 and not self._uses_torch_memory_saver:
        allocator.deallocate_scratch()
        self.kv_block_allocator.on_blocks_deregistered = None
        self.mamba_slot_allocator = None


@override(DYNAMIC_CONTEXT, "reinitialize_inference_state_buffers", faults=(6, 14))
def reinitialize_inference_state_buffers(original: Callable[..., None], self: Any) -> None:
    """Bring the durable pool back, with the offloaded states or empty, before the host does the rest."""
    if not self.is_tensor_state_allocated and self.mamba_slot_allocator is not None:
        self.mamba_slot_allocator.allocate_pool()
    original(self)


@override(MAMBA_METADATA, "allocate_slot", faults=(8,), series=("0.19",))
@override(MAMBA_METADATA, "batch_allocate_slots", faults=(8,), series=("0.19",))
def allocate_copied(
    original: Callable[..., Tensor | None], self: Any, *num_slots: int, **options: int
) -> Tensor | None:
    """A copy of the slot numbers; the stock methods return a view of the free stack, which changes later."""
    slots = original(self, *num_slots, **options)
    return slots if slots is None else slots.clone()


@override(DYNAMIC_CONTEXT, "resume_paused_requests", faults=(24,), series=("0.19",))
def resume_paused_requests(
    original: Callable[..., Any], self: Any, active_request_count: int, newly_paused_request_ids: Any
) -> Any:
    """Evict unreferenced blocks for paused requests. Stock counts free ones alone, and may wait for ever."""
    kv = self.kv_block_allocator
    if self.paused_request_count and self.enable_prefix_caching:
        num_missing = min(self.paused_request_count, int(kv.get_active_avail())) - kv.total_avail
        if num_missing > 0 and kv.prefix_caching_eviction_policy.name == "LRU":
            kv.evict_lru_blocks(min(num_missing, int(kv.get_evictable_block_count())))
    return original(self, active_request_count, newly_paused_request_ids)
