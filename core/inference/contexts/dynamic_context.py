"""The requests in flight, what they hold, and one step of all of them."""

import logging
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from ...cache_stats import CacheStats, TokenLedger
from ...config import HybridStateSpec, InferenceConfig
from ...errors import RequestOverflowError
from ...request import DynamicInferenceRequest
from ..kernels.state_copy import StateTensors, copy_states
from ..policies.checkpoint_plan import Boundary
from .kv_block_allocator import KVBlockAllocator, Parent
from .mamba_metadata import MambaMetadata
from .mamba_slot_allocator import MambaSlotAllocator
from .prefix_index import PrefixIndex, PrefixMatch
from .request_rows import RequestRows
from .scheduled_chunk import ScheduledChunk
from .state_pool import StatePool
from .step_builder import BatchDimensions, build_step_inputs
from .step_checkpoints import StepCheckpoints
from .step_inputs import StepInputs

logger = logging.getLogger(__name__)

MEBIBYTE = 1 << 20


class DynamicInferenceContext:
    """Rows, KV blocks, live and durable states of the requests that run at once.

    One step is `schedule` for each request that is to advance, `begin_step`, the model's forward, and
    `end_step` (or `abort_step`). `release` gives back all a request holds.

    Attributes that a host's allocator contract names: block_size_tokens, mamba_chunk_size, max_requests,
    kv_block_allocator, mamba_slot_allocator (None without prefix caching), mamba_metadata, state_pool,
    mamba_conv_states, mamba_ssm_states [layers, live slots, ...], request_to_kv_block_ids
    [max_requests, blocks of the longest sequence] int32 on the CPU, batch_dimensions,
    paused_request_count. Also kv_cache [attention layers, 2, blocks, block_size_tokens, kv heads, head dim].
    """

    def __init__(self, spec: HybridStateSpec, config: InferenceConfig) -> None:
        if config.enable_prefix_caching and config.block_size_tokens % spec.ssd_chunk_size:
            raise ValueError(
                f"block_size_tokens is {config.block_size_tokens}; accepted: a multiple of the model's SSD "
                f"chunk ({spec.ssd_chunk_size}), the only positions inside a prefill where states exist"
            )
        self.spec = spec
        self.config = config
        self.block_size_tokens = config.block_size_tokens
        self.mamba_chunk_size = spec.ssd_chunk_size
        self.max_requests = config.max_requests
        self.max_tokens = config.max_tokens
        self.prefix_caching_eviction_policy = config.prefix_caching_eviction_policy
        self.checkpoint_plan = config.checkpoint_plan
        num_blocks, num_slots = config.kv_block_count(spec), config.mamba_slot_count(spec)

        self.kv_cache = torch.zeros(
            (spec.num_attention_layers, 2, num_blocks, self.block_size_tokens, spec.num_kv_heads,
            spec.head_dim), dtype=spec.kv_dtype, device=spec.device,
        )  # fmt: skip
        self.state_pool = StatePool(
            spec.num_mamba_layers, self.max_requests, num_slots, spec.conv_states_shape,
            spec.ssm_states_shape, spec.conv_states_dtype, spec.ssm_states_dtype, spec.device,
        )  # fmt: skip
        self.mamba_metadata = MambaMetadata(self.max_requests)
        self.kv_block_allocator = KVBlockAllocator(
            num_blocks, config.enable_prefix_caching, config.prefix_caching_eviction_policy
        )
        self.mamba_slot_allocator: MambaSlotAllocator | None = None
        self._checkpoints: StepCheckpoints | None = None
        if config.enable_prefix_caching:
            self.mamba_slot_allocator = MambaSlotAllocator(
                self, num_slots, spec.num_mamba_layers, spec.conv_states_shape, spec.ssm_states_shape,
                spec.conv_states_dtype, spec.ssm_states_dtype,
            )  # fmt: skip
            self.kv_block_allocator.on_blocks_deregistered = (
                self.mamba_slot_allocator.on_kv_blocks_deregistered
            )
            self.kv_block_allocator.holds_state = self.mamba_slot_allocator.has_state
            self._checkpoints = StepCheckpoints(
                self.mamba_slot_allocator, self.kv_block_allocator, self.block_size_tokens
            )
        self._index = PrefixIndex(self.block_size_tokens, self.kv_block_allocator, self.mamba_slot_allocator)

        blocks_per_row = min(num_blocks, -(-config.max_sequence_length // self.block_size_tokens))
        self._rows = RequestRows(self.max_requests, blocks_per_row, self.mamba_metadata)
        self.request_to_kv_block_ids = self._rows.block_table
        self.batch_dimensions = BatchDimensions(0, 0)
        self._step: list[ScheduledChunk] = []
        self._ledger = TokenLedger()
        self._requests_seen = 0
        logger.info(self.memory_summary())

    @property
    def mamba_conv_states(self) -> Tensor:
        return self.state_pool.live_conv_states

    @property
    def mamba_ssm_states(self) -> Tensor:
        return self.state_pool.live_ssm_states

    @property
    def requests(self) -> list[DynamicInferenceRequest]:
        """The requests that hold a row, paused ones included."""
        return self._rows.requests

    @property
    def paused_request_count(self) -> int:
        return sum(request.paused for request in self.requests)

    @property
    def has_free_row(self) -> bool:
        return self._rows.free_count > 0

    def memory_summary(self) -> str:
        """What the bytes went to, in one line."""
        pool, kv = self.state_pool, self.kv_cache
        parts = [
            f"live states {pool.num_live} x {pool.bytes_per_state / MEBIBYTE:.3g} MiB",
            f"durable states {pool.num_durable} x {pool.bytes_per_state / MEBIBYTE:.3g} MiB",
            f"KV {kv.shape[2]} blocks of {self.block_size_tokens} tokens, {kv.nbytes / MEBIBYTE:.3g} MiB",
        ]
        total = kv.nbytes + (pool.num_live + pool.num_durable) * pool.bytes_per_state
        parts.append(f"scratch 0; total {total / MEBIBYTE:.4g} MiB on {self.spec.device}")
        return "mambaslots: " + "; ".join(parts)

    # ---- scheduling: resources for one request's next chunk

    def match(self, request: DynamicInferenceRequest) -> PrefixMatch:
        """What the cache knows of all tokens of a request; changes nothing but its hash chain."""
        if self.config.enable_prefix_caching:
            request.hashes.extend_to(request.tokens)
        return self._index.match(
            request.hashes, len(request.tokens), not request.sampling.returns_prompt_log_probs
        )

    def schedule(
        self, request: DynamicInferenceRequest, token_budget: int, match: PrefixMatch | None = None
    ) -> ScheduledChunk | None:
        """Give a request the blocks for its next chunk of at most `token_budget` tokens.

        A request without a row is admitted: it gets a row and a live slot, references to the KV blocks
        it shares, and its resume state pinned. A later prefill chunk is matched again by the same rule, and
        may jump ahead to what others have computed since. `match` saves matching again.

        None, and nothing changed, when too few KV blocks or tokens are left; RequestOverflowError when no
        row is.
        """
        if request.row >= 0 and request.decoding:
            return self._schedule_decode(request)
        if request.row < 0 and not self._rows.free_count:
            raise RequestOverflowError(self.max_requests + 1, self.max_requests)
        match = match or self.match(request)
        ahead = match.resume_tokens > request.computed
        start = match.resume_tokens if ahead else request.computed
        stop = self._chunk_stop(start, len(request.tokens), token_budget)
        shared = match.blocks[request.registered_blocks :]
        kept = max(len(match.blocks), 0 if shared else len(request.blocks))
        if stop <= start or not self._affordable(request, stop, kept, shared):
            return None
        if request.row < 0:
            self._rows.take(request)
            request.prefill_length = len(request.tokens)
            self._requests_seen += request.accounted == 0
        if shared:
            self._adopt(request, list(shared))
        missing = max(0, self._blocks_for(stop) - len(request.blocks))
        self._rows.append_blocks(request, self.kv_block_allocator.allocate_memory_blocks(missing))
        if ahead:
            self._read_from(request, match.resume_slot)
        request.seen_tokens = match.seen_tokens
        skipped = start - request.computed
        request.computed = start
        return ScheduledChunk(request, start, stop, skipped, match.spans, self._plan(request, start, stop))

    def _schedule_decode(self, request: DynamicInferenceRequest) -> ScheduledChunk | None:
        start = request.computed
        if start == len(request.blocks) * self.block_size_tokens:
            if not self.kv_block_allocator.is_memory_available(1):
                return None
            self._rows.append_blocks(request, self.kv_block_allocator.allocate_memory_blocks(1))
        return ScheduledChunk(request, start, start + 1, boundaries=self._plan(request, start, start + 1))

    def _chunk_stop(self, start: int, length: int, budget: int) -> int:
        """Cuts fall on a block, else on the SSD grid, so that states at chunk ends can be kept."""
        if length - start <= budget:
            return length
        if not self.config.enable_chunked_prefill:
            return start
        for grid in (self.block_size_tokens, self.mamba_chunk_size):
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
        return self.kv_block_allocator.is_memory_available(
            needed, self.kv_block_allocator.count_cached(shared)
        )

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size_tokens)

    def _plan(self, request: DynamicInferenceRequest, start: int, stop: int) -> tuple[Boundary, ...]:
        if not self.config.enable_prefix_caching:
            return ()
        return request.plan.boundaries(
            start=start,
            stop=stop,
            prompt_tokens=request.prefill_length,
            block_size_tokens=self.block_size_tokens,
            seen_tokens=request.seen_tokens,
        )

    def boundary_keys(self, chunk: ScheduledChunk) -> set[int]:
        """The hashes under which the states that a chunk takes will be found."""
        return self._checkpoints.boundary_keys(chunk) if self._checkpoints else set()

    # ---- what a request holds

    def _adopt(self, request: DynamicInferenceRequest, shared: list[int]) -> None:
        """Go on with registered blocks in place of the request's own unfinished ones."""
        own = request.blocks[request.registered_blocks :]
        self.kv_block_allocator.add_references(shared)
        self.kv_block_allocator.release_memory_blocks(own)
        self._rows.replace_blocks(request, request.registered_blocks, shared)
        request.registered_blocks = len(request.blocks)

    def _read_from(self, request: DynamicInferenceRequest, slot: int) -> None:
        """The request's state is now the one in durable `slot`; pinned until a step has read it."""
        self._unpin(request)
        self._slots.pin(slot)
        self._slots.note_use(slot)
        request.pinned_slot = slot
        request.state_index = self.state_pool.durable_index(slot)

    def _unpin(self, request: DynamicInferenceRequest) -> None:
        if request.pinned_slot >= 0:
            self._slots.unpin(request.pinned_slot)
            request.pinned_slot = -1

    @property
    def _slots(self) -> MambaSlotAllocator:
        if self.mamba_slot_allocator is None:
            raise RuntimeError("durable slots are used without prefix caching")
        return self.mamba_slot_allocator

    def release(self, request: DynamicInferenceRequest) -> None:
        """Take back all the request holds; it can be scheduled again, from its deepest cached state."""
        if request.row < 0:
            return
        self._unpin(request)
        self.kv_block_allocator.release_memory_blocks(request.blocks)
        self._rows.give_back(request)
        request.state_index = request.rolling_block = -1
        request.registered_blocks = request.computed = request.seen_tokens = 0
        request.paused = False

    # ---- one step

    def begin_step(self, chunks: Sequence[ScheduledChunk]) -> StepInputs:
        """Reserve slots for the planned checkpoints and build the model's inputs, decode rows first.

        The inputs' index tensors are copied to the device without synchronising.
        """
        if self._step:
            raise RuntimeError("begin_step before the previous step ended; call end_step or abort_step first")
        ordered = sorted(chunks, key=lambda chunk: not chunk.decoding)
        self._step = self._checkpoints.reserve(ordered) if self._checkpoints else ordered
        decodes = sum(chunk.decoding for chunk in ordered)
        self.batch_dimensions = BatchDimensions(decodes, len(ordered) - decodes)
        return build_step_inputs(self, self._step)

    @property
    def step_chunks(self) -> tuple[ScheduledChunk, ...]:
        """The step under way, in row order."""
        return tuple(self._step)

    def state_destination(self, chunk: ScheduledChunk) -> int:
        """The pool index where the chunk's last state goes: the slot reserved for it, or the live one."""
        slot = chunk.destinations.get(chunk.stop, -1)
        return self._rows.live_slot(chunk.request) if slot < 0 else self.state_pool.durable_index(slot)

    def end_step(self) -> None:
        """The forward has been launched: register KV, commit states, advance requests; no synchronisation."""
        for chunk in self._step:
            request = chunk.request
            self._unpin(request)
            counts = chunk.token_counts()
            request.ledger.add(counts)
            self._ledger.add(counts)
            request.accounted = max(request.accounted, chunk.stop)
            request.computed = chunk.stop
            request.state_index = self.state_destination(chunk)
            if self._checkpoints is not None:
                self._register(request)
                self._settle(chunk, self._checkpoints.commit(chunk))
                if chunk.destinations:
                    self._checkpoints.trim_path(request)
        self._step = []

    def _settle(self, chunk: ScheduledChunk, committed: dict[int, int]) -> None:
        """A request whose chunk ended on a boundary reads its next state from the durable slot there."""
        if chunk.stop not in committed:
            return
        slot = committed[chunk.stop]
        if slot >= 0:
            self._slots.pin(slot)
            chunk.request.pinned_slot = slot
            chunk.request.state_index = self.state_pool.durable_index(slot)
        else:  # not findable, so not kept: nothing has overwritten it yet
            self._move_to_live(chunk.request)

    def abort_step(self) -> None:
        """The forward did not happen, or failed half-way: nothing it may have written is used.

        Every request of the step is released; scheduled again, it restarts from its last cached state.
        """
        if self._checkpoints is not None:
            self._checkpoints.release(self._step)
        for chunk in self._step:
            self.release(chunk.request)
        self._step = []

    def _register(self, request: DynamicInferenceRequest) -> None:
        """Make the blocks this step completed findable; a twin registered earlier takes the place of ours."""
        first, stop = request.registered_blocks, request.computed // self.block_size_tokens
        if stop <= first:
            return
        chain, kv = request.hashes, self.kv_block_allocator
        chain.extend_to(request.tokens, request.computed)
        parent: Parent = request.blocks[first - 1] if first else chain.salt
        own, rest = request.blocks[first:stop], request.blocks[stop:]
        canonical = kv.register_chain(parent, own, chain.keys[first:stop], chain.tokens[first:stop])
        twins = [(mine, theirs) for mine, theirs in zip(own, canonical, strict=False) if mine != theirs]
        if twins:
            kv.add_references([theirs for _, theirs in twins])
            kv.release_memory_blocks([mine for mine, _ in twins])
            self._rows.replace_blocks(request, first, canonical + own[len(canonical) :] + rest)
        request.registered_blocks = first + len(canonical)

    def _move_to_live(self, request: DynamicInferenceRequest) -> None:
        """Copy the state a request has only in a durable slot to its live slot."""
        states = StateTensors(self.state_pool.conv_states, self.state_pool.ssm_states)
        live = self._rows.live_slot(request)
        copy_states(states, [request.state_index], states, [live])
        request.state_index = live

    # ---- the whole

    def reset(self) -> None:
        """Drop every request, prefix, state, reservation and count; the pools stay allocated."""
        self._step = []
        for request in self.requests:
            self.release(request)
        self.kv_block_allocator.reset()
        if self.mamba_slot_allocator is not None:
            self.mamba_slot_allocator.reset()
        self.batch_dimensions = BatchDimensions(0, 0)
        self._ledger = TokenLedger()
        self._requests_seen = 0

    def cache_stats(self) -> CacheStats:
        slots, kv, ledger = self.mamba_slot_allocator, self.kv_block_allocator, self._ledger
        return CacheStats(
            requests=self._requests_seen,
            prompt_tokens=ledger.prompt,
            resumed_tokens=ledger.resumed,
            computed_tokens=ledger.computed_tokens,
            computed_by_reason=ledger.by_reason(),
            recomputed_tokens=ledger.recomputed,
            slots_free=slots.free_count if slots else 0,
            slots_reserved=slots.reserved_count if slots else 0,
            slots_committed=slots.committed_count if slots else 0,
            states_committed_total=slots.committed_total if slots else 0,
            states_evicted_total=slots.evicted_total if slots else 0,
            kv_blocks_free=kv.total_avail,
            kv_blocks_cached=kv.cached_count,
            kv_blocks_held=kv.held_count,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError where requests, pools and maps contradict each other; O(pools)."""
        self.kv_block_allocator.check_integrity()
        self.mamba_metadata.check_integrity()
        self._rows.check_integrity()
        references = torch.zeros_like(self.kv_block_allocator.block_ref_counts)
        pins: Counter[int] = Counter()
        for request in self.requests:
            for block in request.blocks:
                references[block] += 1
            assert request.computed <= len(request.blocks) * self.block_size_tokens
            if request.pinned_slot >= 0:
                pins[request.pinned_slot] += 1
                assert request.state_index == self.state_pool.durable_index(request.pinned_slot)
            elif request.computed and not self._step:
                assert request.state_index == self._rows.live_slot(request)
        assert torch.equal(references, self.kv_block_allocator.block_ref_counts), "a KV reference leaked"
        if self.mamba_slot_allocator is not None:
            self.mamba_slot_allocator.check_integrity()
            assert pins == self.mamba_slot_allocator.pins, "a pin leaked"
            assert self._step or not self.mamba_slot_allocator.reserved_count, "a reservation leaked"
