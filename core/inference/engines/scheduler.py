"""Which requests advance in the next step, and which wait."""

from collections import deque
from collections.abc import Iterable

from ...errors import KVBlockCapacityError
from ...request import DynamicInferenceRequest
from ..contexts.dynamic_context import DynamicInferenceContext
from ..contexts.prefix_index import PrefixMatch
from ..contexts.scheduled_chunk import ScheduledChunk
from .drafter import Drafter


class Scheduler:
    """First come, first served, over the context's tokens, rows and KV blocks.

    Decodes go first, then prefills under way, then waiting requests. A request that gets no block is
    *paused*: it keeps its row, blocks and state, and nobody new is admitted until it goes on. When nobody
    can go on, the request admitted last is evicted and waits at the head of the queue, so the oldest
    always finishes.

    Drafts come last, and take what tokens and blocks are left: they keep nobody waiting, and what they did
    not need is back when the step ends.
    """

    def __init__(self, context: DynamicInferenceContext, drafter: Drafter | None = None) -> None:
        """`drafter`: for the drafts of decodes; None drafts none."""
        self._context = context
        self._drafter = drafter
        self.waiting: deque[DynamicInferenceRequest] = deque()
        self.running: list[DynamicInferenceRequest] = []  # in order of admission

    def add(self, request: DynamicInferenceRequest) -> None:
        self.waiting.append(request)

    def remove(self, request: DynamicInferenceRequest) -> None:
        """Forget a request, wherever it is; what it holds in the context is released."""
        self._leave_queue(request)
        self._context.release(request)  # last: whoever watches the freed blocks may raise

    def requeue(self, request: DynamicInferenceRequest) -> None:
        """Evict a running request; it restarts, before all that wait, from its deepest cached state."""
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
        """All requests: those that run, then those that wait, in order."""
        return [*self.running, *self.waiting]

    def restart(self, requests: Iterable[DynamicInferenceRequest]) -> None:
        """Queue these requests, in this order, and no others; whatever any request holds is released."""
        self.waiting = deque(requests)
        self.running = []
        for request in self._context.requests:
            self._context.release(request)

    def schedule(self) -> list[ScheduledChunk]:
        """The chunks of the next step; empty only when there is nothing to do.

        Raises KVBlockCapacityError when pinned prefixes leave too few KV blocks for the next request alone.
        """
        while True:
            chunks = self._advance_running()
            if not any(request.paused for request in self.running):
                self._admit(chunks)
            if chunks or not (self.running or self.waiting):
                return self._with_drafts(chunks, self._drafter) if self._drafter else chunks
            if not self.running:
                raise KVBlockCapacityError(*self._context.blocks_to_admit(self.waiting[0]))
            self.requeue(self.running[-1])

    def _advance_running(self) -> list[ScheduledChunk]:
        chunks: list[ScheduledChunk] = []
        budget = self._context.max_tokens
        for request in sorted(self.running, key=lambda request: not request.decoding):
            if budget == 0:
                break
            chunk = self._context.schedule(request, budget)
            request.paused = chunk is None
            if chunk is not None:
                chunks.append(chunk)
                budget -= chunk.length
        return chunks

    def _admit(self, chunks: list[ScheduledChunk]) -> None:
        budget = self._context.max_tokens - sum(chunk.length for chunk in chunks)
        if not (self.waiting and budget):
            return
        soon_stored = set[int]().union(*map(self._context.boundary_keys, chunks))
        for request in list(self.waiting):
            if budget <= 0 or not self._context.has_free_row:
                return
            match = self._context.match(request)
            if self._soon_deeper(request, match, soon_stored):
                continue
            chunk = self._context.schedule(request, budget, match)
            if chunk is None:
                return
            self.waiting.remove(request)
            self.running.append(request)
            chunks.append(chunk)
            budget -= chunk.length
            soon_stored |= self._context.boundary_keys(chunk)

    def _with_drafts(self, chunks: list[ScheduledChunk], drafter: Drafter) -> list[ScheduledChunk]:
        budget = self._context.max_tokens - sum(chunk.length for chunk in chunks)
        drafted = []
        for chunk in chunks:
            most = min(budget, self._context.most_drafts(chunk))
            if most > 0:
                drafts = list(drafter.draft(chunk.request.tokens, most))[:most]
                chunk = self._context.draft(chunk, drafts)
                budget -= len(chunk.drafts)
            drafted.append(chunk)
        return drafted

    def _soon_deeper(
        self, request: DynamicInferenceRequest, match: PrefixMatch, soon_stored: set[int]
    ) -> bool:
        """Whether this very step stores a state of the request's prefix, deeper than what it matches now.

        Then it waits one step and resumes, and does not compute the same tokens beside the other request.
        """
        if request.sampling.returns_prompt_log_probs:
            return False
        size = self._context.block_size_tokens
        first, last = match.resume_tokens // size, (len(request.tokens) - 1) // size
        return not soon_stored.isdisjoint(request.hashes.keys[first:last])
