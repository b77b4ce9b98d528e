"""The request loop that all peers share: arrivals, rows, prefill in parts, decodes, a clock of step costs."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mambaslots.replay.engine_replay import Arrivals
from mambaslots.replay.setting import ReplayResult, ReplaySetting
from mambaslots.replay.trace import Trace

NANOSECONDS = 1_000_000_000
"""In a second; the clock counts whole ones, as `Arrivals` does."""


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A request on its way. A cache writes its own notes into `matched`, `held`, `private` and `state`.

    Attributes:
        index: place in the trace.
        path: nodes of the whole blocks of prompt and answer.
        num_prompt: tokens of the prompt.
        target: tokens to prefill before the first decode; more than `num_prompt` after a preemption.
        last: tokens computed when the request ends: all but the last token of the answer.
        computed: tokens whose KV and state are there.
        resumed: tokens that were not computed, of the first admission.
        matched: blocks whose KV was cached when the request was admitted.
        held: registered blocks that the request holds.
        private: blocks that the request holds and that are not found.
        state: node that the request resumed from; 0 for none.
    """

    index: int
    path: list[int]
    num_prompt: int
    target: int
    last: int
    computed: int = 0
    resumed: int = -1
    matched: int = 0
    held: int = 0
    private: int = 0
    state: int = 0


class CacheModel(Protocol):
    """What the loop asks of a cache."""

    def admit(self, request: RunningRequest) -> None:
        """Match, hold what is shared, set `computed` to what is resumed."""

    def stop(self, request: RunningRequest, budget: int) -> int:
        """Where a prefill step of at most `budget` tokens ends; `computed` for not in this step."""

    def reserve(self, request: RunningRequest, end: int) -> bool:
        """Take memory for the tokens up to `end`; False, and nothing changed, where there is none."""

    def advance(self, request: RunningRequest, end: int) -> None:
        """Tokens up to `end` are computed: make blocks and states findable, set `computed`."""

    def boundary(self, request: RunningRequest) -> int:
        """The next position at which a decode must call `advance`."""

    def release(self, request: RunningRequest, finished: bool) -> None:
        """Give back what the request holds. A request that is not finished is admitted again later."""

    def check_integrity(self) -> None:
        """Raise AssertionError where the indices are wrong."""

    @property
    def num_states_taken(self) -> int: ...

    @property
    def state_capacity(self) -> int: ...


