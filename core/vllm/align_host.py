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


class StagedBuffer:
    """int32 numbers in two pinned host arrays, used in turn: one is written while the other is copied."""

    def __init__(self, size: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._hosts = [
            torch.zeros(size, dtype=torch.int32, device="cpu", pin_memory=pinned) for _ in range(2)
        ]
        self._copied = [torch.cuda.Event() for _ in self._hosts] if pinned else []  # type: ignore[no-untyped-call]
        self._current = 0
        self.gpu = torch.zeros(size, dtype=torch.int32, device=device)

    def send(self, numbers: Sequence[int]) -> Tensor:
        """Copy numbers to the front of `gpu`, whose other entries stay; waits for the last copy but one."""
        n, host = len(numbers), self._writable()
        host.numpy()[:n] = numbers
        self.gpu[:n].copy_(host[:n], non_blocking=True)
        if self._copied:
            self._copied[self._current].record()
        self._current ^= 1
        return self.gpu

    def _writable(self) -> Tensor:
        """The host array of the next copy; waits for its last copy."""
        if self._copied:
            self._copied[self._current].synchronize()
        return self._hosts[self._current]


class MambaSpecDecodeGPUContext:
    """The states of a model on the device, and the numbers that the align kernels read there.

    Every `run_` method raises RuntimeError while no states are bound. Device arrays are int32 or int64. A
    method with `idx_mapping` [num_reqs] reads its arrays and the block tables by request row, -1 for padding;
    a method without it, or with None, reads them by batch row.
    """

    def __init__(
        self, max_num_reqs: int, kv_cache_config: MambaCacheConfig, num_state_types: int, device: torch.device
    ) -> None:
        num_rows = integer("max_num_reqs", max_num_reqs, 1, INT32_MAX)
        self.config, self.num_state_types = kv_cache_config, num_state_types
        self.kernels = kernels_for(device)
        self.state_idx = StagedBuffer(num_rows, device)
        self.src_col = StagedBuffer(num_rows, device)
        self.num_scheduled_tokens = StagedBuffer(num_rows, device)
        self.num_computed_tokens = StagedBuffer(num_rows, device)
        self.num_draft_tokens = StagedBuffer(num_rows, device)
        self._layout: AlignLayout | None = None
        self._counts: dict[torch.dtype, Tensor] = {}

    @classmethod
    def create(
        cls, max_num_reqs: int, kv_cache_config: MambaCacheConfig, num_state_types: int, device: torch.device
    ) -> "MambaSpecDecodeGPUContext":
        """For at most `max_num_reqs` requests; states are bound later."""
        return cls(max_num_reqs, kv_cache_config, num_state_types, device)

    @property
    def is_initialized(self) -> bool:
        return self._layout is not None

    @property
    def layout(self) -> AlignLayout:
        if self._layout is None:
            raise RuntimeError("no states are bound; call initialize_from_forward_context first")
        return self._layout

    def initialize_from_forward_context(
        self,
        kv_cache_config: MambaCacheConfig,
        forward_context: Mapping[str, Any],
        mamba_state_copy_funcs: Sequence[object],
        block_tables: Sequence[Tensor],
    ) -> None:
        """Bind the kernels to the states' memory; synchronises, unless it is bound to that memory already.

        `mamba_state_copy_funcs` has a function or a name for each type of state; one with "conv" in its name
        marks the state of a convolution. `block_tables`: one a group, [rows, columns] int32, -1 for none.

        Raises:
            ValueError: types or tables are not as many as configured, or states cannot be copied as bytes.
        """
        types = [str(getattr(function, "__name__", function)) for function in mamba_state_copy_funcs]
        groups = kv_cache_config.mamba_groups
        if len(types) != self.num_state_types or len(block_tables) != len(groups):
            raise ValueError(
                f"there are {len(types)} types of state and {len(block_tables)} block tables; accepted: "
                f"{self.num_state_types} and {len(groups)}"
            )
        window_dim = -1 if kv_cache_config.conv_dim_first else 1
        states = [
            AlignState(tensor, tensor.shape[window_dim] if "conv" in state_type else 0, group)
            for group, layers in enumerate(groups)
            for layer in layers
            for state_type, tensor in zip(types, forward_context[layer].kv_cache, strict=True)
        ]
        if self._layout is None or not self._layout.lies_in(states, block_tables):
            self._layout = AlignLayout.from_tensors(states, block_tables, kv_cache_config.conv_dim_first)

    def unbind(self) -> None:
        """Drop the states' tensors, so that their memory can be freed."""
        self._layout = None

    def run_fused_precopy(
        self,
        num_reqs: int,
        state_idx_gpu: Tensor,
        src_col_gpu: Tensor,
        token_bias_gpu: Tensor,
        idx_mapping: Tensor | None,
    ) -> None:
        """Before a forward: copy states from column `src_col_gpu`, biased, to column `state_idx_gpu`."""
        self.kernels.precopy_align(
            self.layout, state_idx_gpu, src_col_gpu, token_bias_gpu, idx_mapping, num_reqs
        )

    def run_fused_postprocess(
        self,
        num_reqs: int,
        num_accepted_tokens_gpu: Tensor,
        mamba_state_idx_gpu: Tensor,
        num_scheduled_tokens_gpu: Tensor,
        num_computed_tokens_gpu: Tensor,
        num_draft_tokens_gpu: Tensor,
    ) -> Tensor:
        """After sampling, by batch row: copy states on boundaries to their columns.

        Returns:
            [num_reqs] the accepted counts for the next step, valid until the next call.
            `num_accepted_tokens_gpu` itself is not changed.
        """
        layout, counts = self.layout, self._copied(num_accepted_tokens_gpu)
        self.kernels.postprocess_align(
            layout, num_accepted_tokens_gpu, mamba_state_idx_gpu, num_computed_tokens_gpu, counts, None,
            num_reqs, self.config.block_size_tokens, num_scheduled_tokens_gpu, num_draft_tokens_gpu,
        )  # fmt: skip
        return counts[:num_reqs]

    def run_fused_postprocess_align(
        self,
        num_reqs: int,
        num_accepted_tokens_gpu: Tensor,
        state_idx_gpu: Tensor,
        new_num_computed_tokens_gpu: Tensor,
        idx_mapping: Tensor | None,
    ) -> None:
        """After sampling, given the tokens computed with this step; writes `num_accepted_tokens_gpu`."""
        layout, snapshot = self.layout, self._copied(num_accepted_tokens_gpu)
        self.kernels.postprocess_align(
            layout, snapshot, state_idx_gpu, new_num_computed_tokens_gpu, num_accepted_tokens_gpu,
            idx_mapping, num_reqs, self.config.block_size_tokens,
        )  # fmt: skip

    def _copied(self, counts: Tensor) -> Tensor:
        """The counts in memory of this context, whose address a captured graph may keep."""
        own = self._counts.get(counts.dtype)
        if own is None or len(own) < len(counts):
            own = self._counts[counts.dtype] = torch.empty_like(counts)
        own[: len(counts)].copy_(counts)
        return own[: len(counts)]


def kernels_for(device: torch.device) -> ModuleType:
    """The align kernels for a device: Triton's on CUDA, imported at this call; plain torch's elsewhere."""
    if device.type != "cuda":
        return align_reference
    from . import align_kernels

    return align_kernels


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
        cls,
        max_num_reqs: int,
        kv_cache_config: MambaCacheConfig,
        num_state_types: int,
        device: torch.device,
        is_hybrid: bool = True,
    ) -> "MambaBuffers":
        """Allocate for batches of at most `max_num_reqs` requests; ValueError where that is out of range.

        `num_state_types`: state tensors of one layer, 2 for Mamba-2. `is_hybrid`: the model has attention.
        """
        context = MambaSpecDecodeGPUContext.create(max_num_reqs, kv_cache_config, num_state_types, device)
        return cls(context, context if kv_cache_config.num_speculative_tokens and is_hybrid else None)


