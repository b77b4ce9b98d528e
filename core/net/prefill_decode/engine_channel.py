"""A transfer channel whose calls are made in the thread of an engine."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal

from torch.distributed import Store  # type: ignore[attr-defined]

from ...inference.engines.dynamic_engine import DynamicInferenceEngine
from ..transfer.hand_over import TransferChannel
from .message_stream import PeerLostError

EngineCall = Callable[[Callable[[DynamicInferenceEngine], Any]], Awaitable[Any]]
"""Calls a function in the engine's thread, between two steps, as `AsyncEngine.call` does."""

CONNECT_TIMEOUT_S = 10.0


def check_engine(engine: DynamicInferenceEngine) -> None:
    """ValueError for an engine that cannot hand prefixes over from a thread of its own."""
    if not engine.config.enable_prefix_caching:
        raise ValueError("enable_prefix_caching is False; accepted: an engine that caches prefixes")
    if engine.context.spec.groups.is_split:
        raise ValueError(
            "engine serves a model that is split over ranks; accepted: a model that one process serves, "
            "because all ranks of a split model take part in a hand-over"
        )


@asynccontextmanager
async def engine_channel(
    call: EngineCall, store: Store, name: str, side: Literal["source", "destination"], timeout_s: float
) -> AsyncIterator[TransferChannel]:
    """A channel that is made and closed in the engine's thread, where its methods are to be called, too."""
    channel: TransferChannel = await call(
        lambda engine: TransferChannel(engine, store, name, side, timeout_s=timeout_s)
    )
    try:
        yield channel
    finally:
        with suppress(RuntimeError):  # an engine that is dead or closed makes no calls
            await asyncio.shield(asyncio.ensure_future(call(lambda engine: channel.close())))


async def connect(call: EngineCall, channel: TransferChannel) -> None:
    """Connect a channel, while which the engine makes no step; PeerLostError where that fails.

    Connecting takes longer than a hand-over. It happens once, so that no hand-over waits for it.
    """
    failure = await call(lambda engine: channel.connect(timeout_s=CONNECT_TIMEOUT_S))
    if failure:
        raise PeerLostError(f"no channel to it: {failure}")
