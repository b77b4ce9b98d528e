"""Corrections: how the host admits a prefill chunk (match, capacity, sharing, restore, the KV index)."""

import importlib
from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple

import torch

from ..inference.contexts.cache import cached_states
from ..inference.contexts.cache.cached_states import Span
from ..inference.contexts.cache.checkpoint_plan import MAX_COMPARED
from ..validation import ceil_div
from .host_record import HostRecord, check_lengths, record_of
from .overrides import is_on_stock, override
from .versions import DYNAMIC_CONTEXT, DYNAMIC_ENGINE, KV_ALLOCATOR, MHA_METADATA, num_free_blocks


class HostMatch(NamedTuple):
    """What a prefill chunk can share and skip, counted in blocks from `first_block`; pins nothing."""

    first_block: int  # so many the request has already
    matched_blocks: tuple[int, ...]  # registered KV blocks that follow
    required_blocks: int  # up to the end of the chunk
    skip_tokens: int  # up to a boundary that has a state
    state_block: int  # whose state is at that boundary, or -1
    resumable_blocks: int  # up to the deepest matched block that has a state

    @property
    def new_blocks(self) -> int:
        return max(0, self.required_blocks - self.first_block - len(self.matched_blocks))


def match_chunk(context: Any, request: Any, length: int) -> HostMatch:
    """Match the next `length` tokens: skip to the deepest committed state that leaves a token to compute."""
    size = context.block_size_tokens
    finished = request.finished_chunk_token_count
    first_block = ceil_div(finished, size)
    num_required = ceil_div(finished + length, size)
    hashes = request.precomputed_block_hashes[first_block:num_required]
    blocks: list[Any] = list(map(context.kv_block_allocator.kv_hash_to_block_id.get, hashes))
    if None in blocks:
        del blocks[blocks.index(None) :]
    allocator = getattr(context, "mamba_slot_allocator", None)
    skip_tokens = num_resumable = 0
    state_block = -1
    if blocks and allocator is not None and finished % size == 0:
        state_block_of_hash = allocator.hash_to_block_id
        max_skip = 0 if _needs_every_token(request) else length - 1
        for depth in range(len(blocks), 0, -1):
            if hashes[depth - 1] not in state_block_of_hash:
                continue
            num_resumable = num_resumable or depth
            if depth * size <= max_skip:
                skip_tokens = depth * size
                state_block = state_block_of_hash[hashes[depth - 1]]
                break
    return HostMatch(first_block, tuple(blocks), num_required, skip_tokens, state_block, num_resumable)


def _needs_every_token(request: Any) -> bool:
    """Whether the request returns log-probs of its prompt."""
    sampling = request.sampling_params
    wants = getattr(sampling, "return_log_probs", False) or getattr(sampling, "top_n_logprobs", 0)
    return bool(wants) and not getattr(sampling, "skip_prompt_log_probs", True)


