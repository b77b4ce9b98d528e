"""Which requests advance in the next step, and which wait."""

from collections import deque
from collections.abc import Iterable

from ...errors import KVBlockCapacityError
from ..contexts.dynamic_context import DynamicInferenceContext
from ..contexts.prefix_match import PrefixMatch
from ..contexts.request import DynamicInferenceRequest
from ..contexts.request_step import RequestStep
from .drafter import Drafter


class Scheduler:
    """First come, first served, within the context's tokens, rows and KV blocks.

    Decodes go first, then prefills under way, then waiting requests. A request that gets no block is
    *paused*: it keeps its row, blocks and state, and no new request is admitted until it goes on. When no
    request can go on, the request that was admitted last is preempted and waits at the head of the queue. So
    the oldest request always finishes.

    Drafts come last, and take the tokens and blocks that are left. Drafts delay no request. The end of a step
    gives back the blocks that only rejected drafts needed.

    Attributes:
        waiting: the queue.
        running: the requests that hold a row, in order of admission.
        num_paused: running requests that got no block in the last call of `schedule`.
    """

    def __init__(self, context: DynamicInferenceContext, drafter: Drafter | None = None) -> None:
        """`drafter`: makes the drafts of decodes; None for no drafts."""
        self._context = context
        self._config = context.config
        self._drafter = drafter
        self.waiting: deque[DynamicInferenceRequest] = deque()
        self.running: list[DynamicInferenceRequest] = []
        self.num_paused = 0

    def add(self, request: DynamicInferenceRequest) -> None:
        self.waiting.append(request)

    def remove(self, request: DynamicInferenceRequest) -> None:
        """Forget a running or waiting request, and release what it holds in the context."""
        self._leave_queue(request)
        self._context.release(request)  # last: an observer of freed blocks may raise

    def preempt(self, request: DynamicInferenceRequest) -> None:
        """Release a running request's memory, and put the request at the head of the queue.

        The request will restart from its deepest cached state.
        """
        self._leave_queue(request)
        self.waiting.appendleft(request)
        self._context.release(request)

    def _leave_queue(self, request: DynamicInferenceRequest) -> None:
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    @property
    def requests(self) -> list[DynamicInferenceRequest]:
        """All requests: the running ones, then the waiting ones, in order."""
        return [*self.running, *self.waiting]

    def restart(self, requests: Iterable[DynamicInferenceRequest]) -> None:
        """Queue exactly these requests, in this order, and release what any request holds."""
        self.waiting = deque(requests)
        self.running = []
        self.num_paused = 0
        for request in self._context.requests:
            self._context.release(request)

    def schedule(self) -> list[RequestStep]:
        """What each request does in the next step; empty only where there is no request.

        Raises:
            KVBlockCapacityError: pinned prefixes leave too few KV blocks for the next request alone.
        """
        while True:
            steps = self._advance_running()
            if not self.num_paused:
                self._admit(steps)
            if steps or not (self.running or self.waiting):
                return self._with_drafts(steps, self._drafter) if self._drafter else steps
            if not self.running:
                raise self._capacity_error(self.waiting[0])
            self.preempt(self.running[-1])

    def _advance_running(self) -> list[RequestStep]:
        steps: list[RequestStep] = []
        self.num_paused = 0
        budget = self._config.max_tokens
        for request in sorted(self.running, key=_is_prefill):
            if budget == 0:
                break
            step = self._context.schedule(request, budget)
            if step is None:
                self.num_paused += 1
            else:
                steps.append(step)
                budget -= step.length
        return steps

    def _admit(self, steps: list[RequestStep]) -> None:
        """Add steps of waiting requests, as far as tokens, rows and blocks go."""
        budget = self._config.max_tokens - sum(step.length for step in steps)
        if not (self.waiting and budget):
            return
        soon_stored = set[int]().union(*(step.boundary_keys() for step in steps))
        for request in list(self.waiting):
            if budget <= 0 or len(self.running) == self._config.max_requests:
                return
            match = self._context.match(request)
            if self._soon_deeper(request, match, soon_stored):
                continue
            step = self._context.schedule(request, budget, match)
            if step is None:
                return
            self.waiting.remove(request)
            self.running.append(request)
            steps.append(step)
            budget -= step.length
            soon_stored |= step.boundary_keys()

    def _with_drafts(self, steps: list[RequestStep], drafter: Drafter) -> list[RequestStep]:
        budget = self._config.max_tokens - sum(step.length for step in steps)
        drafted = []
        for step in steps:
            max_drafts = min(budget, step.max_drafts(self._config.num_speculative_tokens))
            if max_drafts > 0:
                drafts = list(drafter.draft(step.request.token_view, max_drafts))[:max_drafts]
                step = self._context.draft(step, drafts)
                budget -= len(step.drafts)
            drafted.append(step)
        return drafted

    def _soon_deeper(
        self, request: DynamicInferenceRequest, match: PrefixMatch, soon_stored: set[int]
    ) -> bool:
        """Whether this step stores a state of the request's prefix that is deeper than the request's match.

        The request then waits one step and resumes from that state, instead of computing the same tokens in
        parallel.
        """
        if request.sampling.returns_prompt_log_probs:
            return False
        size = self._config.block_size_tokens
        first, last = match.resume_tokens // size, (len(request.tokens) - 1) // size
        return not soon_stored.isdisjoint(request.hashes.keys[first:last])

    def _capacity_error(self, request: DynamicInferenceRequest) -> KVBlockCapacityError:
        """The error that says how many unheld KV blocks a waiting request needs, and how many there are."""
        kv, shared = self._context.prefix_cache.kv_blocks, self._context.match(request).blocks
        num_blocks = -(-len(request.tokens) // self._config.block_size_tokens)
        num_needed = num_blocks - len(shared) + kv.count_cached(shared)
        return KVBlockCapacityError(num_needed, kv.total_count - kv.held_count)


def _is_prefill(request: DynamicInferenceRequest) -> bool:
    return request.holding is not None and not request.holding.decoding
