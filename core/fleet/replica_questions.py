"""What the ingresses of a fleet ask a replica, and what they say of themselves while they ask."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..net.routing.state_events import StateEvents, StatePublisher

GONE_S = 30.0
"""An ingress that has asked nothing for so long is gone: its requests have ended."""


class IngressQuestion(NamedTuple):
    """Asks which states a replica gained and lost, or, where the ingress `lacks_states`, which it holds."""

    ingress: str
    lacks_states: bool
    counts: Mapping[str, int]  # what the ingress adds to the fleet's metrics


@dataclass
class _Ingress:
    counts: Mapping[str, int]
    asked_s: float
    publisher: StatePublisher | None = None
    poll: "asyncio.Future[StateEvents | None] | None" = None  # of the publisher, in the engine's thread


class Ingresses:
    """The ingresses that ask a replica: each receives every change of the replica's states.

    A poll of the states waits for the end of a step, and no caller waits for a poll.
    """

    def __init__(
        self,
        call: Callable[[Callable[[Any], Any]], Awaitable[Any]],
        new_publisher: Callable[[], StatePublisher] | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`call`: `AsyncEngine.call`. `new_publisher` makes that of an ingress; None without a cache."""
        self._call, self._new_publisher, self._clock = call, new_publisher, clock
        self._known: dict[str, _Ingress] = {}

    def answer(self, question: IngressQuestion) -> StateEvents | None:
        """What the poll that ended has found; begins another one. None without one, and without a cache."""
        ingress = self._known.setdefault(question.ingress, _Ingress({}, 0.0))
        ingress.counts, ingress.asked_s = question.counts, self._clock()
        for other in self._known.values():
            if self._is_gone(other):
                other.publisher = other.poll = None
        if self._new_publisher is None or (ingress.poll is not None and not ingress.poll.done()):
            return None
        ended, publisher = ingress.poll, ingress.publisher or self._new_publisher()
        take = publisher.snapshot if question.lacks_states else publisher.take
        ingress.publisher, ingress.poll = publisher, asyncio.ensure_future(self._call(lambda engine: take()))
        return None if ended is None or ended.exception() else ended.result()

    @property
    def counts(self) -> dict[str, Mapping[str, int]]:
        """The last counts of each ingress; one that is gone has no requests, and counted what it counted."""
        ended = {"requests_waiting": 0, "requests_running": 0}
        return {
            name: {**known.counts, **ended} if self._is_gone(known) else known.counts
            for name, known in self._known.items()
        }

    def _is_gone(self, ingress: _Ingress) -> bool:
        return self._clock() - ingress.asked_s >= GONE_S
