"""A new replica receives states from one that has some."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import batched
from typing import Any, NamedTuple

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ..inference.engines.async_engine import AsyncEngine
from ..inference.engines.dynamic_engine import DynamicInferenceEngine
from ..net.lockstep.leading_engine import LeadingEngine
from ..net.transfer.exports import recent_states
from ..net.transfer.hand_over import TransferChannel
from .calls import answers_of
from .known_replicas import KnownReplicas, known_replicas_of
from .settings import DEPLOYMENT, FleetSettings

logger = logging.getLogger(__name__)

STATES_PER_ROUND = 32
"""States of one hand-over: the source runs no step during a hand-over."""
_MEET_S = 5.0
_LONGEST_ROUND_S = 10.0
_LOOKS_FOR_DONORS = 3
_LOOK_S = 0.5
"""A new handle learns from Ray only after a moment which replicas there are."""


class HandOver(NamedTuple):
    """An order to send prefixes to another replica; both meet at the store at `host` and `port`."""

    name: str
    host: str
    port: int


async def warm_from_donor(replica: str, settings: FleetSettings, engine: AsyncEngine) -> None:
    """Let a replica that has states hand over those used last; costs `warm_timeout_s` at most."""
    timeout_s = settings.warm_timeout_s
    begun_s, deadline = time.monotonic(), time.monotonic() + timeout_s
    num_states = 0
    try:
        handle = serve.get_deployment_handle(DEPLOYMENT, settings.name)
        handle.options(method_name="status")  # from now on Ray says which replicas there are
        known = known_replicas_of(settings.name)
        donor = await _donor(known)
        if donor not in known.replicas:
            return
        host = ray.util.get_node_ip_address()
        store = await asyncio.to_thread(meeting_store, host, 0, timeout_s, is_master=True)
        order = HandOver(f"{replica}-{secrets.token_hex(4)}", host, store.port)
        await answers_of([known.replicas[donor]], "hand_over", _MEET_S, order)
        announced = await _read(store, order.name, min(deadline, time.monotonic() + _MEET_S))
        for number in range(int(announced or 0)):
            name = f"{order.name}-{number}"
            await asyncio.to_thread(store.set, name, "ready")
            received = _on_all_ranks(_receive, host, store.port, name, _round_s(deadline))
            report = await engine.call(received)
            num_states += report.imported.states
            if report.failure:
                break
        logger.info(
            "mambaslots: %s took over %d states from %s, %.1f s after it began to ask",
            replica, num_states, donor, time.monotonic() - begun_s,
        )  # fmt: skip
    except (RayError, RayServeException, RuntimeError, TimeoutError, OSError) as error:
        logger.warning("mambaslots: replica %s was not warmed to the end: %s", replica, error)


async def _donor(known: KnownReplicas) -> str:
    """The replica that holds most states; "" where none holds any."""
    for _ in range(_LOOKS_FOR_DONORS):
        statuses = await answers_of(known.replicas.values(), "status", _MEET_S)
        if statuses:
            num_states, name = max((status.num_states, status.replica) for status in statuses)
            return name if num_states else ""
        await asyncio.sleep(_LOOK_S)
    return ""


async def serve_hand_over(engine: AsyncEngine, order: HandOver, timeout_s: float) -> None:
    """Hand the states that were used last to a replica that joins, a few at a time. Raises nothing."""
    deadline = time.monotonic() + timeout_s
    try:
        store = await asyncio.to_thread(meeting_store, order.host, order.port)
        keys = await engine.call(_on_all_ranks(recent_states))
        rounds = list(batched(keys, STATES_PER_ROUND))
        await asyncio.to_thread(store.set, order.name, str(len(rounds)))
        for number, some in enumerate(rounds):
            name = f"{order.name}-{number}"
            if not await _read(store, name, deadline):
                return
            sent = _on_all_ranks(_send, order.host, order.port, name, list(some), _round_s(deadline))
            if (await engine.call(sent)).failure:
                return
    except Exception as error:
        logger.warning("mambaslots: hand-over %s was not served to the end: %s", order.name, error)


async def _read(store: TCPStore, key: str, deadline: float) -> str:
    """The other side's value of `key`; "" where it is not written in time."""
    while not await asyncio.to_thread(store.check, [key]):
        if time.monotonic() > deadline:
            return ""
        await asyncio.sleep(0.02)
    return bytes(await asyncio.to_thread(store.get, key)).decode()


def _round_s(deadline: float) -> float:
    """Seconds of a round that begins now."""
    return max(0.1, min(deadline - time.monotonic(), _LONGEST_ROUND_S))


def meeting_store(host: str, port: int, timeout_s: float = _MEET_S, *, is_master: bool = False) -> TCPStore:
    """A store over which processes meet; the master with port 0 listens on a free one."""
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(host, port, is_master=is_master, wait_for_workers=False, timeout=timeout)


# ---- in the engine's thread, on all ranks


def _on_all_ranks(function: Callable[..., Any], *arguments: Any) -> Callable[[DynamicInferenceEngine], Any]:
    """A function for `AsyncEngine.call`."""

    def call(engine: DynamicInferenceEngine) -> Any:
        if isinstance(engine, LeadingEngine):
            return engine.call_on_all(function, *arguments)
        return function(engine, *arguments)

    return call


def _send(
    engine: DynamicInferenceEngine, host: str, port: int, name: str, keys: Sequence[int], timeout_s: float
) -> Any:
    with TransferChannel(engine, meeting_store(host, port), name, "source", timeout_s=timeout_s) as channel:
        return channel.send(keys)


def _receive(engine: DynamicInferenceEngine, host: str, port: int, name: str, timeout_s: float) -> Any:
    store = meeting_store(host, port)
    with TransferChannel(engine, store, name, "destination", timeout_s=timeout_s) as channel:
        return channel.receive()
