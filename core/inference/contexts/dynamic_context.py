"""The running requests, what they hold, and the steps that they make together."""

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from ...cache_stats import CacheStats
from ...config import InferenceConfig
from ...devices import GIGABYTE
from ...state_spec import HybridStateSpec
from ...validation import refused
from .admission import Admission
from .cache.pool_stats import Clock
from .cache.prefix_cache import PrefixCache
from .device_memory import DeviceMemory
from .dynamic_request import Batch, DynamicInferenceRequest, ScheduledRequest, TokenLedger
from .padding import Padding, largest_shape
from .pool_sizes import PoolSizes, with_total_gb
from .request_states import EncodedStates, ReplayedStates, RequestStates
from .step_builder import StepBuffer, StepBuilder
from .step_inputs import StepInputs
from .tier_copies import tiers_of

logger = logging.getLogger(__name__)


class StepObserver(Protocol):
    """Is called with each step of a context. An error that an observer raises fails the step."""

    def step_begun(self, batch: Batch, inputs: StepInputs) -> None:
        """All slots are reserved and `inputs` are built for `batch`, in row order; no forward is launched."""

    def step_ended(self, batch: Batch) -> None:
        """Requests are advanced, wrong drafts cut off; states that wait for tokens are committed later."""


class DynamicInferenceContext:
    """Rows, live states and steps of the requests that run at once, over a `PrefixCache`.

    A step consists of `admission.schedule_request` for each request that advances, `begin_step`, the model's
    forward, and `end_step` (or `abort_step`).

    Attributes:
        batch: the scheduled requests of the step under way, in row order; empty between steps.
        uncommitted: requests of unread steps that complete blocks or states, which are not findable yet.
        observers: are called with each step.
    """

    def __init__(
        self, spec: HybridStateSpec, config: InferenceConfig, *, clock: Clock = time.monotonic_ns
    ) -> None:
        """Allocate the pools; a collective where the model is split. `clock`: for ages of what is evicted."""
        self.spec = spec
        self.config = config = with_total_gb(config, spec.device)
        if config.enable_prefix_caching and config.block_size_tokens % spec.grid:
            accepted = f"a multiple of {spec.grid}, because states are taken at the ends of blocks"
            raise refused("block_size_tokens", config.block_size_tokens, accepted)
        self._chunk_size = spec.chunk_tokens(config.block_size_tokens)
        sizes = PoolSizes.of(config, spec)
        check_replays(spec, config)
        self.memory = memory = DeviceMemory(self._spec_of_memory(), config, sizes)
        pool, scrubber = memory.state_pool, memory.scrubber
        tiers = tiers_of(config, spec, memory.durable_pool)
        if tiers is not None:
            scrubber.host_slots = tiers.host.dirty
        self.prefix_cache = PrefixCache(
            sizes.num_kv_blocks, sizes.num_mamba_slots, config.block_size_tokens, config.eviction_policy,
            enabled=config.enable_prefix_caching, clock=clock,
            num_live_slots=pool.num_live if pool.is_shared else 0,
            tiers=tiers, division=sizes.division, scrubber=scrubber,
        )  # fmt: skip
        self._request_states = self._new_request_states()
        self.admission = self._new_admission()
        largest = largest_shape(
            config.max_requests, config.max_tokens_per_step, 1 + config.num_speculative_tokens,
            self.admission.block_table.shape[1], self._chunk_size, bool(config.batch_invariant),
            self.admission.input_table.array.shape[1],
        )  # fmt: skip
        self._buffer = StepBuffer(largest, spec.device)
        self._builder = StepBuilder(self._buffer, config, self._chunk_size, self._request_states, self.memory)
        self.batch: tuple[ScheduledRequest, ...] = ()
        self.uncommitted: list[ScheduledRequest] = []
        self.observers: list[StepObserver] = []
        self._ledger = TokenLedger()
        self._num_requests_seen = 0
        logger.info(self.memory.summary())
        if sizes.division is not None and sizes.division.has_all_numbers:
            logger.warning(
                "total_gb is %.3g, of which the pools use %.3g: there are %d slots or blocks at most; a "
                "larger block_size_tokens uses more",
                config.total_gb,
                memory.total_bytes / GIGABYTE,
                max(sizes.num_mamba_slots, sizes.num_kv_blocks),
            )

    def __repr__(self) -> str:
        """One line: device, rows, and how full the pools are."""
        rows = f"{len(self.requests)} of {self.config.max_requests} rows"
        return f"<DynamicInferenceContext: on {self.spec.device}; {rows}; {self.prefix_cache.stats()}>"

    def _spec_of_memory(self) -> HybridStateSpec:
        return self.spec

    def _new_request_states(self) -> RequestStates:
        pool, durable, cache = self.memory.state_pool, self.memory.durable_pool, self.prefix_cache
        in_place = not self.spec.separate_states
        if durable is not pool:
            return EncodedStates(pool, durable, cache, self.memory.scrubber.scratch, in_place)
        if self.config.replays:
            return ReplayedStates(pool, cache, self._chunk_size)
        return RequestStates(pool, cache, in_place)

    def _new_admission(self) -> Admission:
        return Admission(self.config, self._chunk_size, self.prefix_cache, self._request_states, self.memory)

    # ---- requests

    @property
    def requests(self) -> list[DynamicInferenceRequest]:
        """The requests that hold a row."""
        return self.admission.requests

    @property
    def pool_tokens(self) -> int:
        """The most tokens that one request can have KV of."""
        return self.admission.max_blocks * self.config.block_size_tokens

    def release(self, request: DynamicInferenceRequest, *, discard: bool = False) -> None:
        """Release what the request has; `discard`: its cached prefix, too, because the model went wrong."""
        if request.allocation is None:
            return
        for scheduled in self.uncommitted:
            if scheduled.request is request:
                self.prefix_cache.reservations.release(scheduled.destinations.values())
        self.uncommitted = [scheduled for scheduled in self.uncommitted if scheduled.request is not request]
        allocation = self.admission.release(request)
        if discard:
            self.prefix_cache.discard(allocation.path)
        else:
            self.prefix_cache.release(allocation.path)  # last: it calls observers

    # ---- one step

    def begin_step(
        self, batch: Batch, padding: Padding | None = None, unread_tokens: Tensor | None = None
    ) -> StepInputs:
        """Reserve slots for the planned states, and build the model's inputs, decode rows first.

        The inputs are valid until the next step. `padding` maps their shape to one at least as large.
        `unread_tokens`: those of the rows that decode such tokens, which come first: [rows] on the device.
        """
        if self.config.free_memory == "zero":
            self.memory.scrubber.scrub_all()
        self._reserve(batch)
        inputs = self._builder.build(
            self.batch, self.admission.block_table, self.admission.input_table.array,
            padding or (lambda shape: shape), unread_tokens,
        )  # fmt: skip
        for observer in self.observers:
            observer.step_begun(self.batch, inputs)
        return inputs

    def _reserve(self, batch: Batch) -> None:
        """Reserve slots for the states of the batch, and gather the states that its requests start from."""
        in_row_order = sorted(batch, key=lambda scheduled: not scheduled.decoding)
        idle_slots = self.admission.idle_slots
        max_inner_states = self._request_states.max_inner_states(in_row_order, idle_slots)
        self.batch = tuple(self.prefix_cache.reserve(in_row_order, max_inner_states))
        self._request_states.gather(self.batch, idle_slots)

    def needs_tokens(self, *, commits_later: bool) -> bool:
        """Whether `end_step` can be called only after the step's new tokens are appended to their requests.

        That is with drafts; and, unless it `commits_later`, where logits decide whether something becomes
        findable.
        """
        return any(
            scheduled.drafts
            or (not commits_later and self._makes_findable(scheduled) and scheduled.logit_positions)
            for scheduled in self.batch
        )

    def _makes_findable(self, scheduled: ScheduledRequest) -> bool:
        """Whether a state or a KV block of the request becomes findable after this step."""
        return bool(scheduled.destinations) or scheduled.completes_block(self.config.block_size_tokens)

    def end_step(
        self, accepted: Mapping[int, int] | None = None, invalid: Collection[int] = (), *,
        commits_later: bool = False,
    ) -> None:  # fmt: skip
        """Register KV, commit states and advance requests, once the forward is launched. No synchronisation.

        `accepted`: how many scheduled tokens of a request are right, by id; of all with drafts that are not
        in `invalid`. Their right tokens are appended before.
        `invalid`: ids of requests whose logits are not finite: nothing of their step becomes findable.
        `commits_later`: what depends on logits or sampled tokens waits for `commit_batch`.
        """
        if invalid and not commits_later:
            self._remove_invalid(invalid)
        late: list[ScheduledRequest] = []
        if any(scheduled.drafts for scheduled in self.batch):
            assert accepted is not None, "drafts are not verified"
            late = self._verify(accepted)
        self._request_states.scatter(self.batch, late)
        for scheduled in self.batch:
            self._request_states.release_source(scheduled)
            self._count(scheduled)
            committed: dict[int, int] = {}
            if self._makes_findable(scheduled):
                if commits_later and scheduled.logit_positions:
                    self.uncommitted.append(scheduled)
                else:
                    committed = self._commit(scheduled)
            self._request_states.advance(scheduled, committed)
            if scheduled.allocation.input_blocks and not scheduled.allocation.num_computed % self._chunk_size:
                self.admission.input_table.release(scheduled.allocation)
            if scheduled.decoding and self.config.num_speculative_tokens:
                self.admission.trim(scheduled.allocation)
        ended, self.batch = self.batch, ()
        for observer in self.observers:
            observer.step_ended(ended)

    def commit_batch(self, batch: Batch, invalid: Collection[int]) -> None:
        """Make findable what requests of a step completed that is read now, except those in `invalid`."""
        if not self.uncommitted:
            return
        read_ids = set(map(id, batch))
        ready = [scheduled for scheduled in self.uncommitted if id(scheduled) in read_ids]
        self.uncommitted = [scheduled for scheduled in self.uncommitted if id(scheduled) not in read_ids]
        for scheduled in ready:
            if scheduled.request.request_id in invalid:
                self.prefix_cache.reservations.release(scheduled.destinations.values())
                continue
            self._commit(scheduled)
            if scheduled.decodes_unread:
                self.prefix_cache.reservations.remember_refused(scheduled)

    def _commit(self, scheduled: ScheduledRequest) -> dict[int, int]:
        self.prefix_cache.register(scheduled.allocation.path, scheduled.request.tokens, scheduled.stop)
        return self.prefix_cache.commit(scheduled)

    def _remove_invalid(self, invalid: Collection[int]) -> None:
        """Remove the `invalid` requests that have drafts, or of which something would become findable."""
        removed = [
            scheduled
            for scheduled in self.batch
            if scheduled.request.request_id in invalid
            and (scheduled.drafts or self._makes_findable(scheduled))
        ]
        for scheduled in removed:
            self.prefix_cache.reservations.release(scheduled.destinations.values())
        rows = {scheduled.allocation.row for scheduled in removed}
        self.batch = tuple(scheduled for scheduled in self.batch if scheduled.allocation.row not in rows)

    def _verify(self, accepted: Mapping[int, int]) -> list[ScheduledRequest]:
        """Cut decodes to their accepted tokens; returns those with slots that are reserved only now."""
        verified = [
            scheduled.accepted(accepted[scheduled.request.request_id]) if scheduled.drafts else scheduled
            for scheduled in self.batch
        ]
        late = self.prefix_cache.reservations.settle_drafts(self.batch, verified)
        added = {scheduled.allocation.row: scheduled.destinations for scheduled in late}
        self.batch = tuple(
            replace(scheduled, destinations=scheduled.destinations | added[scheduled.allocation.row])
            if scheduled.allocation.row in added
            else scheduled
            for scheduled in verified
        )
        return late

    def _count(self, scheduled: ScheduledRequest) -> None:
        request = scheduled.request
        start, stop, num_prompt = scheduled.start, scheduled.stop, len(request.prompt_tokens)
        if not scheduled.num_resumed and start >= max(num_prompt, request.num_counted):
            request.num_counted = stop  # a decode: no prompt token, none computed before
            return
        resumed, computed = range(start - scheduled.num_resumed, start), range(start, stop)
        counts = TokenLedger.of_step(resumed, computed, scheduled.spans, request.num_counted, num_prompt)
        self._num_requests_seen += request.num_counted == 0
        self._ledger += counts
        request.ledger += counts
        request.num_counted = max(request.num_counted, stop)

    def abort_step(self) -> None:
        """Undo a step whose forward failed: nothing that it wrote is used, and its requests are released."""
        aborted, self.batch = self.batch, ()
        self.uncommitted = []
        self.prefix_cache.abort()  # also what `begin_step` reserved before it failed
        self.memory.scrubber.scratch.scrub_all()
        for scheduled in aborted:
            self.release(scheduled.request)

    # ---- the whole

    def reset_prefix_cache(self) -> None:
        """Remove every prefix, state, pin and ghost. Running requests go on, but cache nothing any more."""
        for allocation in self.admission.allocations:
            self._request_states.move_to_live(allocation)
        self.prefix_cache.clear([allocation.path for allocation in self.admission.allocations])
        self.uncommitted = []

    def suspend(self) -> None:
        """Free the tensors of all pools; every request is released, and the cache is cleared."""
        for request in self.requests:
            self.release(request)
        self.reset_prefix_cache()
        if self.prefix_cache.tiers is not None:
            self.memory.scrubber.host_slots.scrub_all()  # it needs the device memory that `deallocate` frees
            self.prefix_cache.tiers.copies.deallocate_staging()
        self.memory.deallocate()

    def resume(self) -> None:
        """Allocate the pools again, as zeros; does nothing unless suspended."""
        self.memory.allocate()

    def reset(self, *, keep_counts: bool = False) -> None:
        """Release every request and empty the cache, also after a failure; counts are 0, too."""
        self.batch = ()
        self.uncommitted = []
        self.admission.clear()
        self.admission = self._new_admission()
        if not keep_counts:
            self._ledger = TokenLedger()
            self._num_requests_seen = 0
        self.prefix_cache.reset(keep_counts=keep_counts)
        if not self.memory.is_allocated:
            self.memory.deallocate()  # after an interrupted suspend

    def cache_stats(self) -> CacheStats:
        """What became of every prompt token, and how full the pools are."""
        return CacheStats(
            num_requests=self._num_requests_seen, **self._ledger.counts(), **vars(self.prefix_cache.stats())
        )

    def check_integrity(self) -> None:
        """Raise AssertionError where requests, pools and maps contradict each other; O(pools)."""
        allocations, during_step = self.admission.allocations, bool(self.batch)
        self.admission.check_integrity()
        self._request_states.check_integrity(allocations, during_step)
        input_blocks = [block for allocation in allocations for block in allocation.input_blocks]
        slots = [slot for scheduled in self.uncommitted for slot in scheduled.destinations.values()]
        reserved = self.prefix_cache.slots.reserved
        assert during_step or sorted(slots) == sorted(reserved), "a reservation leaked"
        paths = [allocation.path for allocation in allocations]
        self.prefix_cache.check_integrity(paths, during_step or bool(slots), input_blocks)
        for allocation in allocations:
            size = self.config.block_size_tokens
            assert allocation.num_computed <= len(allocation.path.blocks) * size, "tokens without a KV block"


def check_replays(spec: HybridStateSpec, config: InferenceConfig) -> None:
    """Raise a ValueError where decodes shall replay, and the model or the step cannot."""
    if not config.replays:
        return
    setting = config.replay_argument
    unknown = [tensor.name for tensor in spec.states if tensor.num_layers and not tensor.inputs]
    if unknown or not (spec.supports_replay and spec.separate_states):
        because = f"has no inputs of {', '.join(unknown)}" if unknown else "does not replay decodes"
        raise ValueError(
            f"{setting} is True, and the model {because}; accepted: one whose spec has `supports_replay`"
        )
    least = spec.chunk_tokens(config.block_size_tokens) + config.max_requests - 1
    if config.max_tokens_per_step < least:
        raise ValueError(
            f"max_tokens_per_step is {config.max_tokens_per_step}; accepted with {setting}: at least "
            f"{least}, a decode of each other request and one chunk, at which prompts are cut"
        )
