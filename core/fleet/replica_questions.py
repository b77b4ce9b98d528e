"""What the ingresses of a fleet ask a replica, and what they say of themselves while they ask."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..net.routing.state_events import StateEvents, StatePublisher

GONE_S = 30.0  # an ingress that has asked nothing for so long is gone: its requests have ended


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
    """The ingresses that ask a replica: each receives all changes of its states, none waits for a step."""

    def __init__(
        self,
        call: Callable[[Callable[[Any], Any]], Awaitable[Any]],
        new_publisher: Callable[[], StatePublisher] | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`call`: `AsyncEngine.call`. `new_publisher` makes that of an ingress; None without a cache."""
        self._call = call
        self._new_publisher = new_publisher
        self._clock = clock
        self._ingresses: dict[str, _Ingress] = {}

    def answer(self, question: IngressQuestion) -> StateEvents | None:
        """What the poll that ended has found; begins another one. None without one, and without a cache."""
        ingress = self._ingresses.setdefault(question.ingress, _Ingress({}, 0.0))
        ingress.counts = question.counts
        ingress.asked_s = self._clock()
        for known_ingress in self._ingresses.values():
            if self._is_gone(known_ingress):
                known_ingress.publisher = known_ingress.poll = None
        if self._new_publisher is None or (ingress.poll is not None and not ingress.poll.done()):
            return None
        last_poll = ingress.poll
        publisher = ingress.publisher = ingress.publisher or self._new_publisher()
        poll = self._call(lambda _: publisher.snapshot() if question.lacks_states else publisher.take())
        ingress.poll = asyncio.ensure_future(poll)
        return None if last_poll is None or last_poll.exception() else last_poll.result()

    @property
    def counts(self) -> dict[str, Mapping[str, int]]:
        """The last counts of each ingress; one that is gone has no requests, and counted what it counted."""
        no_requests = {"requests_waiting": 0, "requests_running": 0}
        return {
            name: {**ingress.counts, **no_requests} if self._is_gone(ingress) else ingress.counts
            for name, ingress in self._ingresses.items()
        }

    def _is_gone(self, ingress: _Ingress) -> bool:
        return self._clock() - ingress.asked_s >= GONE_S