def compute_spans(context: Any, record: HostRecord, request: Any, match: HostMatch) -> tuple[Span, ...]:
    """Why each prompt token that is not skipped is computed; `match`: of the request's first chunk."""
    size = context.block_size_tokens
    hashes = request.precomputed_block_hashes
    length = len(request.prompt_tokens)
    allocator = getattr(context, "mamba_slot_allocator", None)
    if allocator is None or _needs_every_token(request) or (not hashes and length >= size):
        return (Span(0, length, "disabled"),)
    block_of_hash = context.kv_block_allocator.kv_hash_to_block_id
    num_matched = len(match.matched_blocks)
    while num_matched < len(hashes) and hashes[num_matched] in block_of_hash:
        num_matched += 1
    num_seen = num_matched
    while num_seen < len(hashes) and record.kv_ghosts.has(hashes[num_seen], "block"):
        num_seen += 1
    depth = match.skip_tokens // size
    return cached_states.compute_spans(
        hashes, num_resumed=depth, num_reachable=max(depth, min(num_matched, (length - 1) // size)),
        num_matched=num_matched, num_seen=num_seen, num_tokens=length, block_size_tokens=size,
        ghosts=allocator.slots.tree.ghosts,
    )  # fmt: skip


def caches_states(context: Any) -> bool:
    return bool(context.is_hybrid_model and context.enable_prefix_caching)


@override(DYNAMIC_CONTEXT, "_compute_prefix_match", faults=(1, 2, 4))
def compute_prefix_match(
    original: Callable[..., Any],
    self: Any,
    req: Any,
    prefill_chunk_length: int,
    record_mamba_match: bool = False,
) -> tuple[list[int], int, int, int, int, int]:
    """Skip only to a boundary that has a state, by one rule for first and continuation chunks."""
    if not caches_states(self):
        return original(self, req, prefill_chunk_length, record_mamba_match)  # type: ignore[no-any-return]
    match = record_of(self).match if record_mamba_match else None
    if match is None:
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


@override(DYNAMIC_CONTEXT, "add_request", faults=(2, 4, 5, 13))
def add_request(
    original: Callable[..., None], self: Any, req: Any, prefill_chunk_length: int | None = None
) -> None:
    """Check capacity before anything changes, restore in every chunk, write no shared block again.

    The KV of recomputed tokens goes to the dummy block, so that matched blocks keep theirs.
    """
    if not caches_states(self) or not self.is_tensor_state_allocated:
        return original(self, req, prefill_chunk_length)
    length = req.remaining_prompt_length if prefill_chunk_length is None else prefill_chunk_length
    match = match_chunk(self, req, length)
    kv = self.kv_block_allocator
    allocator = self.mamba_slot_allocator
    row = self.total_request_count
    finished = req.finished_chunk_token_count
    record = record_of(self)
    spans = compute_spans(self, record, req, match) if finished == 0 else ()
    writes_shared_tail = _continues_in_shared_block(self, req, row)
    evicts = match.new_blocks > num_free_blocks(kv)
    matched_blocks = torch.tensor(match.matched_blocks, dtype=torch.int64, device="cpu") if evicts else None
    if matched_blocks is not None:
        kv.block_ref_counts[matched_blocks] += 1  # keeps them while the chunk's own blocks are allocated
    try:
        _check_capacity(self, req, match, length)
        record.match = match  # `original` asks for it
        original(self, req, prefill_chunk_length)
    finally:
        record.match = None
        if matched_blocks is not None:
            kv.block_ref_counts[matched_blocks] -= 1
    if finished == 0:
        record.begin(req, int(self.block_size_tokens), spans)
    shared_from = match.first_block - writes_shared_tail
    positions = range(finished + match.skip_tokens, finished + length)
    _redirect_writes(self, positions, shared_from, match.first_block + len(match.matched_blocks))
    has_adopted = _adopt_twins(self, req, row, positions, match)
    if allocator is not None:
        _queue_restore(self, row, finished, match)
        if has_adopted:
            allocator.compute_and_store_offsets(
                req, row, match.skip_tokens, length, len(match.matched_blocks),
                list(match.matched_blocks), match.required_blocks,
            )  # fmt: skip
    record.count_chunk(req.request_id, finished, match.skip_tokens, length)


def _check_capacity(context: Any, req: Any, match: HostMatch, length: int) -> None:
    """Raise in advance what the host would raise half-way; the matched blocks are held already."""
    errors = importlib.import_module(DYNAMIC_CONTEXT.partition(":")[0])
    if match.new_blocks and not context.kv_block_allocator.is_memory_available(match.new_blocks):
        raise errors.BlockOverflowError(req.request_id)
    if context.total_request_count >= context.max_requests:
        raise errors.RequestOverflowError(req.request_id)
    if context.active_token_count + length - match.skip_tokens > context.max_tokens:
        raise errors.TokenOverflowError(req.request_id)
    if req.finished_chunk_token_count == 0 and context.mamba_metadata.mamba_state_free_slot_count == 0:
        raise errors.ContextOverflowError(req.request_id, "No Mamba slots available")


def _continues_in_shared_block(context: Any, req: Any, row: int) -> bool:
    """Whether the chunk starts inside a registered block, which the chunk must not write."""
    index, offset = divmod(req.finished_chunk_token_count, context.block_size_tokens)
    hashes = req.precomputed_block_hashes
    if offset == 0 or index >= len(hashes):
        return False
    block = int(context.request_to_kv_block_ids[row, index])
    return bool(context.kv_block_allocator.kv_hash_to_block_id.get(hashes[index], -1) == block)


def _redirect_writes(context: Any, positions: range, first_block: int, stop_block: int) -> None:
    """Send the KV of the newest tokens, at `positions`, to the dummy block inside these blocks."""
    start = max(positions.start, first_block * context.block_size_tokens)
    stop = min(positions.stop, stop_block * context.block_size_tokens)
    if start < stop:
        origin = context.active_token_count - positions.stop  # the step's index of position 0
        tokens = slice(origin + start, origin + stop)
        context.token_to_block_idx[tokens] = context.kv_block_allocator.dummy_block_idx


def _adopt_twins(context: Any, req: Any, row: int, positions: range, match: HostMatch) -> bool:
    """Replace blocks that the chunk completes where another block is registered under the same hash."""
    size = context.block_size_tokens
    hashes = req.precomputed_block_hashes
    first_block = req.finished_chunk_token_count // size
    stop = min(positions.stop // size, len(hashes))
    if first_block == match.first_block:  # the matched blocks, which are registered, come first
        first_block += len(match.matched_blocks)
    blocks = context.request_to_kv_block_ids[row, first_block:stop].tolist() if first_block < stop else ()
    block_of_hash = context.kv_block_allocator.kv_hash_to_block_id
    has_adopted = False
    for index, block in enumerate(blocks, first_block):
        has_twin = block_of_hash.get(hashes[index], block) != block
        if has_twin and adopt_twin(context, row, index, hashes[index]):
            _redirect_writes(context, positions, index, index + 1)
            has_adopted = True
    return has_adopted


def adopt_twin(context: Any, row: int, index: int, prefix_hash: int) -> bool:
    """Let the block registered under a hash take the place of the row's own block `index`; whether it did."""
    kv = context.kv_block_allocator
    table = context.request_to_kv_block_ids
    block = int(table[row, index])
    twin = kv.kv_hash_to_block_id.get(prefix_hash, -1)
    if twin in (-1, block):
        return False
    kv.block_ref_counts[twin] += 1
    kv.update_timestamps(torch.tensor([twin], device="cpu"))
    table[row, index] = twin
    if int(context.request_last_kv_block_id[row]) == block:
        context.request_last_kv_block_id[row] = twin
    kv.release_memory_blocks(torch.tensor([block], dtype=torch.int32, device="cpu"))
    return True


def _queue_restore(context: Any, row: int, finished: int, match: HostMatch) -> None:
    """Let the next step restore the state; the slot stays pinned until the restore is launched."""
    if not match.skip_tokens:
        return
    queue = context._pending_mamba_restores
    live_slot = int(context.mamba_metadata.request_to_mamba_state_idx[row])
    if finished == 0:
        queue.pop()
    queue.append((row, match.state_block, live_slot))
    context.mamba_slot_allocator.pin_restore(match.state_block)


@override(DYNAMIC_CONTEXT, "_execute_pending_mamba_ops", faults=(4, 21))
def execute_pending_mamba_ops(original: Callable[..., None], self: Any) -> None:
    """Restore all states of the step in one copy; a missing state is an error."""
    if self._pending_mamba_restores:
        restores = [(block, live_slot) for _, block, live_slot in self._pending_mamba_restores]
        self._pending_mamba_restores.clear()
        self.mamba_slot_allocator.restore_batch(restores)
    original(self)


@override(MHA_METADATA, "set_state_data", faults=(1,))
def set_state_data(
    original: Callable[..., None],
    self: Any,
    padded_active_request_count: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> None:
    """Bound query lengths of prefills by two: with 1, flash attention's varlen kernels crash on paged KV."""
    original(self, padded_active_request_count, max(2, max_seqlen_q), max_seqlen_k)


@override(KV_ALLOCATOR, "register_kv_block_hashes", faults=(5,))
def register_kv_block_hashes(
    original: Callable[..., None],
    self: Any,
    block_ids: list[int],
    block_hashes: list[int],
    parent_hashes: list[int] | None = None,
) -> None:
    """Register blocks whose hash is not registered; the others stay private, or as they are."""
    check_lengths(block_ids, block_hashes=block_hashes, parent_hashes=parent_hashes)
    index_of_hash: dict[int, int] = {}  # of the first block with a new hash
    for index, prefix_hash in enumerate(block_hashes):
        if prefix_hash not in self.kv_hash_to_block_id:
            index_of_hash.setdefault(prefix_hash, index)
    record_of(self.context).new_hashes.update(index_of_hash)
    indices = index_of_hash.values()
    parents = None if parent_hashes is None else [parent_hashes[index] for index in indices]
    original(self, [block_ids[index] for index in indices], list(index_of_hash), parents)


@override(DYNAMIC_ENGINE, "schedule_chunked_prefill", any_source=True)
def schedule_chunked_prefill(original: Callable[[Any], None], self: Any) -> None:
    """Also schedule prompts that fit whole behind one that waits for blocks which the step computes."""
    context = self.context
    queue = self.waiting_request_ids
    record = record_of(context)
    num_waits = self._prefix_coordination_waits
    record.new_hashes.clear()
    original(self)
    uses_drop_in = caches_states(context) and not is_on_stock(context)
    while uses_drop_in and self._prefix_coordination_waits > num_waits:
        num_waits = self._prefix_coordination_waits
        request_ids = list(queue)
        fitting_ids = _fitting_behind(self, record.new_hashes)
        record.unqueued_ids = [number for number in request_ids if number not in fitting_ids]
        queue.clear()
        queue.extend(fitting_ids)
        try:
            original(self)
        finally:
            record.unqueued_ids = []
            scheduled_ids = set(fitting_ids).difference(queue)
            queue.clear()
            queue.extend(number for number in request_ids if number not in scheduled_ids)
            first_id = context.chunked_prefill_request_id
            if first_id in queue:  # the host continues it before others
                queue.remove(first_id)
                queue.appendleft(first_id)


def _fitting_behind(engine: Any, hashes: set[int]) -> list[int]:
    """Waiting requests without blocks of `hashes`, which fit in the step whole and beside those that wait."""
    context = engine.context
    fitting_ids: list[int] = []
    num_blocks = 0
    room = context.max_tokens - context.active_token_count
    rows = context.max_requests - context.total_request_count
    for number in islice(engine.waiting_request_ids, min(rows, MAX_COMPARED)):
        req = engine.get_request(number)
        length = len(req.remaining_prompt_tokens)
        match = match_chunk(context, req, length)
        num_blocks += match.new_blocks
        if not context.kv_block_allocator.is_memory_available(num_blocks):
            break
        if hashes.isdisjoint(req.precomputed_block_hashes) and length - match.skip_tokens <= room:
            fitting_ids.append(number)
            room -= length - match.skip_tokens
    return fitting_ids
