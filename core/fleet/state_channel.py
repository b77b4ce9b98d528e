"""The states of all replicas, from those that hold them to the routers that want to know."""

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..net.routing.state_events import StateEvents, decode_events, encode_events
from ..validation import shown

_LOG_LENGTH = 4096
_LOG_BYTES = 64 * 2**20
"""Readers further behind get snapshots."""
_FORGET_AFTER_S = 30.0
_LIVELY_S = 3.0
"""Replicas give a sign of life every second."""


class Orders(NamedTuple):
    """What a replica is asked to do, in reply to what it tells.

    Attributes:
        wants_snapshot: whether the channel has missed events of this replica.
        hand_overs: hand-overs to replicas that have joined, which this replica shall serve.
    """

    wants_snapshot: bool
    hand_overs: tuple["HandOver", ...] = ()


@dataclass(frozen=True, slots=True)
class HandOver:
    """Prefixes that one replica shall send to another.

    Attributes:
        name: of this hand-over alone.
        host, port: the store where both meet.
    """

    name: str
    host: str
    port: int


class News(NamedTuple):
    """What a reader has not heard yet.

    Attributes:
        instance: of the channel; another one begins to count anew.
        version: for the next read.
        events: encoded events, in order.
        replicas: all replicas that the channel knows.
    """

    instance: str
    version: int
    events: tuple[bytes, ...]
    replicas: tuple[str, ...]


@dataclass(slots=True)
class _Held:
    """What one replica holds, as far as the channel has heard."""

    epoch: int
    next_sequence: int
    keys: set[int]
    heard_s: float


class StateChannel:
    """Takes events from replicas, and gives them to readers, who wait for them. It runs as a Ray actor.

    The channel keeps the last events, and what each replica holds, so that a reader that comes late or that
    was slow gets snapshots. It can be lost at any time: a new one asks every replica for a snapshot. What it
    says may be old, which costs a miss.
    """

    def __init__(self) -> None:
        self._instance = secrets.token_hex(8)
        self._version = 0
        self._log: deque[bytes] = deque()
        self._log_bytes = 0
        self._held: dict[str, _Held] = {}
        self._orders: dict[str, list[HandOver]] = {}
        self._changed = asyncio.Event()

    # ---- for replicas

    async def publish(self, replica: str, events: Sequence[bytes] = ()) -> Orders:
        """Take events of a replica; a call without events says that the replica is there.

        Raises:
            ValueError: `events` are no events, or those of another replica; nothing has changed.
        """
        decoded = [_events_of(replica, encoded) for encoded in events]
        self._forget_silent()
        in_order = True
        for one, encoded in zip(decoded, events, strict=True):
            in_order = self._take(one, encoded) and in_order
        held = self._held.get(replica)
        if held is not None:
            held.heard_s = time.monotonic()
        return Orders(held is None or not in_order, tuple(self._orders.pop(replica, ())))

    async def leave(self, replica: str) -> None:
        """Forget a replica, which ends."""
        self._held.pop(replica, None)
        self._orders.pop(replica, None)

    async def donor(self, joining: str, hand_over: HandOver, asked: Sequence[str] = ()) -> str | None:
        """Order a hand-over from the replica that holds most states, of those that were heard just now.

        Args:
            joining: the replica that wants states.
            hand_over: the order.
            asked: replicas that did not serve one.

        Returns:
            The replica that gets the order; None where no other holds any state.
        """
        self._forget_silent()
        lively_s = time.monotonic() - _LIVELY_S
        others = [
            (held.heard_s >= lively_s, len(held.keys), name)
            for name, held in self._held.items()
            if held.keys and name != joining and name not in asked
        ]
        if not others:
            return None
        _, _, name = max(others)
        self._orders.setdefault(name, []).append(hand_over)
        return name

    # ---- for readers

    async def read(self, instance: str, version: int, timeout_s: float) -> News:
        """The events behind `version`, as soon as there are some, but after `timeout_s` in any case.

        Args:
            instance, version: of the last news; "" and 0 at first.
            timeout_s: seconds to wait at most.
        """
        if instance == self._instance and version == self._version:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()
            except TimeoutError:
                pass
        replicas = tuple(self._held)
        num_new = self._version - version
        if instance != self._instance or not 0 <= num_new <= len(self._log):
            return News(self._instance, self._version, self._snapshots(), replicas)
        events = tuple(self._log)[len(self._log) - num_new :] if num_new else ()
        return News(self._instance, self._version, events, replicas)

    # ---- what it knows

    def _take(self, events: StateEvents, encoded: bytes) -> bool:
        """Note the events. Returns whether none were missed before them."""
        held = self._held.get(events.replica)
        if events.is_snapshot:
            held = _Held(events.epoch, events.sequence, set(), 0.0)
            self._held[events.replica] = held
        elif held is None or held.epoch != events.epoch or held.next_sequence != events.sequence:
            return False
        held.heard_s = time.monotonic()
        held.next_sequence = events.sequence + 1
        held.keys.update(events.inserted)
        held.keys.difference_update(events.removed)
        self._log.append(encoded)
        self._log_bytes += len(encoded)
        while len(self._log) > _LOG_LENGTH or self._log_bytes > _LOG_BYTES:
            self._log_bytes -= len(self._log.popleft())
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()
        return True

    def _snapshots(self) -> tuple[bytes, ...]:
        return tuple(
            encode_events(
                StateEvents(name, held.epoch, held.next_sequence - 1, tuple(held.keys), is_snapshot=True)
            )
            for name, held in self._held.items()
        )

    def _forget_silent(self) -> None:
        """Forget replicas that have not been heard for long; they send a snapshot when they come back."""
        horizon = time.monotonic() - _FORGET_AFTER_S
        for name in [name for name, held in self._held.items() if held.heard_s < horizon]:
            del self._held[name]
            self._orders.pop(name, None)


def _events_of(replica: str, encoded: bytes) -> StateEvents:
    """The events in these bytes; ValueError where `replica` tells of another one's states."""
    events = decode_events(encoded)
    if events.replica != replica:
        raise ValueError(f"events.replica is {shown(events.replica)}; accepted: {shown(replica)}, who tells")
    return events
