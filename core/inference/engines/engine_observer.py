"""What a step did, and observers of an engine: a monitor, a trace."""

import logging
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ...request import RequestResult
from ...validation import brief_repr, shown
from ..contexts.request import DynamicInferenceRequest, GeneratedToken, RequestStep

logger = logging.getLogger(__name__)

NewTokens = dict[int, tuple[GeneratedToken, ...]]
_CALLS = ("request_added", "request_resumed", "step_made", "request_ended")


@dataclass(frozen=True)
class StepReport:
    """What one `step` did.

    Attributes:
        admitted: ids of the requests that got a row.
        generated: request id -> newest token, for each request with a new token.
        finished: results of the requests that ended.
        tokens: request id -> all new tokens, in order; more than one only where drafts were accepted.
    """

    admitted: tuple[int, ...] = ()
    generated: dict[int, GeneratedToken] = field(default_factory=dict)
    finished: tuple[RequestResult, ...] = ()
    tokens: NewTokens = field(default_factory=dict)

    def __repr__(self) -> str:
        return brief_repr(self)


class EngineObserver(Protocol):
    """Receives what an engine does, in the thread that calls the engine.

    The engine is consistent at each call but `request_added`. An error that an observer raises is logged, and
    the observer is not called again. An observer changes nothing that it receives.
    """

    def request_added(self, request: DynamicInferenceRequest) -> None:
        """A request waits now. If a step adds it, the engine accepts no call but `add_request` and
        `stats(settle=False)`."""

    def request_resumed(self, step: RequestStep) -> None:
        """A step has begun a prompt, or jumped ahead in it: `num_resumed` tokens before `start` were resumed.

        `step.spans` have the reasons of the computed tokens. A preempted request begins again.
        """

    def step_made(self, steps: Sequence[RequestStep], tokens: NewTokens, duration_s: float) -> None:
        """A step has ended, and its tokens are read. Requests that it has completed have their `result`.

        Args:
            steps: what each request did.
            tokens: request id -> all new tokens, in order.
            duration_s: seconds of the call that made the step.
        """

    def request_ended(self, request: DynamicInferenceRequest, result: RequestResult) -> None:
        """A request has ended, or was cancelled; one that was never admitted, too.

        An observer that is interrupted receives the same end again.
        """


class EngineObservers:
    """The observers of one engine. A call of a failing observer is logged, and the observer is dropped."""

    def __init__(self) -> None:
        self._observers: tuple[EngineObserver, ...] = ()
        self._ended: deque[tuple[DynamicInferenceRequest, RequestResult]] = deque()
        self._notifying = False

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
        others = tuple(known for known in self._observers if known is not observer)
        if len(others) == len(self._observers):
            raise ValueError(f"observer is {shown(observer)}; accepted: one that observes this engine")
        self._observers = others

    def request_added(self, request: DynamicInferenceRequest) -> None:
        self._notify("request_added", request)

    def step_made(
        self,
        steps: Sequence[RequestStep],
        admitted: Collection[DynamicInferenceRequest],
        tokens: NewTokens,
        duration_s: float,
    ) -> None:
        """Notify of a step, and of the prompts that it began. `admitted`: the requests that got a row."""
        for step in steps:
            if not step.decoding and (step.num_resumed or step.request in admitted):
                self._notify("request_resumed", step)
        self._notify("step_made", steps, tokens, duration_s)

    def note_end(self, request: DynamicInferenceRequest, result: RequestResult) -> None:
        """Queue an end for `notify_ended`, unless the end is undone before."""
        if self._observers:
            self._ended.append((request, result))

    def notify_ended(self) -> None:
        """Notify of the requests that have ended since the last call."""
        if self._notifying:  # an observer has called the engine: the outer call goes on
            return
        self._notifying = True
        try:
            while self._ended:
                request, result = self._ended[0]
                if request.result is result:
                    self._notify("request_ended", request, result)
                self._ended.popleft()
        finally:
            self._notifying = False

    def _notify(self, call: str, *arguments: object) -> None:
        for observer in self._observers:
            try:
                getattr(observer, call)(*arguments)
            except Exception:
                logger.exception("%s of observer %s failed; it is dropped", call, shown(observer))
                self._observers = tuple(known for known in self._observers if known is not observer)