class RequestLoop:
    """Serves one trace with one cache.

    Each step computes one token of every decoding request, then prefills with what is left of
    `max_tokens_per_step`: first requests that run, then waiting ones in order of arrival,
    while rows and memory
    last. Steps in which requests only decode are taken together up to the next boundary, end or arrival.
    A decode without memory preempts the request admitted last.
    """

    def __init__(
        self,
        trace: Trace,
        paths: Sequence[list[int]],
        cache: CacheModel,
        setting: ReplaySetting,
    ) -> None:
        self._trace = trace
        self._paths = paths
        self._cache = cache
        self._setting = setting
        self._arrivals = Arrivals(trace, one_after_another=setting.max_requests == 1)
        self._waiting: deque[RunningRequest] = deque()
        self._running: list[RunningRequest] = []
        self._now_ns = 0
        self._num_ended = 0
        self._resumed = 0

    def run(self) -> ReplayResult:
        """Serve all requests, and say what came of it."""
        total = len(self._trace.requests)
        while self._num_ended < total:
            self._waiting.extend(map(self._request, self._arrivals.take_due(self._now_ns)))
            if self._waiting or self._running:
                self._step()
            else:
                self._now_ns = self._arrivals.next_ns or 0
        return ReplayResult(
            num_requests=total,
            prompt_tokens=self._trace.num_prompt_tokens,
            resumed_tokens=self._resumed,
            num_states_taken=self._cache.num_states_taken,
            state_capacity=self._cache.state_capacity,
        )

    def _request(self, index: int) -> RunningRequest:
        request = self._trace.requests[index]
        num_prompt = len(request.prompt)
        return RunningRequest(
            index, self._paths[index], num_prompt, num_prompt, num_prompt + len(request.answer) - 1
        )

    def _step(self) -> None:
        decodes = self._decodes()
        budget = self._setting.max_tokens_per_step - len(decodes)
        prefills = self._prefills(max(budget, 1))
        if not decodes and not prefills:
            if self._running or self._waiting:
                self._drop_first()
            return
        num_prefill_tokens = sum(end - request.computed for request, end in prefills)
        step_ns = self._step_ns(num_prefill_tokens, len(decodes))
        num_steps = 1 if prefills else self._num_alike(decodes, step_ns)
        self._now_ns += num_steps * step_ns
        ended = []
        for request, end in prefills:
            self._cache.advance(request, end)
            if end == request.last:
                ended.append(request)
        for request in decodes:
            end = request.computed + num_steps
            if end == self._cache.boundary(request):
                self._cache.advance(request, end)
            else:
                request.computed = end
            if end == request.last:
                ended.append(request)
        for request in ended:
            self._end(request)

    def _decodes(self) -> list[RunningRequest]:
        """Requests that decode in this step, with memory for their next token."""
        decodes = []
        place = 0
        while place < len(self._running):
            request = self._running[place]
            if request.computed >= request.target:
                if not self._cache.reserve(request, request.computed + 1):
                    if len(self._running) == 1:
                        self._end(request)
                        break
                    victim = self._running.pop()
                    self._preempt(victim)
                    if victim is not request:
                        continue
                    break
                decodes.append(request)
            place += 1
        return decodes

    def _prefills(self, budget: int) -> list[tuple[RunningRequest, int]]:
        prefills: list[tuple[RunningRequest, int]] = []
        for request in self._running:
            if budget > 0 and request.computed < request.target:
                end = self._cache.stop(request, budget)
                if end > request.computed:
                    if not self._cache.reserve(request, end):
                        return prefills
                    prefills.append((request, end))
                    budget -= end - request.computed
        while budget > 0 and self._waiting and len(self._running) < self._setting.max_requests:
            request = self._waiting[0]
            self._cache.admit(request)
            end = self._cache.stop(request, budget)
            if end == request.computed or not self._cache.reserve(request, end):
                self._cache.release(request, False)
                break
            if request.resumed < 0:
                request.resumed = request.computed
                self._resumed += request.resumed
            self._waiting.popleft()
            self._running.append(request)
            prefills.append((request, end))
            budget -= end - request.computed
        return prefills

    def _step_ns(self, num_prefill_tokens: int, num_decodes: int) -> int:
        return max(1, round(self._setting.cost.seconds(num_prefill_tokens, num_decodes) * NANOSECONDS))

    def _num_alike(self, decodes: Sequence[RunningRequest], step_ns: int) -> int:
        """Steps until something happens: a boundary, an end, or an arrival that finds a free row."""
        steps = min(min(self._cache.boundary(one), one.last) - one.computed for one in decodes)
        next_ns = self._arrivals.next_ns
        if len(self._running) < self._setting.max_requests and next_ns is not None:
            steps = max(1, min(steps, -(-(next_ns - self._now_ns) // step_ns)))
        return steps

    def _preempt(self, request: RunningRequest) -> None:
        self._cache.release(request, False)
        request.target = max(request.target, request.computed)
        request.computed = 0
        self._waiting.appendleft(request)

    def _drop_first(self) -> None:
        """Nothing can run: of several prefills the last gives way; one alone is too long for the memory.

        Such a request is served without the cache.
        """
        if len(self._running) > 1:
            self._preempt(self._running.pop())
            return
        if self._running:
            request = self._running.pop()
            self._cache.release(request, False)
        else:
            request = self._waiting.popleft()
        num_steps = -(-request.num_prompt // self._setting.max_tokens_per_step)
        self._now_ns += num_steps * self._step_ns(self._setting.max_tokens_per_step, 0)
        self._finish(request)

    def _end(self, request: RunningRequest) -> None:
        self._running.remove(request)
        self._cache.release(request, True)
        self._finish(request)

    def _finish(self, request: RunningRequest) -> None:
        self._num_ended += 1
        self._arrivals.schedule_next(request.index, self._now_ns)
