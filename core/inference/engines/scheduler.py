"""Which requests advance in the next step, and which wait."""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

from ...errors import KVBlockCapacityError, LiveSlotCapacityError
from ...validation import ceil_div, integers
from ..contexts.cache.cached_states import PrefixMatch
from ..contexts.cache.checkpoint_plan import MAX_COMPARED
from ..contexts.cache.prefix_cache import PrefixCache
from ..contexts.dynamic_context import DynamicInferenceContext
from ..contexts.dynamic_request import Allocation, DynamicInferenceRequest, ScheduledRequest
from .drafter import Drafter

_MAX_AWAITING = 128  # so many waiting requests await a state in a step, before no further one is looked at


class Scheduler:
    """First come, first served, within the context's tokens, rows and KV blocks.

    Decodes go first, then prefills under way, then waiting requests, then drafts. A request that gets no
    block is *paused*: it keeps its row, blocks and state, and none is admitted until it goes on. Where no
    request can go on, the one admitted last is preempted: so the oldest one always finishes.

    A request is admitted once the blocks of its whole prompt are available; those of its answer need not be.
    Where pins leave too few, the request waits, and later ones are admitted. Blocks of 256, 10 of them, 8
    pinned: a prompt of 600 tokens (3 blocks) waits, the one of 500 behind it (2 blocks) runs.
    """

    def __init__(self, context: DynamicInferenceContext, drafter: Drafter | None = None) -> None:
        self._context = context
        self._config = context.config
        self._replays = context.config.replays
        self._chunk_size = context.spec.chunk_tokens(context.config.block_size_tokens)
        self._drafter = drafter
        self.waiting: OrderedDict[int, DynamicInferenceRequest] = OrderedDict()
        self.running: list[DynamicInferenceRequest] = []  # in order of admission
        self.admitted: dict[DynamicInferenceRequest, int] = {}  # since the last `schedule`; tokens of each
        self.num_paused = 0  # running requests that got no block in the last `schedule`

    def add(self, request: DynamicInferenceRequest) -> None:
        self.waiting[request.request_id] = request

    def remove(self, request: DynamicInferenceRequest, *, discard: bool = False) -> None:
        """Remove a running or waiting request, and release its allocation."""
        self.waiting.pop(request.request_id, None)
        if request in self.running:
            self.running.remove(request)
        self._context.release(request, discard=discard)  # last: an observer of freed blocks may raise

    def preempt(self, request: DynamicInferenceRequest) -> None:
        """Release a running request's memory, and put the request at the head of the queue."""
        self.running.remove(request)
        self.waiting[request.request_id] = request
        self.waiting.move_to_end(request.request_id, last=False)
        self._context.release(request)

    def requeue(self, requests: Iterable[DynamicInferenceRequest]) -> None:
        """Queue these requests before all waiting ones, in this order, and release what any request holds."""
        self._queue([*requests, *self.waiting.values()])
        for request in self._context.requests:
            self._context.release(request)

    def rebuild(self, requests: Iterable[DynamicInferenceRequest]) -> None:
        """Queue exactly these requests, running ones first; the context has taken back all that they held."""
        by_id = {request.request_id: request for request in requests}
        for request in by_id.values():
            request.allocation = None  # of a request that was getting its row, too
            request.match = None
        ordered = [*self.running, *self.waiting.values(), *by_id.values()]
        self._queue(request for request in ordered if by_id.get(request.request_id) is request)

    def _queue(self, requests: Iterable[DynamicInferenceRequest]) -> None:
        """Let exactly these requests wait, in this order, and none run."""
        self.waiting = OrderedDict((request.request_id, request) for request in requests)
        self.running = []
        self.num_paused = 0

    def check_integrity(self, requests: dict[int, DynamicInferenceRequest]) -> None:
        """Raise AssertionError unless `requests` run or wait, each once, and only runners have rows."""
        running = {request.request_id: request for request in self.running}
        assert len(running) == len(self.running), "a request runs twice"
        assert running.keys().isdisjoint(self.waiting), "a request runs and waits"
        assert running | self.waiting == requests, "a request is neither running nor waiting, or has ended"
        seated = {request.request_id for request in self._context.requests}
        assert seated == running.keys(), "a request holds a row and does not run, or the reverse"

    def schedule(self) -> list[ScheduledRequest]:
        """The batch of the next step; empty only where there is no request."""
        self.admitted = {}
        while True:
            self.num_paused = 0
            running = sorted(self.running, key=lambda request: not _allocation(request).decoding)
            batch = self._advance(running, self._config.max_tokens_per_step)
            if not self.num_paused:
                self._admit(batch)
            if batch or not (self.running or self.waiting):
                return self._with_drafts(batch, self._drafter) if self._drafter else batch
            if not self.running:
                raise self._capacity_error(next(iter(self.waiting.values())))
            self.preempt(self.running[-1])

    def schedule_after_unread(self) -> list[ScheduledRequest]:
        """The batch that can follow an unread step: decodes that go on, then prefills; or none."""
        if self._drafter or self._awaits_uncommitted():
            return []
        decodes, prefills = [], []
        for request in self.running:
            if not _allocation(request).decoding:
                if not request.sampling.skip_prompt_log_probs:  # the next part depends on log-probs
                    return []
                prefills.append(request)
            elif _allocation(request).num_computed < len(request.tokens):  # no block in the step under way
                return []
            elif request.next_token is None and len(request.tokens) + 1 < request.max_length:
                decodes.append(request)
        if not self._context.admission.can_decode(map(_allocation, decodes)):
            return []
        self.num_paused = 0
        batch = self._advance(decodes, self._config.max_tokens_per_step)
        batch += self._advance(prefills, self._config.max_tokens_per_step - len(batch))
        if not self.num_paused:
            self._admit(batch)
        return batch

    def _awaits_uncommitted(self) -> bool:
        """Whether a waiting request may resume from a state that is findable once the last step is read."""
        prefills = [scheduled for scheduled in self._context.uncommitted if not scheduled.decoding]
        keys = {scheduled.hash_at(position) for scheduled in prefills for position in scheduled.destinations}
        if not keys or len(self._context.requests) >= self._config.max_requests:
            return False
        for request in islice(self.waiting.values(), _MAX_AWAITING):
            self._context.admission.match(request)  # extends the chain
            if not keys.isdisjoint(request.chain.hashes):
                return True
        return False

    def _advance(self, requests: Iterable[DynamicInferenceRequest], budget: int) -> list[ScheduledRequest]:
        """Schedule running requests, as far as `budget` tokens and blocks go."""
        batch: list[ScheduledRequest] = []
        for request in requests:
            if budget == 0:
                break
            if not self._fits_budget(len(request.tokens) - _allocation(request).num_computed, budget):
                continue
            scheduled = self._context.admission.schedule_request(request, budget)
            if scheduled is None:
                self.num_paused += 1
            else:
                batch.append(scheduled)
                budget -= scheduled.length
        return batch

    def _fits_budget(self, num_missing: int, budget: int) -> bool:
        """Whether a prefill of `num_missing` tokens ends within `budget` tokens, or can be cut there."""
        return not self._replays or budget >= min(self._chunk_size, num_missing)

    def _admit(self, batch: list[ScheduledRequest]) -> None:
        """Add waiting requests to the batch, as far as tokens, rows and blocks go."""
        budget = self._config.max_tokens_per_step - sum(scheduled.length for scheduled in batch)
        num_free_rows = self._config.max_requests - len(self._context.requests)
        if not self.waiting or budget <= 0 or num_free_rows <= 0:
            return
        pending = PendingStates(self._context.prefix_cache, batch)
        num_awaiting = 0
        new: list[ScheduledRequest] = []
        # No request of this step takes the state that another one resumes from, as long as there are others.
        next_slots = self._context.admission.resume_slots([*islice(self.waiting.values(), num_free_rows)])
        for i, request in enumerate(self.waiting.values()):
            match = self._context.admission.match(request)
            if not self._fits_budget(len(request.tokens) - match.resume_tokens, budget):
                break
            if pending.defers(request, match):
                num_awaiting += 1
                if num_awaiting == _MAX_AWAITING:
                    break
                continue
            candidates = (candidate for candidate in self.waiting.values() if candidate.allocation is None)
            scheduled = self._context.admission.schedule_request(
                request, budget, next_slots[i + 1 :], islice(candidates, MAX_COMPARED)
            )
            if scheduled is None:
                if self._fits_beside_pins(request, match):
                    break
                continue
            new.append(scheduled)
            pending.add(scheduled)
            budget -= scheduled.length
            if budget <= 0 or len(new) == num_free_rows:
                break
        for scheduled in new:
            request = scheduled.request
            self.admitted[request] = len(request.tokens)
            self.running.append(request)
            del self.waiting[request.request_id]
        batch += new

    def _num_entries(self, request: DynamicInferenceRequest) -> int:
        """How many KV blocks, and blocks for inputs, the request needs."""
        num_tokens = len(request.tokens)
        num_input_blocks = self._context.admission.num_input_blocks(num_tokens)
        return ceil_div(num_tokens, self._config.block_size_tokens) + num_input_blocks

    def _fits_beside_pins(self, request: DynamicInferenceRequest, match: PrefixMatch) -> bool:
        """Whether the request fits into the blocks that pins leave and the pinned ones that it shares."""
        pins, num_blocks = self._context.prefix_cache.pins, self._num_entries(request)
        # The first answer needs no look at the match, which takes long for a long one.
        return any(num_blocks <= pins.max_sequence_blocks(shared) for shared in ((), match.blocks))

    def _with_drafts(self, batch: list[ScheduledRequest], drafter: Drafter) -> list[ScheduledRequest]:
        budget = self._config.max_tokens_per_step - sum(scheduled.length for scheduled in batch)
        drafted = []
        for scheduled in batch:
            max_drafts = min(budget, scheduled.max_drafts(self._config.num_speculative_tokens))
            if max_drafts > 0:
                drafts = list(drafter.draft(scheduled.request.token_view, max_drafts))[:max_drafts]
                drafts = integers("drafts", drafts, 0, self._context.spec.vocab_size - 1)
                scheduled = self._context.admission.add_drafts(scheduled, drafts)
                budget -= len(scheduled.drafts)
            drafted.append(scheduled)
        return drafted

    def _capacity_error(self, request: DynamicInferenceRequest) -> KVBlockCapacityError:
        """The error that says what a waiting request lacks: live slots, or blocks that pins do not leave."""
        admission, pins = self._context.admission, self._context.prefix_cache.pins
        if admission.num_available_slots < admission.slots_per_row:
            return LiveSlotCapacityError(
                admission.slots_per_row, admission.num_available_slots, request.request_id
            )
        match = admission.match(request)
        available = pins.max_sequence_blocks()
        num_shared = pins.max_sequence_blocks(match.blocks) - available
        return KVBlockCapacityError(self._num_entries(request) - num_shared, available, request.request_id)


