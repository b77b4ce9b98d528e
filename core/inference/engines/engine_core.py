"""The calls that change an engine, and how it becomes consistent again after one that failed."""

import logging
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from operator import eq
from types import FrameType
from typing import TYPE_CHECKING, Literal

import torch

from ...cache_stats import SpeculationStats
from ...devices import on_device_of
from ...errors import KVBlockCapacityError, MambaSlotCapacityError
from ...params_and_results import EarlyEnd, FinishReason, RequestResult
from ..contexts.cache.hashing import PrefixHashChain
from ..contexts.cache.pins import PinnedPrefix
from ..contexts.dynamic_context import DynamicInferenceContext
from ..contexts.dynamic_request import Batch, DynamicInferenceRequest
from ..contexts.step_inputs import Model
from .drafter import Drafter
from .engine_observer import NewTokens, Observers, StepReport
from .scheduler import Scheduler
from .step_runner import StepRunner

if TYPE_CHECKING:
    from .invariance.mode import BatchInvariance

logger = logging.getLogger(__name__)

UNRECOVERABLE = "the engine could not recover from a failed call; call again, or call reset()"
FAILED_ON_SPLIT_MODEL = (
    "a call failed on this rank of a split model, and other ranks may have made it; once no rank is in a "
    "step, call reset() on all of them, or start all again"
)
_DEFERRED_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_NOT_DEFERRED = (signal.SIG_IGN, None)  # ignored, or handled by another language

CoreCall = Literal[
    "add", "end", "step", "pin", "unpin", "reset_prefix_cache", "set_weights_version", "suspend", "resume",
    "reset",
]  # fmt: skip
"""The names of the methods of `EngineCore` that change an engine; all ranks of a split model call them."""


