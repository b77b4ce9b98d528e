"""The states of all replicas: published by replicas, held by a Ray actor, read by routers."""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

import ray
from ray.exceptions import ActorUnavailableError, RayError

from ..inference.engines.async_engine import AsyncEngine
from ..net.routing.state_events import StateEvents, decode_events, encode_events
from ..net.routing.state_index import StateIndex
from ..net.routing.state_publisher import StatePublisher
from ..net.routing.state_router import StateRouter
from ..validation import shown
from .guard import kill_when_still

logger = logging.getLogger(__name__)

NAMESPACE = "mambaslots"
"""Ray's namespace of the channels' actors."""
_LOG_BYTES = 16 * 2**20
"""Readers that miss more get snapshots."""
_FORGET_AFTER_S = 30.0
_LIVE_S = 3.0
"""Replicas send a heartbeat every second."""
_READ_S = 10.0
_STILL_S = 15.0
"""The process of a channel is killed when it ran nothing for so long."""
_RETRY_S = 0.5
_MAX_READERS = 1000
_BUSY_S = 0.03
"""Between two looks at the cache while requests run: what changes in between is one message."""
_IDLE_S = 1.0
"""Between two heartbeats without requests. A new channel knows the replica so soon."""


class Orders(NamedTuple):
    """The reply to a publication: whether events were missed, and hand-overs to serve."""

    wants_snapshot: bool
    hand_overs: tuple["HandOver", ...] = ()


class HandOver(NamedTuple):
    """An order to send prefixes to another replica; both meet at the store at `host` and `port`."""

    name: str
    host: str
    port: int


class News(NamedTuple):
    """What a reader has not received yet.

    `instance` is the channel's; another one counts anew. `version` is for the next read.
    """

    instance: str
    version: int
    events: tuple[bytes, ...]
    replicas: tuple[str, ...]


class StateChannel:
    """A Ray actor that receives events of replicas' states, and gives them to routers.

    It keeps the last events, and what each replica holds, so that a late or slow reader gets snapshots. It
    can be lost at any time: a new one asks every replica for a snapshot. Stale knowledge costs a miss.
    """

    def __init__(self, still_s: float = 0.0) -> None:
        """`still_s`: has this process killed when it ran nothing for so long; 0: not."""
        if still_s:
            kill_when_still(still_s)
        self._instance = secrets.token_hex(8)
        self._version = 0
        self._log: deque[bytes] = deque()
        self._log_bytes = 0
        self._index = StateIndex()
        self._seen_s: dict[str, float] = {}
        self._orders: dict[str, list[HandOver]] = {}
        self._changed = asyncio.Event()

    # ---- for replicas

    async def publish(self, replica: str, events: Sequence[bytes] = ()) -> Orders:
        """Record events of a replica; none are a heartbeat. ValueError: they are of another replica."""
        decoded = [_events_of(replica, encoded) for encoded in events]
        self._forget_silent()
        in_order = True
        for one, encoded in zip(decoded, events, strict=True):
            in_order = self._record(one, encoded) and in_order
        is_known = replica in self._index.replicas
        if is_known:
            self._seen_s[replica] = time.monotonic()
        return Orders(not (is_known and in_order), tuple(self._orders.pop(replica, ())))

    async def order_hand_over(self, joining: str, hand_over: HandOver) -> str | None:
        """Order a hand-over from the live replica that holds most states.

        Returns its name; None where no other holds any state.
        """
        self._forget_silent()
        live_s = time.monotonic() - _LIVE_S
        others = [
            (seen_s >= live_s, len(self._index.keys_of(name)), name)
            for name, seen_s in self._seen_s.items()
            if name != joining
        ]
        _, num_states, name = max(others, default=(False, 0, ""))
        if not num_states:
            return None
        self._orders.setdefault(name, []).append(hand_over)
        return name

    # ---- for readers

    async def read(self, instance: str, version: int, timeout_s: float) -> News:
        """The events after `version`, as soon as there are some; none after `timeout_s`."""
        if instance == self._instance and version == self._version:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()
            except TimeoutError:
                pass
        replicas = tuple(self._index.replicas)
        num_new = self._version - version
        if instance != self._instance or not 0 <= num_new <= len(self._log):
            snapshots = (encode_events(self._index.snapshot_of(name)) for name in replicas)
            return News(self._instance, self._version, tuple(snapshots), replicas)
        events = tuple(self._log)[len(self._log) - num_new :] if num_new else ()
        return News(self._instance, self._version, events, replicas)

    # ---- what it knows

    def _record(self, events: StateEvents, encoded: bytes) -> bool:
        """Record the events. Returns whether none were missed before them."""
        if not self._index.apply(events):
            return False
        self._log.append(encoded)
        self._log_bytes += len(encoded)
        while self._log_bytes > _LOG_BYTES:
            self._log_bytes -= len(self._log.popleft())
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()
        return True

    def _forget_silent(self) -> None:
        """Forget replicas without a heartbeat; they send a snapshot when they come back."""
        horizon = time.monotonic() - _FORGET_AFTER_S
        for name in [name for name, seen_s in self._seen_s.items() if seen_s < horizon]:
            del self._seen_s[name]
            self._index.forget(name)
            self._orders.pop(name, None)


