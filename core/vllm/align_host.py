"""The functions by which vLLM's model runner calls align mode, under vLLM's names.

The host names requests by id. `mamba_state_idx` is the host's dict of request id -> running column. Columns
do not depend on accepted counts, so the host knows the columns. The counts stay on the device in batch
order: a copy of the counts would reach the host when the batch may already have another order.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from .align_buffers import Buffer, MambaBuffers, MambaPreprocessBuffers, MambaSpecDecodeGPUContext, send
from .align_rule import advance, start_columns
from .state_binding import LayerStates, MambaCacheConfig


class ResumedRequests(Protocol):
    """The host's requests that run again after a preemption."""

    resumed_req_ids: Collection[str]


class SchedulerOutput(Protocol):
    """What the host's scheduler decided for a step."""

    finished_req_ids: Collection[str]
    preempted_req_ids: Collection[str] | None
    scheduled_cached_reqs: ResumedRequests
    num_scheduled_tokens: Mapping[str, int]
    """Request id -> tokens of this step, drafts included."""
    scheduled_spec_decode_tokens: Mapping[str, Sequence[int]]
    """Request id -> drafts, for the requests that have drafts."""


class Request(Protocol):
    """One request of the host."""

    num_computed_tokens: int
    """Tokens before the step."""


class InputBatch(Protocol):
    """The host's batch: row i belongs to request `req_ids[i]`, also on the device."""

    req_ids: Sequence[str]
    block_tables: Sequence[Tensor]
    """One table per group, [rows, columns] int32 slots."""
    num_accepted_tokens_gpu: Tensor
    """[rows] accepted counts of the last step; 1 for a request that is new or resumed."""


def preprocess_mamba(
    scheduler_output: SchedulerOutput,
    kv_cache_config: MambaCacheConfig,
    mamba_state_idx: dict[str, int],
    input_batch: InputBatch,
    requests: Mapping[str, Request],
    forward_context: Mapping[str, LayerStates],
    mamba_state_copy_funcs: Sequence[object],
    copy_bufs: MambaPreprocessBuffers,
) -> None:
    """Before a forward: move every request's state to the column that this step updates.

    Writes `mamba_state_idx`, the states, and the batch's accepted counts, which become 1 where a state moves.
    Synchronises only when it binds the states: at the first call, and when the states lie elsewhere than
    before.

    Raises:
        ValueError: types of state or block tables are not as many as configured, or states cannot be copied
            as bytes.
    """
    req_ids = input_batch.req_ids
    copy_bufs.binding.bind(kv_cache_config, forward_context, mamba_state_copy_funcs, input_batch.block_tables)
    block = kv_cache_config.block_size_tokens
    computed = np.array([requests[name].num_computed_tokens for name in req_ids], dtype=np.int64)
    scheduled = np.array([scheduler_output.num_scheduled_tokens[name] for name in req_ids], dtype=np.int64)
    starts = start_columns(computed, block).tolist()
    columns = [mamba_state_idx.get(name, start) for name, start in zip(req_ids, starts, strict=True)]
    # The rule gives columns and moves without the accepted counts: ones stand in for the device's counts.
    step = advance(np.array(columns, dtype=np.int64), np.ones_like(computed), computed, scheduled, block)
    mamba_state_idx.update(zip(req_ids, step.columns.tolist(), strict=True))
    if not step.moves.any():
        return
    num_reqs = len(req_ids)
    state_idx = send(copy_bufs.state_idx, columns)
    kernels = copy_bufs.binding.kernels
    kernels.preprocess_align(
        copy_bufs.rows,
        state_idx,
        send(copy_bufs.num_computed, computed.tolist()),
        send(copy_bufs.query_start_loc, [0, *scheduled.cumsum().tolist()]),
        input_batch.num_accepted_tokens_gpu,
        copy_bufs.src_col,
        copy_bufs.token_bias,
        num_reqs,
        block,
    )
    kernels.precopy_align(
        copy_bufs.binding.layout, state_idx, copy_bufs.src_col, copy_bufs.token_bias, None, num_reqs
    )


