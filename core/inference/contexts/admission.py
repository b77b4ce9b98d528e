"""What a request needs for its next chunk: a row, a state to start from, and KV blocks."""

from collections.abc import Sequence
from dataclasses import replace

from ...cache_stats import Span
from ...config import InferenceConfig
from ...errors import RequestOverflowError
from ...request import DynamicInferenceRequest
from ..policies.checkpoint_plan import Boundary
from .kv_block_allocator import KVBlockAllocator
from .prefix_index import PrefixIndex, PrefixMatch
from .request_rows import RequestRows
from .request_states import RequestStates
from .scheduled_chunk import ScheduledChunk


class Admission:
    """Gives requests what their next chunk needs, all of it or nothing."""

    def __init__(
        self,
        config: InferenceConfig,
        ssd_chunk_size: int,
        index: PrefixIndex,
        kv_blocks: KVBlockAllocator,
        rows: RequestRows,
        states: RequestStates,
    ) -> None:
        self._config = config
        self._block_size = config.block_size_tokens
        self._ssd_chunk_size = ssd_chunk_size
        self._index = index
        self._kv_blocks = kv_blocks
        self._rows = rows
        self._states = states

    def match(self, request: DynamicInferenceRequest) -> PrefixMatch:
        """What the cache knows of all tokens of a request; changes nothing but its hash chain."""
        length = len(request.tokens)
        if request.row >= 0 and not request.shares_cache:
            return PrefixMatch((), 0, -1, 0, (Span(0, length, "disabled"),), self._index.version)
        if self._config.enable_prefix_caching:
            request.hashes.extend_to(request.tokens)
        held = request.blocks[: request.immutable_blocks]
        return self._index.match(request.hashes, length, held, not request.sampling.returns_prompt_log_probs)

    def schedule(
        self, request: DynamicInferenceRequest, token_budget: int, match: PrefixMatch | None
    ) -> ScheduledChunk | None:
        """See `DynamicInferenceContext.schedule`."""
        if request.row >= 0 and request.decoding:
            return self._schedule_decode(request)
        if request.row < 0 and not self._rows.free_count:
            raise RequestOverflowError(self._rows.count + 1, self._rows.count)
        if match is None or match.version != self._index.version:
            match = self.match(request)
        ahead = match.resume_tokens > request.computed
        start = match.resume_tokens if ahead else request.computed
        stop = self._chunk_stop(start, len(request.tokens), token_budget)
        shared = match.blocks[request.immutable_blocks :]
        kept = len(match.blocks) if shared else len(request.blocks)
        if stop <= start or not self._affordable(request, stop, kept, shared):
            return None
        if request.row < 0:
            self._rows.take(request)
            request.prefill_length = len(request.tokens)
            request.shares_cache = self._config.enable_prefix_caching
        if shared:
            self._adopt(request, list(shared))
        missing = max(0, self._blocks_for(stop) - len(request.blocks))
        self._rows.append_blocks(request, self._kv_blocks.allocate_memory_blocks(missing))
        if ahead:
            self._states.resume(request, match.resume_slot)
        if ahead or not request.computed:
            request.spans = match.spans
        request.seen_tokens = match.seen_tokens
        skipped = start - request.computed
        request.computed = start
        return ScheduledChunk(request, start, stop, skipped, request.spans, self._plan(request, start, stop))

    def _schedule_decode(self, request: DynamicInferenceRequest) -> ScheduledChunk | None:
        start = request.computed
        if start == len(request.blocks) * self._block_size:
            if not self._kv_blocks.is_memory_available(1):
                return None
            self._rows.append_blocks(request, self._kv_blocks.allocate_memory_blocks(1))
        return ScheduledChunk(request, start, start + 1, boundaries=self._plan(request, start, start + 1))

    def draft(self, chunk: ScheduledChunk, tokens: Sequence[int]) -> ScheduledChunk:
        """See `DynamicInferenceContext.draft`."""
        request = chunk.request
        room = len(request.blocks) * self._block_size - chunk.stop
        missing = self._blocks_for(max(0, len(tokens) - room))
        while missing and not self._kv_blocks.is_memory_available(missing):
            missing -= 1
        if missing:
            self._rows.append_blocks(request, self._kv_blocks.allocate_memory_blocks(missing))
        tokens = tuple(tokens[: room + missing * self._block_size])
        if not tokens:
            return chunk
        stop = chunk.stop + len(tokens)
        return replace(chunk, stop=stop, drafts=tokens, boundaries=self._plan(request, chunk.start, stop))

    def trim(self, request: DynamicInferenceRequest) -> None:
        """Give back the KV blocks that only drafts needed: what is left is what plain decoding would hold."""
        needed = self._blocks_for(request.computed)
        unneeded = request.blocks[needed:]
        if unneeded:
            self._rows.replace_blocks(request, needed, [])
            self._kv_blocks.release_memory_blocks(unneeded)

    def _chunk_stop(self, start: int, length: int, budget: int) -> int:
        """Cuts fall on a block, else on the SSD grid, so that states at chunk ends can be kept."""
        if length - start <= budget:
            return length
        if not self._config.enable_chunked_prefill:
            return start
        for grid in (self._block_size, self._ssd_chunk_size):
            stop = (start + budget) // grid * grid
            if stop > start:
                return stop
        return start + budget

    def _affordable(
        self, request: DynamicInferenceRequest, stop: int, kept: int, shared: Sequence[int]
    ) -> bool:
        """Whether the chunk's blocks can be had; a new request also waits until its whole prompt fits."""
        length = len(request.tokens) if request.row < 0 else stop
        needed = max(0, self._blocks_for(length) - kept)
        return self._kv_blocks.is_memory_available(needed, self._kv_blocks.count_cached(shared))

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _plan(self, request: DynamicInferenceRequest, start: int, stop: int) -> tuple[Boundary, ...]:
        if not request.shares_cache or start // self._block_size == stop // self._block_size:
            return ()  # no boundary in (start, stop]
        return request.plan.boundaries(
            start=start,
            stop=stop,
            prompt_tokens=request.prefill_length,
            block_size_tokens=self._block_size,
            seen_tokens=request.seen_tokens,
        )

    def _adopt(self, request: DynamicInferenceRequest, shared: list[int]) -> None:
        """Go on with registered blocks in place of the request's own unfinished ones."""
        own = request.blocks[request.immutable_blocks :]
        self._kv_blocks.add_references(shared)
        self._kv_blocks.release_memory_blocks(own)
        self._rows.replace_blocks(request, request.immutable_blocks, shared)
        request.immutable_blocks = len(request.blocks)
