"""What a step did, and observers of an engine: a monitor, a trace."""

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from ...params_and_results import GeneratedToken, RequestResult
from ...validation import brief_repr, refused, shown
from ..contexts.dynamic_request import Batch, DynamicInferenceRequest, ScheduledRequest

logger = logging.getLogger(__name__)

NewTokens = dict[int, tuple[GeneratedToken, ...]]
_CALLS = ("request_added", "request_resumed", "step_made", "request_ended")


@dataclass(frozen=True)
class StepReport:
    """What one `step` did.

    Attributes:
        admitted: ids of the requests that got a row.
        finished: results of the requests that ended.
        tokens: request id -> all new tokens, in order; more than one only where drafts were accepted.
    """

    admitted: tuple[int, ...] = ()
    finished: tuple[RequestResult, ...] = ()
    tokens: NewTokens = field(default_factory=dict)

    __repr__ = brief_repr


class EngineObserver(Protocol):
    """Receives what an engine does, in the thread that calls the engine.

    The engine is consistent at each call but `request_added`. An error that an observer raises is logged, and
    the observer is not called again. An observer changes nothing that it receives.
    """

    def request_added(self, request: DynamicInferenceRequest) -> None:
        """A request waits now. If a step adds it, the engine accepts no call but `add_request` and
        `stats(settle=False)`."""

    def request_resumed(self, scheduled: ScheduledRequest) -> None:
        """A step has begun a prompt, or jumped ahead in it: `num_resumed` tokens before `start` were resumed.

        `scheduled.spans` have the reasons of the computed tokens. A preempted request begins again.
        """

    def step_made(self, batch: Batch, tokens: NewTokens, duration_s: float) -> None:
        """A step has ended, and its tokens are read. Requests that it has completed have their `result`.

        Args:
            batch: the requests of the step, and which tokens of each it computed.
            tokens: request id -> all new tokens, in order.
            duration_s: seconds of the call that made the step.
        """

    def request_ended(self, request: DynamicInferenceRequest, result: RequestResult) -> None:
        """A request has ended, or was cancelled; one that was never admitted, too.

        An observer that is interrupted receives the same end again.
        """


class Observers:
    """Notifies the observers of an engine. One that raises is logged, and dropped."""

    def __init__(self) -> None:
        self.members: tuple[EngineObserver, ...] = ()
        self.pending_ends: deque[tuple[DynamicInferenceRequest, RequestResult]] = deque()  # not received yet
        self._is_notifying = False

    def add(self, observer: EngineObserver) -> None:
        if isinstance(observer, type) or not all(callable(getattr(observer, name, None)) for name in _CALLS):
            raise refused("observer", observer, f"an object with the methods {', '.join(_CALLS)}")
        if all(observer is not member for member in self.members):
            self.members = (*self.members, observer)

    def remove(self, observer: EngineObserver) -> None:
        members = tuple(member for member in self.members if member is not observer)
        if len(members) == len(self.members):
            raise refused("observer", observer, "one that observes this engine")
        self.members = members

    def notify_ended(self) -> None:
        """Notify of the requests that have ended since the last call, unless the end was undone."""
        if self._is_notifying:  # an observer has called the engine: the outer call goes on
            return
        self._is_notifying = True
        try:
            while self.pending_ends:
                request, result = self.pending_ends[0]
                if request.result is result:
                    self.notify("request_ended", request, result)
                self.pending_ends.popleft()
        finally:
            self._is_notifying = False

    def notify(self, call: str, *arguments: object) -> None:
        for observer in self.members:
            try:
                getattr(observer, call)(*arguments)
            except Exception:
                logger.exception("%s of observer %s failed; it is dropped", call, shown(observer))
                self.members = tuple(member for member in self.members if member is not observer)