def postprocess_mamba_align_gpu(
    *,
    bufs: MambaBuffers,
    num_reqs: int,
    num_accepted_tokens_gpu: Tensor,
    input_batch: InputBatch,
    kv_cache_config: MambaCacheConfig,
    forward_context: Mapping[str, LayerStates],
    mamba_state_copy_funcs: Sequence[object],
) -> None:
    """After sampling and `stage_postprocess_inputs_to_gpu`: copy states on boundaries to their columns.

    Writes the states and `num_accepted_tokens_gpu` [rows], which is in batch order.

    Raises:
        RuntimeError: `bufs` has no postprocessing context, because there is no align mode or no draft.
    """
    context = bufs.postprocess_align
    if context is None:
        raise RuntimeError("there is no postprocessing context: no align mode, no drafts, or no attention")
    context.initialize_from_forward_context(
        kv_cache_config, forward_context, mamba_state_copy_funcs, input_batch.block_tables
    )
    counts = context.run_fused_postprocess(
        num_reqs,
        num_accepted_tokens_gpu,
        context.state_idx.gpu,
        context.num_scheduled_tokens.gpu,
        context.num_computed_tokens.gpu,
        context.num_draft_tokens.gpu,
    )
    num_accepted_tokens_gpu[:num_reqs].copy_(counts)


def postprocess_mamba_all(
    scheduler_output: SchedulerOutput,
    kv_cache_config: MambaCacheConfig,
    input_batch: InputBatch,
    requests: Mapping[str, Request],
    mamba_state_idx: dict[str, int],
    num_spec_tokens: int,
    num_reqs: int,
) -> None:
    """In cache mode "all", after a step: note where the next step begins.

    A request that scheduled all 1 + `num_spec_tokens` tokens gets the column of its last token in
    `mamba_state_idx`; any other request loses its entry. Without drafts nothing happens.
    """
    if num_spec_tokens <= 0:
        return
    for name in input_batch.req_ids[:num_reqs]:
        scheduled = scheduler_output.num_scheduled_tokens[name]
        if scheduled == 1 + num_spec_tokens:
            last = requests[name].num_computed_tokens + scheduled - 1
            mamba_state_idx[name] = max(0, last // kv_cache_config.block_size_tokens)
        else:
            mamba_state_idx.pop(name, None)


def cleanup_mamba_state_idx(scheduler_output: SchedulerOutput, mamba_state_idx: dict[str, int]) -> None:
    """Forget the columns of requests that finished, were preempted, or run again.

    A request that runs again may have been preempted by a reset of the cache, which lists it nowhere else.
    Its old column may be outside its new slots.
    """
    departed = (
        scheduler_output.finished_req_ids,
        scheduler_output.preempted_req_ids or (),
        scheduler_output.scheduled_cached_reqs.resumed_req_ids,
    )
    for names in departed:
        for name in names:
            mamba_state_idx.pop(name, None)


def stage_mamba_state_idx_to_gpu(
    mamba_state_idx: Mapping[str, int], req_ids: Sequence[str], num_reqs: int, gpu_buf: Buffer
) -> None:
    """Send the running columns of the first `num_reqs` requests, without waiting.

    Raises:
        ValueError: a request has no column, because `preprocess_mamba` has not seen this batch.
    """
    names = req_ids[:num_reqs]
    if missing := [name for name in names if name not in mamba_state_idx]:
        raise ValueError(f"requests {missing} have no column; call preprocess_mamba for this batch first")
    send(gpu_buf, [mamba_state_idx[name] for name in names])


def stage_postprocess_metadata_to_gpu(
    scheduler_output: SchedulerOutput,
    req_ids: Sequence[str],
    num_reqs: int,
    requests: Mapping[str, Request],
    num_scheduled_tokens_buf: Buffer,
    num_computed_tokens_buf: Buffer,
    num_draft_tokens_buf: Buffer,
) -> None:
    """Send the token counts of the first `num_reqs` requests, without waiting."""
    names = req_ids[:num_reqs]
    drafts = scheduler_output.scheduled_spec_decode_tokens
    send(num_scheduled_tokens_buf, [scheduler_output.num_scheduled_tokens[name] for name in names])
    send(num_computed_tokens_buf, [requests[name].num_computed_tokens for name in names])
    send(num_draft_tokens_buf, [len(drafts.get(name, ())) for name in names])


def stage_postprocess_inputs_to_gpu(
    ctx: MambaSpecDecodeGPUContext,
    scheduler_output: SchedulerOutput,
    req_ids: Sequence[str],
    num_reqs: int,
    requests: Mapping[str, Request],
    mamba_state_idx: Mapping[str, int],
) -> None:
    """Send everything that `postprocess_mamba_align_gpu` reads of this batch, without waiting.

    Raises:
        ValueError: a request has no column; nothing is sent.
    """
    stage_mamba_state_idx_to_gpu(mamba_state_idx, req_ids, num_reqs, ctx.state_idx)
    stage_postprocess_metadata_to_gpu(
        scheduler_output, req_ids, num_reqs, requests,
        ctx.num_scheduled_tokens, ctx.num_computed_tokens, ctx.num_draft_tokens,
    )  # fmt: skip
