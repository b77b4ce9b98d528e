"""What a replica tells a `StateChannel`, as its cache changes."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from ray.exceptions import RayError

from ..inference.engines.async_engine import AsyncEngine
from ..net.routing.state_events import StateEvents, encode_events
from .channel_reader import find_channel
from .state_channel import HandOver, Orders

logger = logging.getLogger(__name__)

_BUSY_S = 0.03
"""Between two looks at the cache while requests run: what changes in between is one message."""
_IDLE_S = 1.0
"""Between two signs of life without requests. A new channel hears of the replica so soon."""


class Publisher(Protocol):
    """Tells what has changed in an engine's cache; `StatePublisher` is one."""

    def take(self) -> StateEvents | None:
        """What has changed since the last call."""

    def snapshot(self) -> StateEvents:
        """All that has been told."""


class StateFeed:
    """Tells a channel of an engine's states, every 30 ms while requests run, and does what it is asked to.

    Args:
        replica: the replica's name.
        channel: the name of the channel's actor.
        engine: has the states.
        publisher: tells what has changed; called in the engine's thread. None: there are no states.
        serve_hand_over: sends prefixes to a replica that has joined.
    """

    def __init__(
        self,
        replica: str,
        channel: str,
        engine: AsyncEngine,
        publisher: Publisher | None,
        serve_hand_over: Callable[[HandOver], Coroutine[Any, Any, None]],
    ) -> None:
        self._replica = replica
        self._channel = channel
        self._engine = engine
        self._publisher = publisher
        self._serve_hand_over = serve_hand_over
        self._actor: Any = None
        self._owes_snapshot = False  # True while it is not known that the channel took a message
        self._woken = asyncio.Event()
        self._hand_overs: set[asyncio.Task[None]] = set()

    def wake(self) -> None:
        """A request has come or ended: look at the cache soon."""
        self._woken.set()

    async def run(self) -> None:
        """Tell until the engine has given up, or the task is cancelled."""
        loop = asyncio.get_running_loop()
        while self._engine.failure is None:
            told_s = loop.time()
            try:
                await self._tell()
            except RayError:
                self._actor = None  # the channel begins anew, and will want a snapshot
            except Exception:
                logger.exception("mambaslots: the replica's states were not told")
            is_busy = self._engine.num_running + self._engine.num_waiting > 0
            try:
                async with asyncio.timeout(_BUSY_S if is_busy else _IDLE_S):
                    await self._woken.wait()
                await asyncio.sleep(told_s + _BUSY_S - loop.time())  # what comes at once is one message
            except TimeoutError:
                pass
            self._woken.clear()

    async def _tell(self) -> None:
        """Tell what has changed; a snapshot makes up for a message that was not taken."""
        if self._actor is None:
            self._actor = find_channel(self._channel)
            if self._actor is None:
                return
        publisher = self._publisher
        if publisher is None:
            return
        events = await self._engine.call(lambda engine: publisher.take())
        sent = () if events is None else (encode_events(events),)
        owes_snapshot, self._owes_snapshot = self._owes_snapshot, True
        orders: Orders = await self._actor.publish.remote(self._replica, sent)
        if orders.wants_snapshot or owes_snapshot:
            snapshot = await self._engine.call(lambda engine: publisher.snapshot())
            await self._actor.publish.remote(self._replica, (encode_events(snapshot),))
        self._owes_snapshot = False
        for hand_over in orders.hand_overs:
            task = asyncio.create_task(self._serve_hand_over(hand_over))
            self._hand_overs.add(task)
            task.add_done_callback(self._hand_overs.discard)

    def leave(self) -> None:
        """Tell that the replica ends; waits for nothing."""
        if self._actor is not None:
            self._actor.leave.remote(self._replica)
