"""A new replica receives states from one that has some."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import batched
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ..inference.engines.async_engine import AsyncEngine
from ..inference.engines.dynamic_engine import DynamicInferenceEngine
from ..net.lockstep.leading_engine import LeadingEngine
from ..net.transfer.hand_over import TransferChannel
from ..net.transfer.placement import ImportReport
from .fleet_settings import DEPLOYMENT, FleetSettings
from .known_replicas import known_replicas_of
from .replica_calls import answer_of, answers_of

logger = logging.getLogger(__name__)

STATES_PER_ROUND = 32  # states of one hand-over: the source runs no step during a hand-over
_MEET_S = 5.0
_LONGEST_ROUND_S = 10.0
_LOOKS_FOR_DONORS = 3
_POLL_INTERVAL_S = 0.5  # a new handle learns from Ray only after a moment which replicas there are


async def warm_from_donor(replica: str, settings: FleetSettings, engine: AsyncEngine) -> None:
    """Let a replica that has states hand over those used last; costs `warm_timeout_s` at most."""
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    num_states = 0
    deadline = begun_s + settings.warm_timeout_s
    try:
        async with asyncio.timeout_at(deadline):
            donor = await _donor(settings.name)
            if donor is None:
                return
            host = ray.util.get_node_ip_address()
            store = await asyncio.to_thread(meeting_store, host, 0, is_master=True)
            for hashes in batched(await answer_of(donor, "recent_states"), STATES_PER_ROUND):
                seconds = max(0.1, min(deadline - loop.time(), _LONGEST_ROUND_S))
                meeting = host, store.port, f"{replica}-{secrets.token_hex(4)}", seconds
                import_task = asyncio.ensure_future(engine.call(on_all_ranks(receive_states, *meeting)))
                try:
                    await answer_of(donor, "hand_over", *meeting, list(hashes))
                finally:  # the engine makes no step while it receives
                    report = await import_task
                num_states += report.imported.states
                if report.failure:
                    break
        logger.info(
            "mambaslots: %s took over %d states, %.1f s after it began to ask",
            replica, num_states, loop.time() - begun_s,
        )  # fmt: skip
    except (RayError, RayServeException, RuntimeError, TimeoutError, ValueError, OSError) as error:
        logger.warning("mambaslots: replica %s was not warmed to the end: %s", replica, error)


async def _donor(application: str) -> Any:
    """The replica that holds most states; None where none holds any."""
    handle = serve.get_deployment_handle(DEPLOYMENT, application)
    handle.options(method_name="status")  # from now on Ray says which replicas there are
    known_replicas = known_replicas_of(application)
    for _ in range(_LOOKS_FOR_DONORS):
        statuses = await answers_of(known_replicas.replicas.values(), "status", _MEET_S)
        if statuses:
            num_states, name = max((status.num_states, status.replica) for status in statuses)
            return known_replicas.replicas.get(name) if num_states else None
        await asyncio.sleep(_POLL_INTERVAL_S)
    return None


def meeting_store(host: str, port: int, timeout_s: float = _MEET_S, *, is_master: bool = False) -> TCPStore:
    """A store over which processes meet; the master with port 0 listens on a free one."""
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(host, port, is_master=is_master, wait_for_workers=False, timeout=timeout)


def on_all_ranks(function: Callable[..., Any], *arguments: Any) -> Callable[[DynamicInferenceEngine], Any]:
    """A function for `AsyncEngine.call`, which calls `function` in the engine's thread on all ranks."""

    def call(engine: DynamicInferenceEngine) -> Any:
        if isinstance(engine, LeadingEngine):
            return engine.call_on_all(function, *arguments)
        return function(engine, *arguments)

    return call


def send_states(
    engine: DynamicInferenceEngine, host: str, port: int, name: str, timeout_s: float, hashes: Sequence[int]
) -> None:
    """Send the states of these hashes to the replica that joins and has a store at `host` and `port`."""
    with TransferChannel(engine, meeting_store(host, port), name, "source", timeout_s=timeout_s) as channel:
        channel.send(hashes)


def receive_states(
    engine: DynamicInferenceEngine, host: str, port: int, name: str, timeout_s: float
) -> ImportReport:
    """Import what another replica sends under this name."""
    store = meeting_store(host, port)
    with TransferChannel(engine, store, name, "destination", timeout_s=timeout_s) as channel:
        return channel.receive()
