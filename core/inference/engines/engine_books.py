"""The requests of an engine, and how its books are put in order after a call that failed."""

import logging
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import FrameType

from ...cache_stats import SpeculationStats
from ...request import FinishReason, RequestResult
from ..contexts.dynamic_context import DynamicInferenceContext
from ..contexts.request import DynamicInferenceRequest, RequestStep
from .call_maker import CallMaker, CallsHere
from .drafter import Drafter
from .engine_observer import EngineObservers
from .recovery import EngineState
from .sampling import SampledStep
from .scheduler import Scheduler
from .step_report import StepReport

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LaunchedStep:
    """A step that runs on the device and has ended in the context's books; its tokens are not read yet.

    Attributes:
        requests: what each request does.
        sampled: its tokens.
        check_logits: raises where its logits are NaN; None where nobody asks.
    """

    requests: tuple[RequestStep, ...]
    sampled: SampledStep
    check_logits: Callable[[], None] | None = None


@dataclass
class StepUndo:
    """What a step that fails is taken back to.

    Attributes:
        num_tokens: the requests that ran before the step, and the number of tokens that each had.
        speculation, num_reports: of the books, before the step.
        settled: whether the step is at a point where all books are in order.
    """

    num_tokens: dict[DynamicInferenceRequest, int]
    speculation: SpeculationStats
    num_reports: int
    settled: bool = False


