"""A transfer channel whose calls are made in the thread of an engine."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal

from torch.distributed import Store  # type: ignore[attr-defined]

from ...inference.engines.dynamic_engine import DynamicInferenceEngine
from ..transfer.channel import TransferChannel
from .message_stream import PeerLostError

EngineCall = Callable[[Callable[[DynamicInferenceEngine], Any]], Awaitable[Any]]
"""Calls a function in the engine's thread, between two steps, as `AsyncEngine.call` does."""


@asynccontextmanager
async def engine_channel(
    call: EngineCall, store: Store, name: str, side: Literal["source", "destination"], timeout_s: float
) -> AsyncIterator[TransferChannel]:
    """A channel that is connected and closed in the engine's thread, where its methods are to be called, too.

    Connecting holds the engine up, once, so that no hand-over does. PeerLostError where it fails.
    """
    channel: TransferChannel = await call(
        lambda engine: TransferChannel(engine, store, name, side, timeout_s=timeout_s)
    )
    try:
        failure = await call(lambda engine: channel.connect())
        if failure:
            raise PeerLostError(f"no channel to it: {failure}")
        yield channel
    finally:
        with suppress(RuntimeError):  # an engine that is dead or closed makes no calls
            await asyncio.shield(asyncio.ensure_future(call(lambda engine: channel.close())))
