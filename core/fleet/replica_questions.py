"""What the ingresses of a fleet ask a replica, and what they say of themselves while they ask."""

import asyncio
import time
from collections.abc import Callable, Mapping
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


class StateLooks:
    """An engine's states, look after look; a look waits for the end of a step, and no caller waits for it."""

    def __init__(self, engine: AsyncEngine, publisher: StatePublisher) -> None:
        self._engine, self._publisher = engine, publisher
        self._look: asyncio.Future[StateEvents | None] | None = None

    def next(self, wants_all: bool) -> StateEvents | None:
        """What the look that ended has found; begins another one, at the changes or at all states."""
        ended, events = self._look, None
        if ended is not None:
            if not ended.done():
                return None
            events = None if ended.exception() else ended.result()
        take = self._publisher.snapshot if wants_all else self._publisher.take
        self._look = asyncio.ensure_future(self._engine.call(lambda engine: take()))
        return events


class Ingresses:
    """The ingresses that ask a replica: each receives every change of the replica's states."""

    def __init__(
        self, new_looks: Callable[[], StateLooks] | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`new_looks` makes those of an ingress; None without a cache."""
        self._new_looks, self._clock = new_looks, clock
        self._looks: dict[str, StateLooks] = {}
        self._numbers: dict[str, Mapping[str, int]] = {}
        self._asked_s: dict[str, float] = {}

    def answer(self, question: IngressQuestion) -> StateEvents | None:
        """What has changed, once it is known; None before that, and without a cache."""
        name = question.ingress
        self._asked_s[name], self._numbers[name] = self._clock(), question.numbers
        for gone in self._looks.keys() - self._asking():
            del self._looks[gone]
        if self._new_looks is None:
            return None
        if name not in self._looks:
            self._looks[name] = self._new_looks()
        return self._looks[name].next(question.lacks_states)

    @property
    def numbers(self) -> dict[str, Mapping[str, int]]:
        """The last numbers of each ingress; one that is gone has no requests, and counted what it counted."""
        asking = self._asking()
        return {
            name: numbers if name in asking else {**numbers, "requests_waiting": 0, "requests_running": 0}
            for name, numbers in self._numbers.items()
        }

    def _asking(self) -> set[str]:
        horizon = self._clock() - GONE_S
        return {name for name, asked_s in self._asked_s.items() if asked_s > horizon}
