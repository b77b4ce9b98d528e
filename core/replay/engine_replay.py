"""Serves a trace with the engine's scheduler and prefix cache, without a model."""

import heapq
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from ..config import InferenceConfig
from ..inference.contexts.cache.hashing import PrefixHashChain
from ..inference.contexts.cache.pool_stats import NANOSECONDS
from ..inference.contexts.dynamic_context import DynamicInferenceContext
from ..inference.contexts.dynamic_request import Batch, DynamicInferenceRequest, ScheduledRequest
from ..inference.engines.scheduler import Scheduler
from ..params_and_results import SamplingParams
from ..state_spec import HybridStateSpec
from ..validation import ceil_div
from .setting import ReplayResult, StepCost
from .trace import Tokens, Trace

TOO_LONG = "too_long"
"""Reason of the tokens of a request that fits into no KV pool: an engine refuses the request."""


@lru_cache(maxsize=4)
def chains_of(trace: Trace, block_size_tokens: int) -> Sequence[PrefixHashChain]:
    """The hash chains of all prompts with their answers, read only."""
    contents: dict[int, bytes] = {}  # equal blocks share their bytes
    return [_chain(request.prompt, request.answer, block_size_tokens, contents) for request in trace.requests]


def _chain(prompt: Tokens, answer: Tokens, size: int, contents: dict[int, bytes]) -> PrefixHashChain:
    chain = PrefixHashChain(size)
    chain.extend_to(np.concatenate([prompt, answer]))
    blocks = zip(chain.hashes, chain.tokens, strict=True)
    chain.tokens = [contents.setdefault(prefix_hash, content) for prefix_hash, content in blocks]
    return chain


class Arrivals:
    """When the requests of a trace arrive, in nanoseconds since it began.

    A session's requests keep their gaps, and none arrives before the answer to the one before it: requests at
    0 s and 5 s, first answer at 7 s: the second one arrives at 7 s. `one_after_another`: all are one session.
    """

    def __init__(self, trace: Trace, *, one_after_another: bool = False) -> None:
        self._following: dict[int, tuple[int, int]] = {}  # the next request of the session, and the gap
        self._arrival_ns: dict[int, int] = {}  # of requests that run or wait
        self._upcoming: list[tuple[int, int]] = []  # (time, request), a heap
        last: dict[int, tuple[int, int]] = {}  # of each session: request and time
        for index, request in enumerate(trace.requests):
            at_ns = round(request.arrival_s * NANOSECONDS)
            session = 0 if one_after_another else request.session
            if session in last:
                before, before_ns = last[session]
                self._following[before] = index, at_ns - before_ns
            else:
                self._upcoming.append((at_ns, index))
            last[session] = index, at_ns
        heapq.heapify(self._upcoming)

    @property
    def next_ns(self) -> int | None:
        """When the next request arrives; None where none arrives before an answer ends."""
        return self._upcoming[0][0] if self._upcoming else None

    @property
    def horizon_ns(self) -> int | None:
        """A time before which no request arrives, as long as no answer ends; None for never."""
        return self.next_ns

    def take_due(self, now_ns: int) -> Sequence[int]:
        """Take the numbers of the requests that have arrived by now, in the order of arrival."""
        found = []
        while self._upcoming and self._upcoming[0][0] <= now_ns:
            at_ns, index = heapq.heappop(self._upcoming)
            self._arrival_ns[index] = at_ns
            found.append(index)
        return found

    def arrival_ns(self, index: int) -> int:
        """When an unfinished request arrived."""
        return self._arrival_ns[index]

    def schedule_next(self, index: int, now_ns: int) -> None:
        """Schedule the session's next request: the answer of `index` has ended."""
        arrival_ns = self._arrival_ns.pop(index)
        if index in self._following:
            following, gap_ns = self._following[index]
            heapq.heappush(self._upcoming, (max(arrival_ns + gap_ns, now_ns), following))


class ContextWithoutMemory(DynamicInferenceContext):
    """The rows, slots, blocks and decisions of a `DynamicInferenceContext`, with pools of no bytes."""

    def _spec_of_memory(self) -> HybridStateSpec:
        return self.spec.without_bytes()

    def reserve_step(self, batch: Batch) -> tuple[ScheduledRequest, ...]:
        """As `begin_step`, without inputs for a model; returns the batch with its reserved slots."""
        self._reserve(batch)
        return self.batch

    def num_quiet_decodes(self, request: DynamicInferenceRequest) -> int:
        """How many next decodes change nothing but the request's position: no KV block, no state; O(1)."""
        allocation = request.allocation
        if allocation is None or not allocation.decoding or allocation.path.state_slot >= 0:
            return 0
        size, start = self.config.block_size_tokens, allocation.num_computed
        if start == len(allocation.path.blocks) * size or start + 1 != len(request.tokens):
            return 0
        return size - 1 - start % size

    def skip_decodes(self, requests: Iterable[DynamicInferenceRequest], num_tokens: int) -> None:
        """Count at most `num_quiet_decodes` decodes of requests as made; the caller appends their tokens."""
        for request in requests:
            if request.allocation is not None:
                self._request_states.skip_decodes(request.allocation, num_tokens)
                request.num_counted = max(request.num_counted, request.allocation.num_computed)


