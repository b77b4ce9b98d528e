"""Where a request of the host can resume."""

from dataclasses import dataclass
from typing import Any

from ..inference.contexts.cache import reasons as policy
from ..inference.contexts.cache.reasons import Span
from .host_record import HostRecord


@dataclass(frozen=True)
class HostMatch:
    """What a prefill chunk can share and skip; holds and pins nothing.

    Attributes:
        first_block: blocks of the sequence that the request has already.
        matched_blocks: registered KV blocks that follow them.
        required_blocks: blocks of the sequence up to the chunk's end.
        skip_tokens: tokens of the chunk that need not be computed, up to a boundary that has a state.
        state_block: the block whose state is at that boundary, or -1.
        resumable_blocks: depth, from `first_block`, of the deepest matched block that has a state.
    """

    first_block: int
    matched_blocks: tuple[int, ...]
    required_blocks: int
    skip_tokens: int
    state_block: int
    resumable_blocks: int

    @property
    def new_blocks(self) -> int:
        return max(0, self.required_blocks - self.first_block - len(self.matched_blocks))


def match_chunk(context: Any, request: Any, length: int) -> HostMatch:
    """Match the next `length` tokens of a request of a hybrid model.

    The same rule for every chunk: skip to the deepest boundary that has a committed state, lies within the
    matched KV and leaves a token to compute; without a state nothing is skipped.
    """
    size = int(context.block_size_tokens)
    finished = int(request.finished_chunk_token_count)
    first = -(-finished // size)
    required = -(-(finished + length) // size)
    keys = request.precomputed_block_hashes[first:required]
    named = context.kv_block_allocator.kv_hash_to_block_id
    matched: list[int] = []
    for key in keys:
        block = named.get(key)
        if block is None:
            break
        matched.append(block)

    allocator = getattr(context, "mamba_slot_allocator", None)
    skip, state_block, resumable = 0, -1, 0
    if allocator is not None and finished % size == 0:
        states = allocator.hash_to_block_id
        reachable = 0 if _needs_every_token(request) else length - 1
        for depth in range(len(matched), 0, -1):
            if keys[depth - 1] not in states:
                continue
            resumable = resumable or depth
            if depth * size <= reachable:
                skip, state_block = depth * size, states[keys[depth - 1]]
                break
    return HostMatch(first, tuple(matched), required, skip, state_block, resumable)


def _needs_every_token(request: Any) -> bool:
    """Whether the request returns log-probs of its prompt."""
    sampling = request.sampling_params
    wants = getattr(sampling, "return_log_probs", False) or getattr(sampling, "top_n_logprobs", 0)
    return bool(wants) and not getattr(sampling, "skip_prompt_log_probs", True)


def compute_spans(context: Any, record: HostRecord, request: Any, skipped: int) -> tuple[Span, ...]:
    """Why each prompt token after `skipped` is computed, judged when the request's first chunk is added."""
    size, keys = int(context.block_size_tokens), request.precomputed_block_hashes
    length = len(request.prompt_tokens)
    allocator = getattr(context, "mamba_slot_allocator", None)
    if allocator is None or _needs_every_token(request) or (not keys and length >= size):
        return (Span(0, length, "disabled"),)
    kv_blocks, state_ghosts = context.kv_block_allocator.kv_hash_to_block_id, allocator.ghosts
    matched = next((d for d, key in enumerate(keys) if key not in kv_blocks), len(keys))
    seen = next((d for d in range(matched, len(keys)) if keys[d] not in record.kv_ghosts), len(keys))
    depth = skipped // size
    return policy.compute_spans(
        keys,
        num_resumed=depth,
        num_reachable=max(depth, min(matched, (length - 1) // size)),
        num_matched=matched,
        num_seen=seen,
        num_tokens=length,
        block_size_tokens=size,
        state_ghosts=state_ghosts,
    )
