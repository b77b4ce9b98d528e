"""Corrections: how the host admits a prefill chunk (match, capacity, sharing, restore)."""

import importlib
from collections.abc import Callable
from typing import Any

import torch

from .host_record import DYNAMIC_CONTEXT, record_of
from .overrides import override
from .prefix_match import HostMatch, compute_spans, match_chunk


def _caches_states(context: Any) -> bool:
    return bool(context.is_hybrid_model and context.enable_prefix_caching)


@override(DYNAMIC_CONTEXT, "_compute_prefix_match", part="admission", faults=(1, 2, 4))
def compute_prefix_match(
    original: Callable[..., Any],
    self: Any,
    req: Any,
    prefill_chunk_length: int,
    record_mamba_match: bool = False,
) -> tuple[list[int], int, int, int, int, int]:
    """Skip only to a boundary that has a state, by one rule for first and continuation chunks.

    Where the prompt's length is 1 mod the block size, the stock method rounds the skip down to a boundary
    without a state. The stock method also skips on the KV match alone, for continuation chunks and for all
    chunks in memory-only mode.
    """
    if not _caches_states(self):
        named = {"record_mamba_match": True} if record_mamba_match else {}
        return original(self, req, prefill_chunk_length, **named)  # type: ignore[no-any-return]
    match = match_chunk(self, req, prefill_chunk_length)
    if record_mamba_match:
        req._mamba_num_matched_blocks = match.resumable_blocks
    return (
        list(match.matched_blocks),
        match.new_blocks,
        match.first_block,
        match.required_blocks,
        match.skip_tokens,
        prefill_chunk_length - match.skip_tokens,
    )


@override(DYNAMIC_CONTEXT, "add_request", part="admission", faults=(2, 4, 5, 13))
def add_request(
    original: Callable[..., None], self: Any, req: Any, prefill_chunk_length: int | None = None
) -> None:
    """Check capacity before anything changes, restore in every chunk, write no shared block again.

    The stock method raises after it took references and blocks, which then leak. It restores from the block
    of the KV map, and in the first chunk only. Here matched blocks keep the KV they have: the KV of
    recomputed tokens goes to the dummy block. Where this chunk completes a block for whose prefix another
    block is registered, the registered block takes its place.
    """
    if not _caches_states(self) or not self.is_tensor_state_allocated:
        return original(self, req, prefill_chunk_length)
    length = req.remaining_prompt_length if prefill_chunk_length is None else prefill_chunk_length
    match = match_chunk(self, req, length)
    kv, allocator = self.kv_block_allocator, self.mamba_slot_allocator
    row, finished = self.total_request_count, req.finished_chunk_token_count
    record = record_of(self)
    spans = compute_spans(self, record, req, match.skip_tokens) if finished == 0 else ()
    writes_shared_tail = _continues_in_shared_block(self, req, row)
    matched = torch.tensor(match.matched_blocks, dtype=torch.int64, device="cpu")
    kv.block_ref_counts[matched] += 1  # keeps them while the chunk's own blocks are allocated
    try:
        _check_capacity(self, req, match, length)
        if allocator is not None:
            allocator.planned_rows.discard(row)
        original(self, req, prefill_chunk_length)
    finally:
        kv.block_ref_counts[matched] -= 1
    if finished == 0:
        record.begin(req, int(self.block_size_tokens), spans)
    shared_from = match.first_block - writes_shared_tail
    _redirect_writes(
        self, length - match.skip_tokens, shared_from, match.first_block + len(match.matched_blocks)
    )
    adopted = _adopt_twins(self, req, row, finished, length, match.skip_tokens)
    if allocator is not None:
        _queue_restore(self, row, finished, match)
        if adopted or row not in allocator.planned_rows:  # megatron-core before 0.19 plans first chunks only
            allocator.compute_and_store_offsets(
                req, row, match.skip_tokens, length, len(match.matched_blocks),
                list(match.matched_blocks), match.required_blocks,
            )  # fmt: skip
    record.count_chunk(req.request_id, finished, match.skip_tokens, length)