def cleanup_mamba_state_idx(scheduler_output: Any, mamba_state_idx: dict[str, int]) -> None:
    """Drop the columns of requests that finished, were preempted, or resumed after a reset of the cache."""
    for names in (
        scheduler_output.finished_req_ids,
        scheduler_output.preempted_req_ids or (),
        scheduler_output.scheduled_cached_reqs.resumed_req_ids,
    ):
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
        ValueError: as `MambaSpecDecodeGPUContext.initialize_from_forward_context`.
    """
    copy_bufs.initialize_from_forward_context(
        kv_cache_config, forward_context, mamba_state_copy_funcs, input_batch.block_tables
    )
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
    num_reqs = len(req_ids)
    source = copy_bufs.src_col.send(columns)[:num_reqs]
    running = copy_bufs.state_idx.send(step.columns.tolist())[:num_reqs]
    accepted = input_batch.num_accepted_tokens_gpu[:num_reqs]
    copy_bufs.run_fused_precopy(num_reqs, running, source, (accepted - 1).clamp(min=0), None)
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
    ctx.state_idx.send([mamba_state_idx[name] for name in names])
    ctx.num_scheduled_tokens.send([scheduler_output.num_scheduled_tokens[name] for name in names])
    ctx.num_computed_tokens.send([requests[name].num_computed_tokens for name in names])
    ctx.num_draft_tokens.send([len(drafts.get(name, ())) for name in names])


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
    context.initialize_from_forward_context(
        kv_cache_config, forward_context, mamba_state_copy_funcs, input_batch.block_tables
    )
    counts = context.run_fused_postprocess(
        num_reqs, num_accepted_tokens_gpu, context.state_idx.gpu, context.num_scheduled_tokens.gpu,
        context.num_computed_tokens.gpu, context.num_draft_tokens.gpu,
    )  # fmt: skip
    num_accepted_tokens_gpu[:num_reqs].copy_(counts)
