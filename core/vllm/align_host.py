"""Align mode under the names of vLLM 0.25.0 (`vllm/v1/worker/mamba_utils.py`).

A host names requests by id; `mamba_state_idx` is the host's dict of request id -> running column. Columns do
not depend on accepted counts, so the host knows the columns. The counts stay on the device in batch order.

The functions read these attributes of the host's objects:

    scheduler_output   num_scheduled_tokens, scheduled_spec_decode_tokens {id: drafts}, finished_req_ids,
                       preempted_req_ids (or None), scheduled_cached_reqs.resumed_req_ids
    input_batch        req_ids, block_tables (one [rows, columns] int32 a group), num_accepted_tokens_gpu
    requests           {id: request}, whose num_computed_tokens are those before the step
    forward_context    {layer name: layer}, whose kv_cache has one tensor [slots, ...] for each type of state
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..devices import tensor_on
from ..validation import INT32_MAX, integer
from . import align_reference
from .align_reference import AlignLayout, AlignState
from .align_rule import advance, start_columns


@dataclass(frozen=True)
class MambaCacheConfig:
    """How a host caches recurrent states: what vLLM spreads over its KV cache and cache configs.

    Example: `MambaCacheConfig(560, (("layers.0", "layers.2"),), 3)` for one block table of two layers.

    Attributes:
        block_size_tokens: tokens of one column of the slot table.
        mamba_groups: for each block table, the names of its Mamba layers in the forward context.
        num_speculative_tokens: most drafts of a step.
        conv_dim_first: conv states are [slots, dim, window], not [slots, window, dim].

    Raises:
        ValueError: a number is out of range.
    """

    block_size_tokens: int
    mamba_groups: tuple[tuple[str, ...], ...]
    num_speculative_tokens: int = 0
    conv_dim_first: bool = True

    def __post_init__(self) -> None:
        integer("block_size_tokens", self.block_size_tokens, 1, INT32_MAX)
        integer("num_speculative_tokens", self.num_speculative_tokens, 0, INT32_MAX)


class MambaSpecDecodeGPUContext:
    """The states of a model on the device, and the numbers that a step sends there."""

    def __init__(self, config: MambaCacheConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self.kernels: ModuleType = align_reference
        if device.type == "cuda":
            from . import align_kernels

            self.kernels = align_kernels
        self.staged: tuple[Tensor, ...] = ()  # [n] each: columns, and tokens computed, scheduled and drafted
        self._layout: AlignLayout | None = None

    def layout(
        self,
        forward_context: Mapping[str, Any],
        mamba_state_copy_funcs: Sequence[object],
        block_tables: Sequence[Tensor],
    ) -> AlignLayout:
        """The memory of the states; synchronises, unless it is that of the last call.

        A type of state is a function or a name; "conv" in it marks the state of a convolution. Raises a
        ValueError where types or tables are not as many as there are, or states cannot be copied as bytes.
        """
        types = [str(getattr(function, "__name__", function)) for function in mamba_state_copy_funcs]
        groups, dim_first = self.config.mamba_groups, self.config.conv_dim_first
        states = [
            AlignState(tensor, tensor.shape[-1 if dim_first else 1] if "conv" in state_type else 0, group)
            for group, layers in enumerate(groups)
            for layer in layers
            for state_type, tensor in zip(types, forward_context[layer].kv_cache, strict=True)
        ]
        if (count := len(block_tables)) != len(groups):
            raise ValueError(f"there are {count} block tables; accepted: {len(groups)}, one a group")
        if self._layout is None or not self._layout.lies_in(states, block_tables):
            self._layout = AlignLayout.from_tensors(states, block_tables, dim_first)
        return self._layout


@dataclass
class MambaBuffers:
    """Everything that a model runner keeps for its Mamba layers.

    Attributes:
        preprocess: for `preprocess_mamba`.
        postprocess_align: for `postprocess_mamba_align_gpu`; the same object, or None where steps have no
            drafts or the model has no attention.
    """

    preprocess: MambaSpecDecodeGPUContext
    postprocess_align: MambaSpecDecodeGPUContext | None

    @classmethod
    def create(
        cls, kv_cache_config: MambaCacheConfig, device: torch.device, is_hybrid: bool = True
    ) -> "MambaBuffers":
        """For states on this device; `is_hybrid`: the model has attention."""
        context = MambaSpecDecodeGPUContext(kv_cache_config, device)
        return cls(context, context if kv_cache_config.num_speculative_tokens and is_hybrid else None)


def cleanup_mamba_state_idx(scheduler_output: Any, mamba_state_idx: dict[str, int]) -> None:
    """Drop the columns of requests that finished, were preempted, or resumed after a reset of the cache."""
    ended = scheduler_output.finished_req_ids, scheduler_output.preempted_req_ids or ()
    for names in (*ended, scheduler_output.scheduled_cached_reqs.resumed_req_ids):
        for name in names:
            mamba_state_idx.pop(name, None)


def preprocess_mamba(
    scheduler_output: Any,
    kv_cache_config: MambaCacheConfig,
    mamba_state_idx: dict[str, int],
    input_batch: Any,
    requests: Mapping[str, Any],
    forward_context: Mapping[str, Any],
    mamba_state_copy_funcs: Sequence[object],
    copy_bufs: MambaSpecDecodeGPUContext,
) -> None:
    """Before a forward: move every request's state to the column that this step updates.

    Writes `mamba_state_idx`, the states, and the batch's accepted counts, which become 1 where a state moves.
    Synchronises only when it binds the states: at the first call, and when their memory has changed. Example:
    blocks of 560, a request in column 0 with 557 computed and 4 scheduled tokens moves to column 1.

    Raises:
        ValueError: as `MambaSpecDecodeGPUContext.layout`.
    """
    layout = copy_bufs.layout(forward_context, mamba_state_copy_funcs, input_batch.block_tables)
    req_ids, block = input_batch.req_ids, kv_cache_config.block_size_tokens
    computed = np.array([requests[name].num_computed_tokens for name in req_ids], dtype=np.int64)
    scheduled = np.array([scheduler_output.num_scheduled_tokens[name] for name in req_ids], dtype=np.int64)
    starts = start_columns(computed, block).tolist()
    columns = [mamba_state_idx.get(name, start) for name, start in zip(req_ids, starts, strict=True)]
    # Columns and moves do not depend on the accepted counts: ones stand in for the device's counts.
    step = advance(np.array(columns, dtype=np.int64), np.ones_like(computed), computed, scheduled, block)
    mamba_state_idx.update(zip(req_ids, step.columns.tolist(), strict=True))
    if not step.moves.any():
        return
    source, running = tensor_on(copy_bufs.device, [columns, step.columns.tolist()])
    accepted = input_batch.num_accepted_tokens_gpu[: len(req_ids)]
    copy_bufs.kernels.precopy_align(layout, running, source, (accepted - 1).clamp(min=0))
    accepted.masked_fill_((source >= 0) & (source != running), 1)


def stage_postprocess_inputs_to_gpu(
    ctx: MambaSpecDecodeGPUContext,
    scheduler_output: Any,
    req_ids: Sequence[str],
    num_reqs: int,
    requests: Mapping[str, Any],
    mamba_state_idx: Mapping[str, int],
) -> None:
    """Send the columns and token counts that `postprocess_mamba_align_gpu` reads, without waiting.

    Raises:
        ValueError: a request has no column; nothing is sent.
    """
    names = req_ids[:num_reqs]
    if missing := [name for name in names if name not in mamba_state_idx]:
        raise ValueError(f"requests {missing} have no column; call preprocess_mamba for this batch first")
    drafts = scheduler_output.scheduled_spec_decode_tokens
    numbers = [
        [mamba_state_idx[name] for name in names],
        [requests[name].num_computed_tokens for name in names],
        [scheduler_output.num_scheduled_tokens[name] for name in names],
        [len(drafts.get(name, ())) for name in names],
    ]
    ctx.staged = tensor_on(ctx.device, numbers).unbind()


def postprocess_mamba_align_gpu(
    *,
    bufs: MambaBuffers,
    num_reqs: int,
    num_accepted_tokens_gpu: Tensor,
    input_batch: Any,
    kv_cache_config: MambaCacheConfig,
    forward_context: Mapping[str, Any],
    mamba_state_copy_funcs: Sequence[object],
) -> None:
    """After sampling and `stage_postprocess_inputs_to_gpu`: copy states on boundaries to their columns.

    Writes the states and `num_accepted_tokens_gpu` [rows], which is in batch order.

    Raises:
        RuntimeError: `bufs` has no postprocessing context, because there are no drafts or no attention.
    """
    context = bufs.postprocess_align
    if context is None:
        raise RuntimeError("there is no postprocessing context: no drafts, or no attention")
    layout = context.layout(forward_context, mamba_state_copy_funcs, input_batch.block_tables)
    accepted, *staged = (numbers[:num_reqs] for numbers in (num_accepted_tokens_gpu, *context.staged))
    context.kernels.postprocess_align(layout, accepted, *staged, kv_cache_config.block_size_tokens)
