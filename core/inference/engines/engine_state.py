"""The requests and results of an engine, and how they become consistent again after a call that failed."""

import logging
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import FrameType

from ...cache_stats import SpeculationStats
from ...errors import KVBlockCapacityError
from ...request import EarlyEnd, FinishReason, RequestResult
from ..contexts.dynamic_context import DynamicInferenceContext
from ..contexts.request import DynamicInferenceRequest, RequestStep
from .drafter import Drafter
from .engine_observer import EngineObservers, NewTokens, StepReport
from .sampling import SampledStep, count_accepted
from .scheduler import Scheduler

logger = logging.getLogger(__name__)

UNRECOVERABLE = "the engine could not recover from a failed call; call again, or call reset()"
FAILED_ON_SPLIT_MODEL = (
    "a call failed on this rank of a split model, and other ranks may have made it; once no rank is in a "
    "step, call reset() on all of them, or start all again"
)
_HELD_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def signals_held() -> Iterator[None]:
    """Run the handlers of SIGINT and SIGTERM after the block; a second signal's handler runs at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: handler for number in _HELD_SIGNALS if callable(handler := signal.getsignal(number))}
    arrived: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        arrived.append(number)
        if len(arrived) > 1:
            handlers[signal.Signals(number)](number, frame)

    for number in handlers:
        signal.signal(number, hold)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for first in arrived[:1]:
            handlers[signal.Signals(first)](first, None)


@dataclass(frozen=True)
class LaunchedStep:
    """A step that runs on the device and has ended in the context; its tokens are not read yet.

    Attributes:
        requests: what each request does.
        sampled: its tokens.
        check_logits: raises where its logits are NaN; None without that check.
    """

    requests: tuple[RequestStep, ...]
    sampled: SampledStep
    check_logits: Callable[[], None] | None = None


class EngineState:
    """Running and waiting requests, results, and what the engine forgets where a call fails.

    Requests and cache change only inside `changing`, `forgetting` and `in_step`. SIGINT and SIGTERM wait for
    the end of a step. An exception that escapes a step undoes it: its requests are queued again, with the
    tokens that they had. If the state then contradicts itself, or the undo fails, all cached prefixes are
    forgotten, and all requests are queued again. If the repair fails, the next call repeats it.

    Example: requests 3 and 5 run with 40 and 60 tokens. Control-C during a step: both get a token,
    KeyboardInterrupt is raised, and the next call of `step` returns the report. MemoryError in the model:
    both are queued again with 40 and 60 tokens, and resume from their cached states.

    Attributes:
        scheduler: running and waiting requests.
        requests: id -> request that has not ended.
        unclaimed: id -> result of a request without an owner that has ended, and was not reported.
        reports: reports of steps that were made and not returned.
        unread: the step that was launched ahead; None without one. Dropping it loses no token, once its
            requests are queued again: they compute the token again.
        abandoned: ids of requests to end at the next call, and why; any thread may append at any moment.
        speculation: what drafts were worth.
        num_rebuilds: how often a failed call cost all cached prefixes.
        observers: receive requests and steps.
        stepping: the thread that is in a step; None between steps.
        broken_by: the error after which the ranks of a split model may differ; None without one.
    """

    def __init__(
        self, context: DynamicInferenceContext, drafter: Drafter | None, drop_graphs: Callable[[], None]
    ) -> None:
        self.requests: dict[int, DynamicInferenceRequest] = {}
        self.unclaimed: dict[int, RequestResult] = {}
        self.reports: deque[StepReport] = deque()
        self.unread: LaunchedStep | None = None
        self.abandoned: deque[tuple[int, EarlyEnd]] = deque()
        self.scheduler = Scheduler(context, drafter)
        self.speculation = SpeculationStats()
        self.num_rebuilds = 0
        self.observers = EngineObservers()
        self.stepping: int | None = None
        self.broken_by: BaseException | None = None
        self._context = context
        self._drafter = drafter
        self._drop_graphs = drop_graphs
        self._is_split = context.spec.groups.is_split
        self._in_change = False
        self._repair: Callable[[], None] | None = None  # of the change under way, or of one that failed

    # ---- changes

    @contextmanager
    def changing(
        self, *harmless: type[Exception], repair: Callable[[], None] | None = None
    ) -> Iterator[None]:
        """Inside, requests and the cache may be changed; a change inside another is a part of it."""
        if self._in_change:
            yield
            return
        # Holding signals takes 10 us: worth it for steps, and for what forgets all prefixes.
        with signals_held() if repair is not None else nullcontext():
            self._in_change = True
            self._repair = repair or self._check_or_rebuild
            try:
                yield
                self._complete()
            except harmless:
                self._complete()
                raise
            except BaseException as error:
                self.note_failure(error)
                self._run_repair()
                raise
            finally:
                self._in_change = False

    def forgetting(self) -> AbstractContextManager[None]:
        """Inside, all cached prefixes are forgotten; an error completes that."""
        return self.changing(repair=self._rebuild)

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Inside, a step is made; an error undoes it. Only requests may be added meanwhile."""
        self.scheduler.admitted = {}
        num_tokens = {request: len(request.tokens) for request in self.scheduler.running}
        undo = partial(self._undo_step, num_tokens, self.speculation, len(self.reports))
        with self.changing(repair=undo):
            self.stepping = threading.get_ident()
            try:
                yield
            finally:
                self.stepping = None

    def _complete(self) -> None:
        self._context.memory.scrubber.scrub()
        self._repair = None

    def _run_repair(self) -> None:
        try:
            if self._repair is not None:
                self._repair()
            self._complete()
        except Exception as error:
            logger.exception("the repair after a failed call failed")
            raise RuntimeError(UNRECOVERABLE) from error

    # ---- what calls are possible

    def check_usable(self, call: str) -> None:
        """Repair what a failed call has left."""
        if self.stepping is not None:
            if self.stepping == threading.get_ident():
                where = "from inside a step of the same engine; call it between steps"
            else:
                where = (
                    "from one thread while another thread is in a step of the same engine; one thread at a "
                    "time calls an engine"
                )
            raise RuntimeError(f"{call} is called {where}")
        self.check_not_broken()
        if self._repair is not None and not self._in_change:
            self._run_repair()

    def check_not_broken(self) -> None:
        if self.broken_by is not None:
            raise RuntimeError(FAILED_ON_SPLIT_MODEL) from self.broken_by

    def note_failure(self, error: BaseException) -> None:
        """Break the engine of a split model, unless every rank raises `error` alike."""
        if self._is_split and not (isinstance(error, KVBlockCapacityError) and error.request_id is not None):
            self.broken_by = error

    # ---- requests

    def add(self, request: DynamicInferenceRequest) -> None:
        """Queue a new request."""
        with self.changing():
            self.requests[request.request_id] = request
            self.scheduler.add(request)
        if self.observers:
            self.observers.request_added(request)

    def end(self, request: DynamicInferenceRequest, reason: FinishReason) -> RequestResult:
        """End a request inside `changing` or `in_step`."""
        request.result = result = request.result_for(reason)
        if not request.owned:
            self.unclaimed[request.request_id] = result
        self.observers.note_end(request, result)  # first: a repair restores what is still in `requests`
        del self.requests[request.request_id]
        self.scheduler.remove(request, discard=reason == "invalid_logits")
        if not self.requests:
            self.unread = None  # an idle engine keeps nothing of the requests that it has served
        return result

    def end_step(self, steps: Sequence[RequestStep], tokens: NewTokens, invalid: Sequence[int]) -> StepReport:
        """End the requests that are complete, and the `invalid` ones, whose logits are no numbers."""
        reasons: dict[int, FinishReason] = dict.fromkeys(invalid, "invalid_logits")
        for step in steps:
            request, reason = step.request, step.request.finish_reason
            if reason is not None and request.result is None:  # of a step ahead, requests may have ended
                reasons.setdefault(request.request_id, reason)
            if self._drafter is not None and step.decoding and request.request_id in tokens:
                new, so_far = [one.token for one in tokens[request.request_id]], self.speculation
                self.speculation = SpeculationStats(
                    so_far.num_decodes + 1,
                    so_far.num_tokens + len(new),
                    so_far.num_drafted + len(step.drafts),
                    so_far.num_accepted + count_accepted(step.drafts, new),
                )
        finished = [self.end(self.requests[request_id], reason) for request_id, reason in reasons.items()]
        return StepReport(
            admitted=tuple(s.request.request_id for s in steps if s.request in self.scheduler.admitted),
            generated={request_id: new[-1] for request_id, new in tokens.items()},
            finished=tuple(finished),
            tokens=tokens,
        )

    def take_unread(self) -> LaunchedStep | None:
        """The step that was launched ahead, once; None without one, or where all its requests have ended."""
        step, self.unread = self.unread, None
        live = step is not None and any(one.request.result is None for one in step.requests)
        return step if live else None

    # ---- repairs, each of which can be made any number of times

    def _undo_step(
        self, num_tokens: dict[DynamicInferenceRequest, int], speculation: SpeculationStats, num_reports: int
    ) -> None:
        """Queue the requests of a step again, with the tokens that they had before it."""
        self.speculation, self.unread = speculation, None
        while len(self.reports) > num_reports:
            self.reports.pop()
        requests = num_tokens | self.scheduler.admitted
        for request, number in requests.items():
            request.cut_to(number)
            self.requests[request.request_id] = request
        try:
            self._context.abort_step()
            self.scheduler.restart(requests)
        except Exception:
            self._rebuild()
        self._check_or_rebuild()

    def _check_or_rebuild(self) -> None:
        for request in self.requests.values():
            request.result = None
            request.match = None  # a match that is being brought up to date may be half old
            self.unclaimed.pop(request.request_id, None)
        try:
            if not __debug__:
                raise AssertionError("python -O leaves no checks")
            self.check_integrity()
        except Exception:
            self._rebuild()

    def _rebuild(self) -> None:
        """Forget every cached prefix and pin, and queue all requests again."""
        self._drop_graphs()
        self.unread = None
        self._context.reset(keep_counts=True)
        self.scheduler.rebuild(self.requests.values())
        self.num_rebuilds += 1
        logger.warning(
            "a call failed: cached prefixes and pins are forgotten, %d requests are queued again",
            len(self.requests),
        )

    def reset(self) -> None:
        """End every request with the reason "reset", and drop every result, prefix and count."""
        self._in_change, self._repair = False, self._reset  # in place of every other repair
        with signals_held():
            self._reset()
            self._complete()
            self.broken_by = None
        self.observers.notify_ended()

    def _reset(self) -> None:
        for request in self.requests.values():
            request.result = result = request.result_for("reset")
            self.observers.note_end(request, result)
        for collection in (self.requests, self.unclaimed, self.reports, self.abandoned):
            collection.clear()
        self.unread = None
        self.scheduler = Scheduler(self._context, self._drafter)
        self.speculation = SpeculationStats()
        self.num_rebuilds = 0
        self._context.reset()

    def check_integrity(self) -> None:
        """Raise AssertionError where requests, rows and memory contradict each other."""
        if self.stepping is None:
            self.scheduler.check_integrity(self.requests)
        self._context.check_integrity()