@contextmanager
def signals_deferred() -> Iterator[None]:
    """SIGINT and SIGTERM have their effect after the block, a second one at once, an ignored one none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pairs = ((signum, signal.getsignal(signum)) for signum in _DEFERRED_SIGNALS)
    handlers = {signum: handler for signum, handler in pairs if handler not in _NOT_DEFERRED}
    arrived: list[int] = []

    def hold(signum: int, frame: FrameType | None) -> None:
        arrived.append(signum)
        if len(arrived) > 1:
            signal.signal(signum, handlers[signal.Signals(signum)])
            signal.raise_signal(signum)

    def restore() -> None:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)

    try:
        for signum in handlers:
            signal.signal(signum, hold)
        yield
    finally:
        try:
            restore()
        except BaseException:  # of a signal that arrived between two of them
            restore()
            raise
        finally:
            if arrived:  # the second one has had its effect
                signal.raise_signal(arrived[0])


class EngineCore:
    """Running and waiting requests, results, and the repair of a call that failed.

    Requests and cache change only inside `changing`. An exception that escapes a step undoes it: its requests
    are queued again, with the tokens that they had. If the core then contradicts itself, or the undo fails,
    the cache is cleared. If the repair fails, the next call repeats it.
    """

    def __init__(
        self, context: DynamicInferenceContext, drafter: Drafter | None, invariance: "BatchInvariance | None"
    ) -> None:
        self.requests: dict[int, DynamicInferenceRequest] = {}  # by id; those that have not ended
        self.unclaimed: dict[int, RequestResult] = {}  # of requests without an owner, not reported
        self.reports: deque[StepReport] = deque()  # of steps that were made and not returned
        self._to_cancel: deque[tuple[int, EarlyEnd]] = deque()  # any thread may append at any moment
        self.scheduler = Scheduler(context, drafter)
        self.step_runner = StepRunner(context, invariance)
        self.speculation = SpeculationStats()
        self.num_rebuilds = 0
        self.observers = Observers()
        self.is_stepping = False
        self.broken_by: BaseException | None = None  # the ranks of a split model may differ since
        self.weights_version: object = None
        self._context = context
        self._drafter = drafter
        self.is_split = context.spec.groups.is_split
        self._on_device = on_device_of(context.spec.device)
        self._is_changing = False
        self.repair: Callable[[], None] | None = None  # of the change under way, or of one that failed

    # ---- changes

    @contextmanager
    def changing(self, *allowed: type[Exception], repair: Callable[[], None] | None = None) -> Iterator[None]:
        """Inside, requests and the cache may be changed; a change inside another is a part of it."""
        if self._is_changing:
            self.step_runner.is_in_model = False  # if the model's call fails, this change may be half made
            yield
            return
        # Deferring signals takes 10 us: worth it for steps, and for what clears the cache.
        with signals_deferred() if repair is not None else nullcontext():
            self._is_changing = True
            self.repair = repair or self._check_or_rebuild
            try:
                yield
                self._complete()
            except allowed:
                self._complete()
                raise
            except BaseException as error:
                self.break_on_failure(error)
                self._run_repair()
                raise
            finally:
                self._is_changing = False

    def _complete(self) -> None:
        if self._context.config.free_memory == "zero":
            self._context.memory.scrubber.scrub_all()
        self.repair = None

    def _run_repair(self) -> None:
        try:
            if self.repair is not None:
                self.repair()
            self._complete()
        except Exception as error:
            logger.exception("the repair after a failed call failed")
            raise RuntimeError(UNRECOVERABLE) from error

    @contextmanager
    def dropping_cancels(self) -> Iterator[None]:
        """Inside, no request is cancelled here: this rank follows another one, which alone ends requests."""
        to_cancel, self._to_cancel = self._to_cancel, deque(maxlen=0)
        try:
            yield
        finally:
            self._to_cancel = to_cancel

    def queue_cancel(self, request_id: int, reason: EarlyEnd = "cancelled") -> None:
        """Let the next call end a request, unless it has ended; any thread may do so at any moment."""
        self._to_cancel.append((request_id, reason))

    def queued_cancels(self, can_cancel: Callable[[], bool]) -> Iterator[tuple[int, EarlyEnd]]:
        """The queued ends of requests that have not ended; one that the caller has not made stays queued."""
        while self._to_cancel and can_cancel():
            request_id, reason = self._to_cancel[0]
            if request_id in self.requests:
                yield request_id, reason
            self.claim(request_id)
            self._to_cancel.popleft()

    def claim(self, request_id: int) -> RequestResult | None:
        """The result of a request that has ended; once."""
        return self.unclaimed.pop(request_id, None)

    def discard_results(self) -> None:
        """Remove all results and reports: they have no reader."""
        self.unclaimed.clear()
        self.reports.clear()

    # ---- what calls are possible

    def ensure_usable(self, call: str) -> None:
        """Repair what a failed call has left; RuntimeError where `call` cannot be made now."""
        if self.is_stepping:
            raise RuntimeError(
                f"{call} is called during a step of the same engine; call it between steps, from one thread "
                "at a time"
            )
        self.check_not_broken()
        if self.repair is not None and not self._is_changing:
            self._run_repair()

    def check_not_broken(self) -> None:
        if self.broken_by is not None:
            raise RuntimeError(FAILED_ON_SPLIT_MODEL) from self.broken_by

    def break_on_failure(self, error: BaseException) -> None:
        """Break the engine of a split model, unless every rank raises `error` alike."""
        if self.is_split and not (isinstance(error, KVBlockCapacityError) and error.request_id is not None):
            self.broken_by = error

    # ---- the calls of `CoreCall`

    def add(self, request: DynamicInferenceRequest) -> None:
        """Queue a new request."""
        with self.changing():
            self.requests[request.request_id] = request
            self.scheduler.add(request)
        if self.observers.members:
            self.observers.notify("request_added", request)

    def end(self, request_id: int, reason: FinishReason) -> RequestResult:
        """End a request between two steps."""
        with self.changing():
            return self._end(self.requests[request_id], reason)

    @torch.inference_mode()
    def step(self, model: Model, reports: bool = False, claims_results: bool = True) -> None:
        """Make a step. `reports`: append its report. `claims_results`: claim its results."""
        begun_s = time.perf_counter()
        self.scheduler.admitted = {}
        num_tokens = {request: len(request.tokens) for request in self.scheduler.running}
        undo = partial(self._undo_step, num_tokens, self.speculation, len(self.reports))
        with self.changing(repair=undo), self._on_device:
            self.is_stepping = True  # only requests may be added meanwhile
            try:
                batch, tokens, invalid = self.step_runner.make_step(model, self.scheduler)
                report = self._end_step(batch, tokens, invalid)
                if reports:
                    for result in report.finished if claims_results else ():
                        self.claim(result.request_id)
                    self.reports.append(report)
            finally:
                self.is_stepping = False
        self.scheduler.admitted = {}
        if self.observers.members:
            for scheduled in batch:
                if not scheduled.decoding and (scheduled.num_resumed or scheduled.admits):
                    self.observers.notify("request_resumed", scheduled)
            self.observers.notify("step_made", batch, tokens, time.perf_counter() - begun_s)

    def pin(self, chain: PrefixHashChain) -> PinnedPrefix:
        with self.changing(MambaSlotCapacityError):
            return self._context.prefix_cache.pin(chain)

    def unpin(self, index: int) -> None:
        """Unpin the prefix at `index` of the pins; ranks of which one has failed may give other `pin_id`s."""
        pins = self._context.prefix_cache.pins
        with self.changing():
            pins.unpin(list(pins.prefixes)[index])

    def reset_prefix_cache(self) -> None:
        with self.changing(repair=self._rebuild):
            self._clear_prefixes()

    def set_weights_version(self, version: object) -> None:
        with self.changing(repair=self._rebuild):
            self._clear_prefixes()
            self.step_runner.clear_graphs()
            self.weights_version = version

    def suspend(self) -> None:
        with self.changing(repair=self._rebuild):
            self.scheduler.requeue(self.scheduler.running)
            self.step_runner.clear()
            self.step_runner.clear_graphs()
            self._context.suspend()

    def resume(self) -> None:
        self._context.resume()

    def reset(self, weights_version: object, allocated: bool) -> None:
        """End every request, and clear results, cache and counts. Arguments: those of the calling rank."""
        self._is_changing, self.repair = False, self._reset  # in place of every other repair
        spec = self._context.spec
        with signals_deferred():
            if spec.groups.abort_reason:
                self.step_runner.clear_graphs()
                spec.groups.renew(spec.device)
            self._reset()
            self._complete()
            self.broken_by = None
        self.notify_ended()
        self.weights_version = weights_version
        was_allocated = self._context.memory.is_allocated
        if allocated and not was_allocated:
            self.resume()
        elif was_allocated and not allocated:
            self.suspend()

    def _clear_prefixes(self) -> None:
        if self._context.memory.is_allocated:  # a suspended engine caches nothing
            self._context.reset_prefix_cache()

    def _end(self, request: DynamicInferenceRequest, reason: FinishReason) -> RequestResult:
        """End a request inside `changing`."""
        request.result = result = request.result_for(reason)
        if not request.owned:
            self.unclaimed[request.request_id] = result
        self._queue_end(request, result)  # first: a repair restores what is still in `requests`
        del self.requests[request.request_id]
        if request.sampling.has_penalties:
            self.step_runner.logits_changes.release_row(request)
        self.scheduler.remove(request, discard=reason == "invalid_logits")
        if not self.requests:
            self.step_runner.unread_step = None  # an idle engine keeps nothing of requests that it has served
        return result

    def _queue_end(self, request: DynamicInferenceRequest, result: RequestResult) -> None:
        """Queue an end for the observers, who receive it unless it is undone before."""
        if self.observers.members:
            self.observers.pending_ends.append((request, result))

    def notify_ended(self) -> None:
        if self.observers.pending_ends:
            self.observers.notify_ended()

    def _end_step(self, batch: Batch, tokens: NewTokens, invalid: Sequence[int]) -> StepReport:
        """End the requests that are complete, and the `invalid` ones, whose logits are no numbers."""
        reasons: dict[int, FinishReason] = dict.fromkeys(invalid, "invalid_logits")
        for scheduled in batch:
            request, reason = scheduled.request, scheduled.request.finish_reason
            if reason is not None and request.result is None:  # of an unread step, requests may have ended
                reasons.setdefault(request.request_id, reason)
            if self._drafter is not None and scheduled.decoding and request.request_id in tokens:
                self._count_drafts(scheduled.drafts, [new.token for new in tokens[request.request_id]])
        finished = [self._end(self.requests[request_id], reason) for request_id, reason in reasons.items()]
        return StepReport(
            admitted=tuple(scheduled.request.request_id for scheduled in batch if scheduled.admits),
            finished=tuple(finished), tokens=tokens,
        )  # fmt: skip

    def _count_drafts(self, drafts: Sequence[int], tokens: Sequence[int]) -> None:
        so_far = self.speculation
        self.speculation = SpeculationStats(
            so_far.num_decodes + 1, so_far.num_tokens + len(tokens), so_far.num_drafted + len(drafts),
            so_far.num_accepted + sum(map(eq, drafts, tokens)),
        )  # fmt: skip

    # ---- repairs, each of which can be made any number of times

    def _undo_step(
        self, num_tokens: dict[DynamicInferenceRequest, int], speculation: SpeculationStats, num_reports: int
    ) -> None:
        """Queue the requests of a step again, with the tokens that they had before it."""
        # First: an undoing that is interrupted, and made again, may leave a change half made.
        in_model, self.step_runner.is_in_model = self.step_runner.is_in_model, False
        self.speculation = speculation
        self.step_runner.clear()
        while len(self.reports) > num_reports:
            self.reports.pop()
        requests = num_tokens | self.scheduler.admitted
        for request, length in requests.items():
            request.cut_to(length)
            self.requests[request.request_id] = request
        try:
            self._context.abort_step()
            self.scheduler.requeue(requests)
        except Exception:
            self._rebuild()
        self._check_or_rebuild(is_half_made=not in_model)

    def _check_or_rebuild(self, *, is_half_made: bool = True) -> None:
        """`is_half_made`: whether a change may be half made; the check of the whole costs O(pool)."""
        for request in self.requests.values():
            request.result = None
            request.match = None  # a match that is being brought up to date may be half old
            self.claim(request.request_id)
        if not is_half_made:
            return
        if not __debug__:  # python -O leaves no checks
            self._rebuild()
            return
        try:
            self.check_integrity()
        except Exception:
            self._rebuild()

    def _rebuild(self) -> None:
        """Clear the cache, pins included, and queue all requests again."""
        self.step_runner.clear_graphs()
        self.step_runner.clear()
        self._context.reset(keep_counts=True)
        self.scheduler.rebuild(self.requests.values())
        self.num_rebuilds += 1
        logger.warning(
            "a call failed: cached prefixes and pins are forgotten, %d requests are queued again",
            len(self.requests), exc_info=sys.exception(),
        )  # fmt: skip

    def _reset(self) -> None:
        for request in self.requests.values():
            request.result = result = request.result_for("reset")
            self._queue_end(request, result)
        self.requests.clear()
        self.discard_results()
        self._to_cancel.clear()
        self.step_runner.clear()
        self.scheduler = Scheduler(self._context, self._drafter)
        self.speculation = SpeculationStats()
        self.num_rebuilds = 0
        self._context.reset()

    def check_integrity(self) -> None:
        """Raise AssertionError where requests, rows and memory contradict each other."""
        if not self.is_stepping:
            self.scheduler.check_integrity(self.requests)
        self._context.check_integrity()
