"""Serves a trace with the engine's scheduler and books, without a model."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol

from ..config import InferenceConfig
from ..inference.contexts.books_only_context import BooksOnlyContext
from ..inference.contexts.cache.departures import NANOSECONDS
from ..inference.contexts.request import DynamicInferenceRequest
from ..inference.contexts.request_step import RequestStep
from ..inference.engines.scheduler import Scheduler
from ..sampling_params import SamplingParams
from ..state_spec import HybridStateSpec
from .arrivals import Arrivals
from .prompt_hashes import chains_of
from .setting import Progress, ReplayResult, StepCost
from .trace import Trace

TOO_LONG = "too_long"
"""Why the tokens of a request count as lost that fits into no KV pool: an engine refuses the request."""


class RequestSource(Protocol):
    """Where the requests of an engine come from. Times are nanoseconds since the trace began."""

    @property
    def next_ns(self) -> int | None:
        """When the next request comes; None where none is known to come."""
        ...

    @property
    def horizon_ns(self) -> int | None:
        """A time before which no request comes, as far as no answer of this engine ends; None for never."""
        ...

    def due(self, now_ns: int) -> Sequence[int]:
        """Take the requests that have come by now: their numbers in the trace, in the order of coming."""
        ...

    def came_ns(self, index: int) -> int:
        """When a request came that has not ended."""
        ...

    def note_end(self, index: int, now_ns: int) -> None:
        """Note that the answer of a request that has come has ended."""
        ...


class EngineReplay:
    """One trace, served by the `Scheduler` over a `BooksOnlyContext`, on a clock that counts steps.

    All that decides is the engine's own: admission, matches, plans, slots, evictions, preemption. Only the
    forward is left out, and the tokens of answers are the trace's. Decodes that change no book are made many
    at once: up to the next boundary, end or arrival.

    Attributes:
        context: rows and prefix cache.
        scheduler: the queue.
        now_ns: the time; it begins with the trace.
        first_token_ns: of each request of the trace, from its coming to its first token; None until then.
    """

    def __init__(
        self,
        trace: Trace,
        spec: HybridStateSpec,
        config: InferenceConfig,
        cost: StepCost,
        *,
        token_by_token: bool = False,
        source: RequestSource | None = None,
        after_step: Callable[[], None] | None = None,
    ) -> None:
        """
        Args:
            trace: all requests that can come.
            spec: of the model; its tensors are not made.
            config: sizes and switches; with one row, requests come one after another.
            cost: how long steps take.
            token_by_token: whether each decode is a step of its own.
            source: says which requests of the trace come, and when; by default all, as `Arrivals` has it.
            after_step: called when time has passed, at the end of a step. Of decodes that are made many at
                once, the last one is a step of its own.
        """
        self.now_ns = 0
        self.context = BooksOnlyContext(spec, config, clock=lambda: self.now_ns)
        self.scheduler = Scheduler(self.context)
        self._trace = trace
        self._cost = cost
        self._token_by_token = token_by_token
        self._chains = chains_of(trace, config.block_size_tokens)
        self._source: RequestSource = source or Arrivals(trace, one_after_another=config.max_requests == 1)
        self._after_step = after_step
        self._answers: dict[int, list[int]] = {}  # of requests that have not ended, the tokens still to come
        self._resumed = [0] * len(trace.requests)
        self.first_token_ns: list[int | None] = [None] * len(trace.requests)
        self._num_ended = 0
        self._num_refused_tokens = 0

    def run(self, progress: Progress = lambda num_served, num_all: None) -> ReplayResult:
        """Serve all requests that are left."""
        while self.step():
            progress(self._num_ended, len(self._trace.requests))
        return self.result()

    def step(self) -> bool:
        """Make the next step, and the decodes behind it that change no book; False where nothing is left."""
        self._add_requests()
        steps = self.scheduler.schedule()
        while not steps:
            next_ns = self._source.next_ns
            if next_ns is None:
                return False
            self.now_ns = max(self.now_ns, next_ns)
            self._add_requests()
            steps = self.scheduler.schedule()
        wait_on = self._may_admit and self._changes_nothing(steps)
        self._make(steps)
        if not self._token_by_token and (wait_on or not self._may_admit):
            self._pass_quiet_decodes()
        return True

    def result(self) -> ReplayResult:
        """What came of the requests so far."""
        stats = self.context.cache_stats()
        lost: dict[str, int] = {why: number for why, number in stats.computed_by_reason.items() if number}
        if self._num_refused_tokens:
            lost[TOO_LONG] = self._num_refused_tokens
        return ReplayResult(
            num_requests=self._num_ended,
            prompt_tokens=stats.num_prompt_tokens + self._num_refused_tokens,
            resumed_tokens=stats.num_resumed_tokens,
            lost_by_reason=lost,
            num_states_taken=stats.num_states_committed,
            state_capacity=stats.num_free_slots + stats.num_reserved_slots + stats.num_committed_slots,
            resumed_lengths=tuple(self._resumed),
        )

    # ---- requests

    def _add_requests(self) -> None:
        while numbers := self._source.due(self.now_ns):
            for number in numbers:
                self._add(number)

    def _add(self, number: int) -> None:
        entry, config = self._trace.requests[number], self.context.config
        pool = self.context.prefix_cache.kv_blocks.total_count * config.block_size_tokens
        if len(entry.prompt) + len(entry.answer) > min(pool, config.max_sequence_length):
            self._num_refused_tokens += len(entry.prompt)
            self._end(number)
            return
        self._answers[number] = entry.answer.tolist()
        self.scheduler.add(
            DynamicInferenceRequest(
                request_id=number,
                prompt_tokens=entry.prompt.tolist(),
                sampling=_sampling(len(entry.answer)),
                plan=config.checkpoint_plan,
                hashes=self._chains[number],
                arrival_s=self.now_ns / NANOSECONDS,
            )
        )

    def _generate(self, request: DynamicInferenceRequest, num_tokens: int) -> None:
        """Append the next tokens of the request's answer; end the request behind the last one."""
        first = request.num_generated
        if not first:
            came_ns = self._source.came_ns(request.request_id)
            self.first_token_ns[request.request_id] = self.now_ns - came_ns
        request.tokens += self._answers[request.request_id][first : first + num_tokens]
        if len(request.tokens) >= request.max_length:
            self._resumed[request.request_id] = request.ledger.resumed
            del self._answers[request.request_id]
            self.scheduler.remove(request)
            self._end(request.request_id)

    def _end(self, number: int) -> None:
        self._num_ended += 1
        self._source.note_end(number, self.now_ns)

    # ---- steps

    def _make(self, steps: Sequence[RequestStep]) -> None:
        steps = self.context.begin_books(steps)
        self.context.end_step()
        num_decodes = sum(step.decoding for step in steps)
        num_prefill_tokens = sum(step.length for step in steps if not step.decoding)
        self.now_ns += self._step_ns(num_prefill_tokens, num_decodes)
        for step in steps:
            if step.completes:
                self._generate(step.request, 1)
        if self._after_step:
            self._after_step()

    def _step_ns(self, num_prefill_tokens: int, num_decodes: int) -> int:
        return round(self._cost.seconds(num_prefill_tokens, num_decodes) * NANOSECONDS)

    @property
    def _may_admit(self) -> bool:
        """Whether a request waits and a row is free."""
        has_free_rows = len(self.scheduler.running) < self.context.config.max_requests
        return bool(self.scheduler.waiting) and has_free_rows

    def _changes_nothing(self, steps: Sequence[RequestStep]) -> bool:
        """Whether the next steps meet the same books, so that who waits now waits on."""
        return not self.scheduler.admitted and all(
            self.context.num_quiet_decodes(step.request) and step.stop + 1 < step.request.max_length
            for step in steps
        )

    def _pass_quiet_decodes(self) -> None:
        """Make all the steps that would only move the running requests' positions."""
        running = self.scheduler.running
        if not running or self.scheduler.num_paused:
            return
        step_ns = self._step_ns(0, len(running))
        number = min(request.max_length - len(request.tokens) for request in running)
        for request in running:
            number = min(number, self.context.num_quiet_decodes(request))
            if not number:
                return
        horizon_ns = self._source.horizon_ns
        if horizon_ns is not None:
            number = min(number, -(-(horizon_ns - self.now_ns) // max(step_ns, 1)))
        parts = (number,) if self._after_step is None else (number - 1, 1)
        for num_decodes in parts if number > 0 else ():
            self._pass_decodes(num_decodes, step_ns)

    def _pass_decodes(self, number: int, step_ns: int) -> None:
        if number:
            running = list(self.scheduler.running)
            self.context.pass_decodes(running, number)
            self.now_ns += number * step_ns
            for request in running:
                self._generate(request, number)
            if self._after_step:
                self._after_step()


@lru_cache(maxsize=4096)
def _sampling(num_tokens: int) -> SamplingParams:
    return SamplingParams(num_tokens_to_generate=num_tokens)