class EngineBooks:
    """Who is served, who waits, and what has ended.

    The books change only inside `changing`, `forgetting` and `in_step`. Whatever stops a change in between is
    repaired, at once or at the next call: see `EngineState`.

    Attributes:
        state: whether the engine is in a step, and whether the books are in order.
        scheduler: who runs and who waits.
        requests: id -> request that has not ended.
        unclaimed: id -> result of a request that ended, which has no owner and was not reported.
        reports: reports of steps that were made and not returned.
        unread: the step that was launched ahead; None where no step was. To drop it loses no token, once its
            requests are queued again: they compute the token again.
        abandoned: ids of requests whose leases have ended; filled at any moment, by any thread.
        speculation: what drafts were worth.
        num_rebuilds: how often an interrupted call cost all cached prefixes.
        observers: who is told of requests and steps.
        calls: makes what changes the books, on this rank alone or on all ranks of a split model.
    """

    def __init__(
        self, context: DynamicInferenceContext, drafter: Drafter | None, drop_graphs: Callable[[], None]
    ) -> None:
        self.state = EngineState(context.spec.groups.is_split, context.memory.scrubber.scrub)
        self.requests: dict[int, DynamicInferenceRequest] = {}
        self.unclaimed: dict[int, RequestResult] = {}
        self.reports: deque[StepReport] = deque()
        self.unread: LaunchedStep | None = None
        self.abandoned: deque[int] = deque()
        self.scheduler = Scheduler(context, drafter)
        self.speculation = SpeculationStats()
        self.num_rebuilds = 0
        self.observers = EngineObservers()
        self.calls: CallMaker = CallsHere()
        self._context = context
        self._drafter = drafter
        self._drop_graphs = drop_graphs

    # ---- changes

    def enter(self, request: DynamicInferenceRequest) -> None:
        """Queue a new request."""
        self.calls.make("enter", partial(self._enter, request), *asked_of(request))

    def _enter(self, request: DynamicInferenceRequest) -> None:
        with self.changing():
            self.requests[request.request_id] = request
            self.scheduler.add(request)
        if self.observers:
            self.observers.request_added(request)

    def end(self, request: DynamicInferenceRequest, reason: FinishReason) -> RequestResult:
        """End a request between two steps."""
        return self.calls.make("end", partial(self._end, request, reason), request.request_id, reason)

    def _end(self, request: DynamicInferenceRequest, reason: FinishReason) -> RequestResult:
        with self.changing():
            return self.finish(request, reason)

    def finish(self, request: DynamicInferenceRequest, reason: FinishReason) -> RequestResult:
        """End a request; call this inside `changing` or `in_step`."""
        request.result = result = request.result_for(reason)
        if not request.owned:
            self.unclaimed[request.request_id] = result
        self.observers.note_end(request, result)  # first: a repair gives back what is still in `requests`
        del self.requests[request.request_id]
        self.scheduler.remove(request, discard=reason == "invalid_logits")
        if not self.requests:
            self.unread = None  # an idle engine keeps nothing of the requests that it has served
        return result

    def changing(self, *in_order: type[Exception]) -> AbstractContextManager[None]:
        """Inside, requests and the cache may be changed.

        `in_order`: errors that leave the books in order.
        """
        self.calls.check_changes()
        return self.state.changing(self._mend, *in_order)

    def forgetting(self) -> AbstractContextManager[None]:
        """Inside, all cached prefixes are forgotten; what stops that is completed."""
        self.calls.check_changes()
        return self.state.changing(self._rebuild)

    def begin_step(self) -> StepUndo:
        """What the next step is taken back to if it fails."""
        self.scheduler.admitted = {}
        before = {request: len(request.tokens) for request in self.scheduler.running}
        return StepUndo(before, self.speculation, len(self.reports))

    def take_unread(self) -> LaunchedStep | None:
        """The step that was launched ahead, once; None without one, or where all its requests have ended."""
        step, self.unread = self.unread, None
        live = step is not None and any(one.request.result is None for one in step.requests)
        return step if live else None

    def in_step(self, frame: FrameType, undo: StepUndo) -> AbstractContextManager[None]:
        """Inside, a step is made, by the function with this frame; `undo` takes it back."""
        self.calls.check_changes()
        return self.state.in_step(frame, lambda: self._undo(undo))

    # ---- what users left

    def check_usable(self, call: str) -> None:
        """Repair what an interrupted call left, and cancel what nobody waits for.

        Raises:
            RuntimeError: a step runs, the engine is broken, or the repair fails. The message names `call`.
        """
        self.state.check_usable(call)
        self.drain()

    def settle(self) -> None:
        """As `check_usable`, but does nothing during a step, or where the engine is broken."""
        if not (self.state.stepping or self.state.broken):
            self.state.repair()
            self.drain()

    def drain(self) -> None:
        """Cancel the requests whose leases have ended, and tell of all requests that have ended."""
        while self.abandoned and self.calls.may_end_requests:
            request_id = self.abandoned[0]
            request = self.requests.get(request_id)
            if request is not None:
                self.end(request, "cancelled")
            self.unclaimed.pop(request_id, None)
            self.abandoned.popleft()
        self.observers.tell_ended()

    # ---- repairs, each of which can be made any number of times

    def _undo(self, undo: StepUndo) -> None:
        """Take back a step: running requests wait again, with the tokens that they had before."""
        self.speculation = undo.speculation
        self.unread = None
        while len(self.reports) > undo.num_reports:
            self.reports.pop()
        requests = undo.num_tokens | self.scheduler.admitted
        for request, num_tokens in requests.items():
            request.cut_to(num_tokens)
            self._put_back(request)
        try:
            settled, undo.settled = undo.settled, False  # this may be interrupted, too
            self._context.abort_step()
            self.scheduler.restart(requests)
            if not settled:
                self._check()
        except Exception:
            self._rebuild()

    def _put_back(self, request: DynamicInferenceRequest) -> None:
        request.result = None
        self.unclaimed.pop(request.request_id, None)
        self.requests[request.request_id] = request

    def _mend(self) -> None:
        """Put the books in order after a call that stopped anywhere."""
        for request in list(self.requests.values()):
            self._put_back(request)
        try:
            self._check()
        except Exception:
            self._rebuild()

    def _check(self) -> None:
        if not __debug__:
            raise AssertionError("python -O leaves no checks")
        for request in self.requests.values():
            request.match = None  # a match that is being brought up to date may be half old
        cache = self._context.prefix_cache
        if cache.tier is not None:
            cache.tier.mend()
        cache.slots.map.mend_counts()  # statistics alone cost no cache
        cache.kv_blocks.tree.mend_counts()
        cache.slots.mend_order()
        self.check_integrity()

    def _rebuild(self) -> None:
        """Forget every cached prefix and pin, and queue all requests again."""
        self._drop_graphs()
        self.unread = None
        self._context.reset(keep_counts=True)
        self.scheduler.rebuild(self.requests.values())
        self.num_rebuilds += 1
        logger.warning(
            "a call was interrupted: cached prefixes and pins are forgotten, %d requests are queued again",
            len(self.requests),
        )

    def reset(self) -> None:
        """End every request with the reason "reset", and drop every result, prefix and count."""
        self.state.begin_reset(self._reset)
        self._reset()
        self.state.end_reset()
        self.observers.tell_ended()

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
        """Raise AssertionError where the books contradict themselves; O(pools and requests)."""
        if not self.state.stepping:
            self.scheduler.check_integrity(self.requests)
        self._context.check_integrity()


def asked_of(request: DynamicInferenceRequest) -> tuple[object, ...]:
    """What makes an equal request on another rank; the salt is not in it."""
    return (
        request.request_id, request.prompt_tokens, request.sampling, request.plan, request.hashes.root,
        request.seed, request.next_token, request.given_tokens,
    )  # fmt: skip