def _check_capacity(context: Any, req: Any, match: HostMatch, length: int) -> None:
    """Raise in advance what the host would raise half-way; the matched blocks are held already."""
    host = importlib.import_module(DYNAMIC_CONTEXT.partition(":")[0])
    if match.new_blocks and not context.kv_block_allocator.is_memory_available(match.new_blocks):
        raise host.BlockOverflowError(req.request_id)
    if context.total_request_count >= context.max_requests:
        raise host.RequestOverflowError(req.request_id)
    if context.active_token_count + length - match.skip_tokens > context.max_tokens:
        raise host.TokenOverflowError(req.request_id)
    if req.finished_chunk_token_count == 0 and context.mamba_metadata.mamba_state_free_slot_count == 0:
        raise host.ContextOverflowError(req.request_id, "No Mamba slots available")


def _continues_in_shared_block(context: Any, req: Any, row: int) -> bool:
    """Whether the chunk starts inside a registered block, which the chunk must not write."""
    finished, size = req.finished_chunk_token_count, context.block_size_tokens
    block, hashes = finished // size, req.precomputed_block_hashes
    if finished % size == 0 or block >= len(hashes):
        return False
    held = int(context.request_to_kv_block_ids[row, block])
    return bool(context.kv_block_allocator.kv_hash_to_block_id.get(hashes[block], -1) == held)


def _redirect_writes(context: Any, computed: int, first_block: int, stop_block: int) -> None:
    """Send the KV of those of the newest `computed` tokens that lie in these blocks to the dummy block."""
    if stop_block <= first_block:
        return
    size, end = context.block_size_tokens, context.active_token_count
    tokens = slice(end - computed, end)
    blocks = context.token_to_pos_ids[tokens] // size
    inside = (blocks >= first_block) & (blocks < stop_block)
    context.token_to_block_idx[tokens][inside] = context.kv_block_allocator.dummy_block_idx


def _adopt_twins(context: Any, req: Any, row: int, finished: int, length: int, skipped: int) -> bool:
    """Replace blocks that the chunk completes where another block is registered under the same hash."""
    size, hashes = context.block_size_tokens, req.precomputed_block_hashes
    adopted = False
    for index in range(finished // size, min((finished + length) // size, len(hashes))):
        if adopt_twin(context, row, index, hashes[index]):
            _redirect_writes(context, length - skipped, index, index + 1)
            adopted = True
    return adopted


def adopt_twin(context: Any, row: int, index: int, key: int) -> bool:
    """Let the block that is registered under `key` take the place of the row's own complete block `index`.

    Both blocks hold the KV of the same tokens.

    Returns:
        Whether the row has another block now; False, with nothing done, where the row's own block is
            registered, or no block.
    """
    kv, table = context.kv_block_allocator, context.request_to_kv_block_ids
    own, twin = int(table[row, index]), kv.kv_hash_to_block_id.get(key, -1)
    if twin in (-1, own):
        return False
    kv.block_ref_counts[twin] += 1
    kv.update_timestamps(torch.tensor([twin], device="cpu"))
    table[row, index] = twin
    if int(context.request_last_kv_block_id[row]) == own:
        context.request_last_kv_block_id[row] = twin
    kv.release_memory_blocks(torch.tensor([own], dtype=torch.int32, device="cpu"))
    return True


def _queue_restore(context: Any, row: int, finished: int, match: HostMatch) -> None:
    """Let the next step restore the state; the slot stays pinned until the restore is launched."""
    if not match.skip_tokens:
        return
    queue = context._pending_mamba_restores
    live = int(context.mamba_metadata.request_to_mamba_state_idx[row])
    if finished == 0:
        queue.pop()
    queue.append((row, match.state_block, live))
    context.mamba_slot_allocator.pin_restore(match.state_block)


@override(DYNAMIC_CONTEXT, "_execute_pending_mamba_ops", part="admission", faults=(4, 21))
def execute_pending_mamba_ops(original: Callable[..., None], self: Any) -> None:
    """Restore all states of the step in one copy; a missing state is an error.

    The stock method copies one request at a time. Where a restore fails, it zeroes the live state although
    the tokens were skipped.
    """
    if self._pending_mamba_restores:
        pending = [(block, live) for _, block, live in self._pending_mamba_restores]
        self._pending_mamba_restores.clear()
        self.mamba_slot_allocator.restore_batch(pending)
    original(self)