class EngineReplay:
    """One trace, served by the `Scheduler` over a `ContextWithoutMemory`, on a clock that counts steps."""

    def __init__(self, trace: Trace, spec: HybridStateSpec, config: InferenceConfig, cost: StepCost) -> None:
        self.now_ns = 0
        self.context = ContextWithoutMemory(spec, config, clock=lambda: self.now_ns)
        self.scheduler = Scheduler(self.context)
        self._trace = trace
        self._cost = cost
        self._chains = chains_of(trace, config.block_size_tokens)
        self.arrivals = Arrivals(trace, one_after_another=config.max_requests == 1)
        self._answers: dict[int, list[int]] = {}  # of unfinished requests
        self._resumed = [0] * len(trace.requests)
        self.first_token_ns: list[int | None] = [None] * len(trace.requests)  # from its arrival
        self._num_ended = 0
        self._num_refused_tokens = 0

    def run(self) -> ReplayResult:
        """Serve all requests that are left."""
        while self.step():
            pass
        return self.result()

    def step(self) -> bool:
        """Make the next step and the quiet decodes after it; False where nothing is left."""
        while not (batch := self._schedule()):
            if (next_ns := self.arrivals.next_ns) is None:
                return False
            self.now_ns = max(self.now_ns, next_ns)
        self._run_batch(batch)
        has_free_rows = len(self.scheduler.running) < self.context.config.max_requests
        if not (self.scheduler.waiting and has_free_rows):
            self._pass_quiet_decodes()
        return True

    def result(self) -> ReplayResult:
        """The figures of the requests that have ended."""
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

    def _schedule(self) -> Batch:
        """The requests of the next step, among them those that have arrived by now."""
        while numbers := self.arrivals.take_due(self.now_ns):
            for number in numbers:
                self._add(number)
        return self.scheduler.schedule()

    def _add(self, number: int) -> None:
        entry, config = self._trace.requests[number], self.context.config
        longest = min(self.context.pool_tokens, config.max_sequence_length)
        if len(entry.prompt) + len(entry.answer) > longest:
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
                chain=self._chains[number],
                arrival_s=self.now_ns / NANOSECONDS,
            )
        )

    def _generate(self, request: DynamicInferenceRequest, num_tokens: int) -> None:
        """Append the next tokens of the request's answer; the last one ends the request."""
        number, first = request.request_id, request.answer_length
        if not first:
            self.first_token_ns[number] = self.now_ns - self.arrivals.arrival_ns(number)
        request.tokens += self._answers[number][first : first + num_tokens]
        if len(request.tokens) >= request.max_length:
            self._resumed[number] = request.ledger.resumed
            del self._answers[number]
            self.scheduler.remove(request)
            self._end(number)

    def _end(self, number: int) -> None:
        self._num_ended += 1
        self.arrivals.schedule_next(number, self.now_ns)

    # ---- steps

    def _run_batch(self, batch: Batch) -> None:
        batch = self.context.reserve_step(batch)
        self.context.end_step()
        num_decodes = sum(scheduled.decoding for scheduled in batch)
        num_prefill_tokens = sum(scheduled.length for scheduled in batch if not scheduled.decoding)
        self.now_ns += self._step_ns(num_prefill_tokens, num_decodes)
        for scheduled in batch:
            if scheduled.samples_token:
                self._generate(scheduled.request, 1)

    def _step_ns(self, num_prefill_tokens: int, num_decodes: int) -> int:
        return round(self._cost.seconds(num_prefill_tokens, num_decodes) * NANOSECONDS)

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
        if (horizon_ns := self.arrivals.horizon_ns) is not None:
            number = min(number, ceil_div(horizon_ns - self.now_ns, max(step_ns, 1)))
        if number > 0:
            self._pass_decodes(number, step_ns)

    def _pass_decodes(self, number: int, step_ns: int) -> None:
        running = list(self.scheduler.running)
        self.context.skip_decodes(running, number)
        self.now_ns += number * step_ns
        for request in running:
            self._generate(request, number)


@lru_cache(maxsize=4096)
def _sampling(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens)