def _events_of(replica: str, encoded: bytes) -> StateEvents:
    """The events in these bytes; ValueError for those of another replica than the caller."""
    events = decode_events(encoded)
    if events.replica != replica:
        raise ValueError(f"events.replica is {shown(events.replica)}; accepted: {shown(replica)}, the caller")
    return events


def open_channel(name: str) -> Any:
    """The actor of a channel; made where there is none. It ends with the process that made it.

    Returns at once: the actor may still be starting.
    """
    actor = ray.remote(StateChannel).options(
        name=name,
        namespace=NAMESPACE,
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,  # it begins empty, and asks all replicas for snapshots
        max_concurrency=_MAX_READERS,
    )
    return actor.remote(_STILL_S)


def find_channel(name: str) -> Any | None:
    """The actor of a channel, or None."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


class ChannelReader:
    """Gives a router the events of a channel, as they come; opens a lost channel again."""

    def __init__(self, name: str, router: StateRouter) -> None:
        self._name = name
        self._router = router
        self._instance, self._version = "", 0

    async def run(self) -> None:
        """Read until the task is cancelled, or Ray has ended; raises nothing else."""
        actor: Any = None  # held: Ray ends an actor without references
        while ray.is_initialized():  # else Ray would be started anew
            try:
                actor = actor or open_channel(self._name)
                while True:
                    self.apply(await actor.read.remote(self._instance, self._version, _READ_S))
            except ActorUnavailableError as error:
                logger.warning("mambaslots: the channel of states begins anew: %s", _first_line(error))
            except RayError as error:
                logger.warning("mambaslots: the channel of states is lost: %s", _first_line(error))
                actor = None
            except Exception:
                logger.exception("mambaslots: the channel of states was not read")
            await asyncio.sleep(_RETRY_S)

    def apply(self, news: News) -> None:
        """Apply news to the router; it forgets replicas that the channel forgot."""
        self._instance, self._version = news.instance, news.version
        for encoded in news.events:
            if not self._router.apply(decode_events(encoded)):
                self._instance = ""  # the next read gives snapshots
        for gone in set(self._router.index.replicas) - set(news.replicas):
            self._router.forget(gone)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class StateFeed:
    """Publishes an engine's states to a channel every 30 ms while requests run, and serves its hand-overs.

    `publisher` is called in the engine's thread; None: there are no states.
    """

    def __init__(
        self,
        replica: str,
        channel: str,
        engine: AsyncEngine,
        publisher: StatePublisher | None,
        serve_hand_over: Callable[[HandOver], Coroutine[Any, Any, None]],
    ) -> None:
        self._replica = replica
        self._channel = channel
        self._engine = engine
        self._publisher = publisher
        self._serve_hand_over = serve_hand_over
        self._actor: Any = None
        self._may_have_missed = False  # True while it is not known that the channel took a message
        self._woken = asyncio.Event()
        self._hand_overs: set[asyncio.Task[None]] = set()

    def wake(self) -> None:
        """A request was added or has ended: look at the cache soon."""
        self._woken.set()

    async def run(self) -> None:
        """Publish until the engine has failed, or the task is cancelled."""
        loop = asyncio.get_running_loop()
        while self._engine.failure is None:
            looked_s = loop.time()
            try:
                await self._publish()
            except RayError:
                self._actor = None  # the channel begins anew, and will want a snapshot
            except Exception:
                logger.exception("mambaslots: the replica's states were not published")
            is_busy = self._engine.num_running + self._engine.num_waiting > 0
            try:
                async with asyncio.timeout(_BUSY_S if is_busy else _IDLE_S):
                    await self._woken.wait()
                await asyncio.sleep(looked_s + _BUSY_S - loop.time())  # changes within 30 ms are one message
            except TimeoutError:
                pass
            self._woken.clear()

    async def _publish(self) -> None:
        """Publish the changes, or a snapshot where a message may be lost, and start the hand-overs of the
        replies, which have each once."""
        self._actor = self._actor or find_channel(self._channel)
        publisher = self._publisher
        if self._actor is None or publisher is None:
            return

        def take(_: object) -> StateEvents | None:
            return publisher.snapshot() if self._may_have_missed else publisher.take()

        for _ in range(2):
            events = await self._engine.call(take)
            self._may_have_missed = True
            sent = () if events is None else (encode_events(events),)
            orders: Orders = await self._actor.publish.remote(self._replica, sent)
            for hand_over in orders.hand_overs:
                task = asyncio.create_task(self._serve_hand_over(hand_over))
                self._hand_overs.add(task)
                task.add_done_callback(self._hand_overs.discard)
            self._may_have_missed = orders.wants_snapshot
            if not orders.wants_snapshot:
                return
