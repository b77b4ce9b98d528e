"""Prefixes from one running replica to another, once, over a store that outlives both."""

from collections.abc import Iterable
from typing import Literal

from torch.distributed import Store  # type: ignore[attr-defined]

from ...inference.engines.dynamic_engine import DynamicInferenceEngine
from .cache_access import CacheAccess
from .exchange import Exchange, SendReport
from .export import PrefixName
from .placement import ImportReport


def send_prefixes(
    engine: DynamicInferenceEngine,
    store: Store,
    name: str,
    prefixes: Iterable[PrefixName] | None = None,
    *,
    states: Literal["deepest", "all"] = "deepest",
    timeout_s: float = 60.0,
) -> SendReport:
    """Hand cached prefixes to the replica that receives `name`: a `TransferChannel` used once.

    Every rank of the source calls this, between steps, while every rank of the destination calls
    `receive_prefixes`. A hand-over that fails on the way raises nothing; the failure is logged as a warning
    and reported.

    Args:
        engine: the engine to export from.
        store: as in `TransferChannel`. A thread does the work; where the store stops answering, the thread
            uses `store` until the store answers or closes the connection.
        name: the name of this one hand-over; no other hand-over may have used it.
        prefixes, states: as in `TransferChannel.send`.
        timeout_s: the time to meet and to send, in seconds. The call returns at most about two seconds after
            the timeout.

    Raises:
        ValueError, RuntimeError: as `TransferChannel.send`.
    """
    access = CacheAccess.of(engine, "send_prefixes")
    exchange = Exchange(store, name, "source", None)
    try:
        return exchange.send(access, prefixes, states, timeout_s)
    finally:
        exchange.close()


def receive_prefixes(
    engine: DynamicInferenceEngine, store: Store, name: str, *, timeout_s: float = 60.0
) -> ImportReport:
    """Import the prefixes that the replica which sends `name` has cached: a `TransferChannel` used once.

    Every rank of the destination calls this, between steps. The source may be split in another way.

    Args:
        engine: the engine to import into.
        store: as in `send_prefixes`.
        name: as in `send_prefixes`.
        timeout_s: the time to meet and to receive, in seconds, as in `TransferChannel.receive`.

    Returns:
        As `import_prefixes`; `failure` says why a hand-over failed.

    Raises:
        ValueError, RuntimeError: as `TransferChannel.receive`.
    """
    access = CacheAccess.of(engine, "receive_prefixes")
    exchange = Exchange(store, name, "destination", None)
    try:
        return exchange.receive(access, timeout_s)
    finally:
        exchange.close()
