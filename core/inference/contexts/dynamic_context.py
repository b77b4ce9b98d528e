"""The requests in flight, what they hold, and one step of all of them."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ...cache_stats import CacheStats, TokenLedger
from ...config import InferenceConfig
from ...pool_sizes import PoolSizes
from ...request import DynamicInferenceRequest
from ...state_spec import HybridStateSpec
from ...tensor_validation import addressable
from ...validation import instance, integer, integers, shown
from ..policies.prefix_hash import PrefixHashChain
from .admission import Admission
from .kv_block_allocator import KVBlockAllocator, Parent
from .mamba_metadata import MambaMetadata
from .mamba_slot_allocator import MambaSlotAllocator
from .pinned_prefixes import PinnedPrefix, PinnedPrefixes
from .prefix_index import PrefixIndex, PrefixMatch
from .request_rows import RequestRows
from .request_states import RequestStates
from .scheduled_chunk import ScheduledChunk
from .state_pool import StatePool
from .step_buffer import StepBuffer
from .step_builder import BatchDimensions, Padding, build_step_inputs
from .step_checkpoints import StepCheckpoints
from .step_inputs import StepInputs, StepShape

logger = logging.getLogger(__name__)

MEBIBYTE = 1 << 20


class StepObserver(Protocol):
    """Told what a context decided. What it raises fails the step, like any error of the step itself."""

    def step_begun(self, chunks: Sequence[ScheduledChunk], inputs: StepInputs) -> None:
        """All is reserved and built for these chunks, in row order; no forward has been launched."""

    def step_ended(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Their states are committed and their requests advanced; wrong drafts are no longer among them."""


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
        instance("spec", spec, HybridStateSpec)
        instance("config", config, InferenceConfig)
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
        self.num_speculative_tokens = config.num_speculative_tokens
        self.prefix_caching_eviction_policy = config.prefix_caching_eviction_policy
        self.checkpoint_plan = config.checkpoint_plan
        sizes = PoolSizes.of(config, spec)
        self._num_kv_blocks, num_slots = sizes.num_kv_blocks, sizes.num_mamba_slots

        self.kv_cache = self._new_kv_cache()
        live_slots = self.max_requests * (1 + self.num_speculative_tokens)
        self.state_pool = StatePool(
            spec.num_mamba_layers, live_slots, num_slots, spec.conv_states_shape,
            spec.ssm_states_shape, spec.conv_states_dtype, spec.ssm_states_dtype, spec.device,
        )  # fmt: skip
        self.mamba_metadata = MambaMetadata(self.max_requests, live_slots)
        self.kv_block_allocator = KVBlockAllocator(
            self._num_kv_blocks, config.enable_prefix_caching, config.prefix_caching_eviction_policy
        )
        self.mamba_slot_allocator: MambaSlotAllocator | None = None
        self._checkpoints: StepCheckpoints | None = None
        self._pinned: PinnedPrefixes | None = None
        if config.enable_prefix_caching:
            self._connect_slots()
        self._index = PrefixIndex(self.block_size_tokens, self.kv_block_allocator, self.mamba_slot_allocator)

        self._empty_rows()
        self.step_buffer = StepBuffer(self._largest_step(), spec.device)
        self.batch_dimensions = BatchDimensions(0, 0)
        self._step: list[ScheduledChunk] = []
        self._observers: list[StepObserver] = []
        self._ledger = TokenLedger()
        self._requests_seen = 0
        logger.info(self.memory_summary())

    def _connect_slots(self) -> None:
        spec, kv = self.spec, self.kv_block_allocator
        slots = MambaSlotAllocator(
            self, self.state_pool.num_durable, spec.num_mamba_layers, spec.conv_states_shape,
            spec.ssm_states_shape, spec.conv_states_dtype, spec.ssm_states_dtype,
        )  # fmt: skip
        kv.on_blocks_deregistered = slots.on_kv_blocks_deregistered
        kv.holds_state = slots.has_state
        self.mamba_slot_allocator = slots
        self._checkpoints = StepCheckpoints(slots, kv, self.block_size_tokens)
        self._pinned = PinnedPrefixes(slots, kv)

    def _empty_rows(self) -> None:
        config, kv = self.config, self.kv_block_allocator
        blocks_per_row = min(kv.total_count, -(-config.max_sequence_length // self.block_size_tokens))
        self.mamba_metadata.reset()
        self._rows = RequestRows(
            self.max_requests, blocks_per_row, self.mamba_metadata, 1 + self.num_speculative_tokens
        )
        self.request_to_kv_block_ids = self._rows.block_table
        self._states = RequestStates(
            self.state_pool, self._rows, self.mamba_slot_allocator, self.spec.separate_states
        )
        self._admission = Admission(
            config, self.spec.ssd_chunk_size, self._index, kv, self._rows, self._states
        )

    def _largest_step(self) -> StepShape:
        """No step, padded or not, is larger in any size."""
        rows, tokens = self.max_requests, self.max_tokens
        decode_tokens = 1 + self.num_speculative_tokens
        return StepShape(
            decodes=rows,
            prefills=rows,
            prefill_tokens=tokens,
            max_query_tokens=tokens,
            table_blocks=self.request_to_kv_block_ids.shape[1],
            kv_writes=rows * decode_tokens + tokens,
            chunks=-(-tokens // self.mamba_chunk_size) + 2 * rows,
            checkpoints=-(-tokens // self.mamba_chunk_size) + rows,
            logits=rows * decode_tokens + tokens,
            decode_tokens=decode_tokens,
        )

    def _new_kv_cache(self) -> Tensor:
        spec, blocks = self.spec, self._num_kv_blocks
        shape = (
            spec.num_attention_layers, 2, blocks, self.block_size_tokens, spec.num_kv_heads, spec.head_dim,
        )  # fmt: skip
        addressable("num_kv_blocks", blocks, shape, spec.kv_dtype)
        return torch.zeros(shape, dtype=spec.kv_dtype, device=spec.device)

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
        pool, blocks = self.state_pool, self.kv_block_allocator.total_count
        state = self.spec.state_bytes / MEBIBYTE
        kv = blocks * self.spec.kv_block_bytes(self.block_size_tokens) / MEBIBYTE
        total = (pool.num_live + pool.num_durable) * state + kv
        return (
            f"mambaslots: live states {pool.num_live} x {state:.3g} MiB; "
            f"durable states {pool.num_durable} x {state:.3g} MiB; "
            f"KV {blocks} blocks of {self.block_size_tokens} tokens, {kv:.3g} MiB; "
            f"scratch 0; total {total:.4g} MiB on {self.spec.device}"
        )

    # ---- requests

    def match(self, request: DynamicInferenceRequest) -> PrefixMatch:
        """What the cache knows of all tokens of a request; changes nothing but its hash chain."""
        self._check_request(request)
        return self._admission.match(request)

    def schedule(
        self, request: DynamicInferenceRequest, token_budget: int, match: PrefixMatch | None = None
    ) -> ScheduledChunk | None:
        """Give a request what its next chunk, of at most `token_budget` tokens, needs.

        A request without a row is admitted: it gets a row and a live slot, references to the KV blocks
        it shares, and its resume state pinned. A later prefill chunk is matched again by the same rule,
        and may jump ahead to what others have computed since. `match` saves matching again;
        one that no longer holds is made anew.

        None, and nothing changed, when too few KV blocks or tokens are left; RequestOverflowError when
        no row is.
        """
        self._check_between_steps("schedule")
        self._check_request(request)
        token_budget = integer("token_budget", token_budget, 0)
        if match is not None:
            instance("match", match, PrefixMatch)
        new = request.row < 0
        try:
            return self._admission.schedule(request, token_budget, match)
        except BaseException:
            if new:
                self.release(request)
            raise

    def draft(self, chunk: ScheduledChunk, tokens: Sequence[int]) -> ScheduledChunk:
        """Let a scheduled decode go on with drafts of what may follow, all verified in the same step.

        Takes the first of `tokens`: at most `most_drafts`, and only as far as there are KV blocks that nobody
        holds. Returns the chunk to use in place of `chunk`, or that itself where none is taken. After the
        step, `end_step` must be told how many of its tokens stay.
        """
        self._check_between_steps("draft")
        most = self.most_drafts(chunk)
        drafts = integers("tokens", tokens, 0, self.spec.vocab_size - 1)[:most]
        return self._admission.draft(chunk, drafts) if drafts else chunk

    def most_drafts(self, chunk: ScheduledChunk) -> int:
        """How many drafts a scheduled chunk may take, KV blocks permitting: 0 unless it is a plain decode."""
        self._check_chunk(chunk)
        if not chunk.decoding or chunk.drafts:
            return 0
        return max(0, min(self.num_speculative_tokens, chunk.request.max_length - chunk.stop - 1))

    def blocks_to_admit(self, request: DynamicInferenceRequest) -> tuple[int, int]:
        """How many KV blocks that nobody holds a waiting request needs, and how many there are."""
        kv, shared = self.kv_block_allocator, self.match(request).blocks
        needed = -(-len(request.tokens) // self.block_size_tokens) - len(shared) + kv.count_cached(shared)
        return needed, kv.total_count - kv.held_count

    def boundary_keys(self, chunk: ScheduledChunk) -> set[int]:
        """The hashes under which the states that a chunk takes will be found."""
        self._check_chunk(chunk)
        return self._checkpoints.boundary_keys(chunk) if self._checkpoints else set()

    def release(self, request: DynamicInferenceRequest) -> None:
        """Take back all the request holds; it can be scheduled again, from its deepest cached state.

        RuntimeError while a step under way computes it.
        """
        self._check_request(request)
        if request.row < 0:
            return
        if any(chunk.request is request for chunk in self._step):
            raise RuntimeError(
                f"request {request.request_id} is part of the step under way; end or abort it first"
            )
        self._states.unpin(request)
        blocks = request.blocks
        self._rows.give_back(request)
        _hold_nothing(request)
        self.kv_block_allocator.release_memory_blocks(blocks)  # last: it calls observers

    # ---- one step

    def begin_step(self, chunks: Sequence[ScheduledChunk], padding: Padding | None = None) -> StepInputs:
        """Reserve slots for the planned checkpoints and build the model's inputs, decode rows first.

        `padding`: from the step's shape to one, at least as large, that the inputs are padded to. The inputs'
        index tensors are copied to the device at once, without synchronising.
        """
        self._check_between_steps("begin_step")
        if not isinstance(chunks, Sequence):
            raise ValueError(f"chunks is {shown(chunks)}; accepted: a list of scheduled chunks")
        ready = {chunk.request.row for chunk in chunks if self._is_ready(chunk)}
        if not chunks or len(ready) < len(chunks):
            raise ValueError(
                f"chunks has {len(chunks)} entries, {len(ready)} of them ready; accepted: one or more, as "
                "`schedule` gave them, each for another request, to which nothing has happened since"
            )
        ordered = sorted(chunks, key=lambda chunk: not chunk.decoding)
        self._step = self._checkpoints.reserve(ordered) if self._checkpoints else ordered
        self._states.bring(self._step)
        decodes = sum(chunk.decoding for chunk in ordered)
        self.batch_dimensions = BatchDimensions(decodes, len(ordered) - decodes)
        inputs = build_step_inputs(self, self._step, padding)
        for observer in self._observers:
            observer.step_begun(self.step_chunks, inputs)
        return inputs

    @property
    def step_chunks(self) -> tuple[ScheduledChunk, ...]:
        """The step under way, in row order; empty between steps."""
        return tuple(self._step)

    def state_destination(self, chunk: ScheduledChunk) -> int:
        """The pool index where the last state of a chunk of this step goes."""
        self._check_chunk(chunk)
        return self._states.destination(chunk)

    def state_destinations(self, chunk: ScheduledChunk) -> list[int]:
        """Of a decode with drafts, the pool index for the state after each token; else for the last state."""
        self._check_chunk(chunk)
        return self._states.destinations(chunk)

    def end_step(self, kept: Mapping[int, int] | None = None) -> None:
        """The forward has been launched: register KV, commit states, advance requests; no synchronisation.

        `kept`: by id of each request that had drafts, how many of its chunk's tokens stay: all of them are
        among the request's tokens by now. KV and states of the others count as never written.
        """
        late = self._verified(kept or {}) if self.num_speculative_tokens else []
        self._states.store(self._step, late)
        for chunk in self._step:
            request = chunk.request
            self._states.unpin(request)
            self._account(chunk)
            request.computed = chunk.stop
            if request.shares_cache:
                self._register(request)
            committed = self._checkpoints.commit(chunk) if self._checkpoints else {}
            self._states.advance(chunk, committed)
            if committed and self._checkpoints:
                self._checkpoints.trim_path(request)
            if self.num_speculative_tokens and chunk.decoding:
                self._admission.trim(request)
        ended, self._step = self._step, []
        for observer in self._observers:
            observer.step_ended(tuple(ended))

    def observe(self, observer: StepObserver) -> None:
        """Tell `observer` of every step from now on, until `unobserve`."""
        calls = (getattr(observer, name, None) for name in ("step_begun", "step_ended"))
        if isinstance(observer, type) or not all(map(callable, calls)):
            raise ValueError(
                f"observer is {shown(observer)}; accepted: an object with `step_begun(chunks, inputs)` and "
                "`step_ended(chunks)`"
            )
        self._observers.append(observer)

    def unobserve(self, observer: StepObserver) -> None:
        """Tell `observer` of no further step; ValueError for one that is not told."""
        if not any(observer is known for known in self._observers):
            raise ValueError(f"observer is {shown(observer)}; accepted: one that observes this context")
        self._observers = [known for known in self._observers if known is not observer]

    def _verified(self, kept: Mapping[int, int]) -> list[ScheduledChunk]:
        """Cut the step's chunks to what stays of them; returns chunks with slots reserved only now."""
        step = [self._cut(chunk, kept) if chunk.drafts else chunk for chunk in self._step]
        late = self._checkpoints.settle(self._step, step) if self._checkpoints else []
        given = {chunk.request.row: chunk.destinations for chunk in late}
        self._step = [
            replace(chunk, destinations=chunk.destinations | given[chunk.request.row])
            if chunk.request.row in given
            else chunk
            for chunk in step
        ]
        return late

    def _cut(self, chunk: ScheduledChunk, kept: Mapping[int, int]) -> ScheduledChunk:
        request = chunk.request
        most = min(chunk.length, len(request.tokens) - chunk.start)
        return chunk.kept(integer(f"kept[{request.request_id}]", kept.get(request.request_id), 1, most))

    def abort_step(self) -> None:
        """The forward did not happen, or failed half-way: nothing it may have written is used.

        Every request of the step is released; scheduled again, it restarts from its last cached state.
        """
        aborted, self._step = self._step, []
        slots = self.mamba_slot_allocator
        if slots is not None:  # also what `begin_step` reserved before it failed
            slots.release_reservation([s for s in range(slots.max_slots) if slots.is_reserved(s)])
        for chunk in aborted:
            self.release(chunk.request)

    def _account(self, chunk: ScheduledChunk) -> None:
        request, counts = chunk.request, chunk.token_counts()
        self._requests_seen += request.accounted == 0
        request.accounted = max(request.accounted, chunk.stop)
        request.ledger.add(counts)
        self._ledger.add(counts)

    def _register(self, request: DynamicInferenceRequest) -> None:
        """Make the blocks this step completed findable; a twin registered earlier takes the place of ours."""
        first, stop = request.immutable_blocks, request.computed // self.block_size_tokens
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
        request.immutable_blocks = first + len(canonical)

    # ---- prefixes

    def resumable_tokens(self, tokens: Sequence[int], salt: bytes = b"") -> int:
        """How much of a prefix could be resumed now by a prompt that goes on beyond it."""
        return len(self._index.resumable_blocks(self._hashed(tokens, salt))) * self.block_size_tokens

    def pin_prefix(self, tokens: Sequence[int], salt: bytes = b"") -> PinnedPrefix:
        """Keep the deepest cached state of a prefix, and the KV up to it, until `unpin_prefix` or a reset.

        Raises ValueError where no boundary of `tokens` has a state.
        """
        blocks = self._index.resumable_blocks(self._hashed(tokens, salt))
        if self._pinned is None or not blocks:
            raise ValueError(f"tokens is a prefix of {len(tokens)} tokens; accepted: one with a cached state")
        return self._pinned.pin(blocks, len(blocks) * self.block_size_tokens)

    def unpin_prefix(self, prefix: PinnedPrefix) -> None:
        """Let go of a pinned prefix; ValueError if it is not pinned (any more)."""
        if self._pinned is None:
            raise ValueError(f"prefix is {shown(prefix)}; accepted: none, there is no prefix caching")
        self._pinned.unpin(prefix)

    def _hashed(self, tokens: Sequence[int], salt: bytes) -> PrefixHashChain:
        chain = PrefixHashChain(self.block_size_tokens, instance("salt", salt, bytes))
        chain.extend_to(integers("tokens", tokens, 0, self.spec.vocab_size - 1))
        return chain

    # ---- the whole

    def reset_prefix_cache(self) -> None:
        """Forget every prefix, state, pin and ghost; requests that run go on, and share nothing more.

        A state that a request has only in a durable slot is copied to its live slot first. What these
        requests compute afterwards is registered and committed nowhere. RuntimeError during a step.
        """
        self._check_between_steps("reset_prefix_cache")
        for request in self.requests:
            self._states.move_to_live(request)
            request.shares_cache = False
            request.rolling_block = -1
        if self._pinned is not None:
            self._pinned.unpin_all()
        self.kv_block_allocator.deregister_all()
        if self.mamba_slot_allocator is not None:
            self.mamba_slot_allocator.reset()

    @property
    def suspended(self) -> bool:
        return not self.state_pool.allocated

    def suspend(self) -> None:
        """Free the tensors of all pools; every request is released and every prefix forgotten."""
        self._check_between_steps("suspend")
        for request in self.requests:
            self.release(request)
        self.reset_prefix_cache()
        self.state_pool.free()
        self.kv_cache = self.kv_cache.new_empty(0)

    def resume(self) -> None:
        """Allocate the pools again, as zeros; nothing to do unless suspended."""
        if self.suspended:
            self.state_pool.allocate()
            self.kv_cache = self._new_kv_cache()

    def reset(self) -> None:
        """Drop every request, prefix, state, pin, reservation and count, also in the middle of a step.

        Relies on nothing being consistent: whatever a failure left behind is gone afterwards.
        """
        self._step = []
        for request in self.requests:
            request.row, request.blocks = -1, []
            _hold_nothing(request)
        self._empty_rows()
        if self._pinned is not None:
            self._pinned.clear()
        if self.mamba_slot_allocator is not None:
            self.mamba_slot_allocator.committed_total = self.mamba_slot_allocator.evicted_total = 0
            self.mamba_slot_allocator.reset()
        try:
            self.kv_block_allocator.deregister_all()  # tells observers
        finally:
            self.kv_block_allocator.reset()
        self.batch_dimensions = BatchDimensions(0, 0)
        self._ledger = TokenLedger()
        self._requests_seen = 0

    def _check_request(self, request: DynamicInferenceRequest) -> None:
        if not isinstance(request, DynamicInferenceRequest):
            raise ValueError(f"request is {shown(request)}; accepted: a DynamicInferenceRequest")
        if request.row >= 0 and not self._rows.holds(request):
            raise ValueError(
                f"request has id {request.request_id} and row {request.row}; accepted: one without a row, or "
                "in a row of this context"
            )

    def _is_ready(self, chunk: ScheduledChunk) -> bool:
        return (
            isinstance(chunk, ScheduledChunk)
            and self._rows.holds(chunk.request)
            and chunk.start == chunk.request.computed
            and len(chunk.drafts) <= self.num_speculative_tokens
        )

    def _check_chunk(self, chunk: ScheduledChunk) -> None:
        if not isinstance(chunk, ScheduledChunk) or not self._rows.holds(chunk.request):
            raise ValueError(
                f"chunk is {shown(chunk)}; accepted: a ScheduledChunk of a request with a row of this context"
            )

    def _check_between_steps(self, call: str) -> None:
        if self._step:
            raise RuntimeError(f"{call} is called during a step; end or abort it first")
        if self.suspended:
            raise RuntimeError(f"{call} is called on a suspended context; resume it first")

    def cache_stats(self) -> CacheStats:
        slots, kv, ledger = self.mamba_slot_allocator, self.kv_block_allocator, self._ledger
        return CacheStats(
            num_requests=self._requests_seen,
            num_prompt_tokens=ledger.prompt,
            num_resumed_tokens=ledger.resumed,
            num_computed_tokens=ledger.computed_tokens,
            computed_by_reason=ledger.by_reason(),
            num_recomputed_tokens=ledger.recomputed,
            num_free_slots=slots.free_count if slots else 0,
            num_reserved_slots=slots.reserved_count if slots else 0,
            num_committed_slots=slots.committed_count if slots else 0,
            num_states_committed=slots.committed_total if slots else 0,
            num_states_evicted=slots.evicted_total if slots else 0,
            num_free_kv_blocks=kv.total_avail,
            num_cached_kv_blocks=kv.cached_count,
            num_held_kv_blocks=kv.held_count,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError where requests, pools and maps contradict each other; O(pools)."""
        self.kv_block_allocator.check_integrity()
        self.mamba_metadata.check_integrity()
        self._rows.check_integrity()
        references = self._pinned.block_references if self._pinned else Counter[int]()
        pins = self._pinned.slot_pins if self._pinned else Counter[int]()
        for request in self.requests:
            references.update(request.blocks)
            assert request.computed <= len(request.blocks) * self.block_size_tokens
            if request.pinned_slot >= 0:
                pins[request.pinned_slot] += 1
                assert request.state_index == self.state_pool.durable_index(request.pinned_slot)
            elif request.computed and not self._step:
                assert request.state_index in self._rows.live_slots(request)
        assert references == self.kv_block_allocator.references, "a KV reference leaked"
        if self.mamba_slot_allocator is not None:
            self.mamba_slot_allocator.check_integrity()
            findable = len(self.mamba_slot_allocator.hash_to_block_id)
            assert findable == self.mamba_slot_allocator.committed_count, "a state that nobody can find"
            assert pins == self.mamba_slot_allocator.pins, "a pin leaked"
            assert self._step or not self.mamba_slot_allocator.reserved_count, "a reservation leaked"


def _hold_nothing(request: DynamicInferenceRequest) -> None:
    request.state_index = request.pinned_slot = request.rolling_block = -1
    request.immutable_blocks = request.computed = request.seen_tokens = 0
    request.paused = request.shares_cache = False