class PendingStates:
    """The states of a step that is being scheduled, as far as there are slots for them.

    A request whose prefix has one waits a step and resumes from it; one that waited in vain waits no more.
    """

    def __init__(self, cache: PrefixCache, batch: Iterable[ScheduledRequest]) -> None:
        self._cache = cache
        self._positions: dict[int, int] = {}  # prefix hash -> the boundary that it ends
        for scheduled in batch:
            self.add(scheduled)

    def add(self, scheduled: ScheduledRequest) -> None:
        """Promise the states that `scheduled` takes, while slots are left."""
        for boundary in scheduled.boundaries:
            if self._cache.slots.num_available <= len(self._positions):
                return
            prefix_hash = scheduled.hash_at(boundary.position)
            if prefix_hash not in self._cache.cached_states.state_block_of_hash:
                self._positions.setdefault(prefix_hash, boundary.position)

    def defers(self, request: DynamicInferenceRequest, match: PrefixMatch) -> bool:
        """Let the request wait where a deeper state than the match's is pending; returns whether it does."""
        if request.awaited_tokens > match.resume_tokens:
            request.awaited_tokens = 0
            request.may_wait = False
        if not request.may_wait:
            return False
        deepest, hashes = request.max_resume_tokens, request.chain.hashes
        size = request.chain.block_size_tokens
        pending = (
            position
            for prefix_hash, position in self._positions.items()
            if match.resume_tokens < position <= deepest and hashes[position // size - 1] == prefix_hash
        )
        request.awaited_tokens = max(pending, default=0)
        return request.awaited_tokens > 0


def _allocation(request: DynamicInferenceRequest) -> Allocation:
    assert request.allocation is not None, "a request runs and holds nothing"
    return request.allocation
