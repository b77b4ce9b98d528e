"""Who is told what an engine does: a monitor, a trace."""

import logging
import sys
from collections import deque
from collections.abc import Collection, Sequence
from types import FrameType
from typing import Protocol

from ...request import RequestResult
from ...validation import shown
from ..contexts.request import DynamicInferenceRequest, RequestStep
from .stack_frames import is_on_stack
from .step_report import NewTokens

logger = logging.getLogger(__name__)

_CALLS = ("request_added", "request_resumed", "step_made", "request_ended")


class EngineObserver(Protocol):
    """Is told what an engine does, in the thread that calls the engine.

    The engine's books are in order at each call but `request_added`. An error that an observer raises is
    logged, and the observer is not called again. Nothing that an observer is given may be changed.

    An exception out of a signal handler, such as Control-C, may cost a call of `request_added`,
    `request_resumed` or `step_made`. It never costs `request_ended`, which may come twice instead.
    """

    def request_added(self, request: DynamicInferenceRequest) -> None:
        """A request waits now.

        Where a model or an observer of the cache adds it from inside a step, the step is under way: an engine
        then refuses every call but `add_request` and `stats(settle=False)`.
        """

    def request_resumed(self, step: RequestStep) -> None:
        """A step has begun a prompt, or jumped ahead in it: `num_resumed` tokens before `start` were resumed.

        `step.spans` say why the tokens behind were to be computed. A preempted request begins again.
        """

    def step_made(self, steps: Sequence[RequestStep], tokens: NewTokens, duration_s: float) -> None:
        """A step has ended, and its tokens are read. Requests that it has completed have their `result`.

        Args:
            steps: what each request did.
            tokens: request id -> all new tokens, in order.
            duration_s: seconds that the call took which made the step.
        """

    def request_ended(self, request: DynamicInferenceRequest, result: RequestResult) -> None:
        """A request has ended, or was cancelled; one that was never admitted, too.

        An observer that is interrupted hears the same end again.
        """


class EngineObservers:
    """The observers of one engine. A call of a failing observer is logged, and the observer is dropped."""

    def __init__(self) -> None:
        self._observers: tuple[EngineObserver, ...] = ()
        self._ended: deque[tuple[DynamicInferenceRequest, RequestResult]] = deque()
        self._teller: FrameType | None = None

    def __bool__(self) -> bool:
        return bool(self._observers)

    def add(self, observer: EngineObserver) -> None:
        """Call `observer` from now on; ValueError for an object without the four methods."""
        has_calls = all(callable(getattr(observer, name, None)) for name in _CALLS)
        if isinstance(observer, type) or not has_calls:
            raise ValueError(
                f"observer is {shown(observer)}; accepted: an object with the methods {', '.join(_CALLS)}"
            )
        if all(observer is not known for known in self._observers):
            self._observers = (*self._observers, observer)

    def remove(self, observer: EngineObserver) -> None:
        """Stop calling `observer`; ValueError for one that does not observe."""
        left = tuple(known for known in self._observers if known is not observer)
        if len(left) == len(self._observers):
            raise ValueError(f"observer is {shown(observer)}; accepted: one that observes this engine")
        self._observers = left

    def request_added(self, request: DynamicInferenceRequest) -> None:
        self._tell("request_added", request)

    def step_made(
        self,
        steps: Sequence[RequestStep],
        admitted: Collection[DynamicInferenceRequest],
        tokens: NewTokens,
        duration_s: float,
    ) -> None:
        """Tell of a step, and of the prompts that it began. `admitted`: the requests that got a row."""
        for step in steps:
            if not step.decoding and (step.num_resumed or step.request in admitted):
                self._tell("request_resumed", step)
        self._tell("step_made", steps, tokens, duration_s)

    def note_end(self, request: DynamicInferenceRequest, result: RequestResult) -> None:
        """Note that a request has ended; `tell_ended` tells of it, unless the end is taken back before."""
        if self._observers:
            self._ended.append((request, result))

    def tell_ended(self) -> None:
        """Tell of the requests that have ended since the last call.

        An end is noted until all observers have heard it. A call that an observer makes tells nothing: the
        call that runs goes on.
        """
        if self._is_telling():
            return
        self._teller = sys._getframe()
        while self._ended:
            request, result = self._ended[0]
            if request.result is result:
                self._tell("request_ended", request, result)
            self._ended.popleft()
        self._teller = None

    def _is_telling(self) -> bool:
        """Whether `tell_ended` runs. An interrupted one leaves its frame; so the stack decides."""
        if self._teller is None:
            return False
        if not is_on_stack(self._teller, sys._getframe(1)):
            self._teller = None
        return self._teller is not None

    def _tell(self, call: str, *arguments: object) -> None:
        for observer in self._observers:
            try:
                getattr(observer, call)(*arguments)
            except Exception:
                logger.exception("%s of observer %s failed; it is dropped", call, shown(observer))
                self._observers = tuple(known for known in self._observers if known is not observer)
