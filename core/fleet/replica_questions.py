"""What the ingresses of a fleet ask a replica, and what they say of themselves while they ask."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..inference.engines.async_engine import AsyncEngine
from ..net.routing.state_events import StateEvents
from ..net.routing.state_publisher import StatePublisher

GONE_S = 30.0
"""An ingress that has asked nothing for so long is gone: its requests have ended."""


class IngressQuestion(NamedTuple):
    """Asks which states a replica gained and lost, or, where the ingress `lacks_states`, which it holds."""

    ingress: str
    lacks_states: bool
    numbers: Mapping[str, int]  # what the ingress adds to the fleet's metrics


class StatePoller:
    """Polls an engine's states: a poll waits for the end of a step, and no caller waits for a poll."""

    def __init__(self, engine: AsyncEngine, publisher: StatePublisher) -> None:
        self._engine, self._publisher = engine, publisher
        self._poll: asyncio.Future[StateEvents | None] | None = None

    def next(self, wants_all: bool) -> StateEvents | None:
        """What the poll that ended has found; begins another one, of the changes or of all states."""
        ended, events = self._poll, None
        if ended is not None:
            if not ended.done():
                return None
            events = None if ended.exception() else ended.result()
        take = self._publisher.snapshot if wants_all else self._publisher.take
        self._poll = asyncio.ensure_future(self._engine.call(lambda engine: take()))
        return events


@dataclass
class _Ingress:
    numbers: Mapping[str, int]
    asked_s: float
    poller: StatePoller | None = None


class Ingresses:
    """The ingresses that ask a replica: each receives every change of the replica's states."""

    def __init__(
        self, new_poller: Callable[[], StatePoller] | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`new_poller` makes that of an ingress; None without a cache."""
        self._new_poller, self._clock = new_poller, clock
        self._known: dict[str, _Ingress] = {}

    def answer(self, question: IngressQuestion) -> StateEvents | None:
        """What has changed, once it is known; None before that, and without a cache."""
        ingress = self._known.setdefault(question.ingress, _Ingress({}, 0.0))
        ingress.numbers, ingress.asked_s = question.numbers, self._clock()
        for other in self._known.values():
            if self._is_gone(other):
                other.poller = None
        if self._new_poller is None:
            return None
        ingress.poller = ingress.poller or self._new_poller()
        return ingress.poller.next(question.lacks_states)

    @property
    def numbers(self) -> dict[str, Mapping[str, int]]:
        """The last numbers of each ingress; one that is gone has no requests, and counted what it counted."""
        ended = {"requests_waiting": 0, "requests_running": 0}
        return {
            name: {**known.numbers, **ended} if self._is_gone(known) else known.numbers
            for name, known in self._known.items()
        }

    def _is_gone(self, ingress: _Ingress) -> bool:
        return self._clock() - ingress.asked_s >= GONE_S
