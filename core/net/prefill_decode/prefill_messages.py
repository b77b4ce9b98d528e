"""What a decode engine and a prefill worker send each other, and the channel between their engines.

The decode engine listens for hand-overs, and says Hello. For each prompt it sends Prefill; the worker answers
Computed just before it hands the prefix over, or Refused.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal

import msgspec
from torch.distributed import Store  # type: ignore[attr-defined]

from ...inference.engines.dynamic_engine import DynamicInferenceEngine
from ...validation import refused
from ..message_sockets import PeerLostError
from ..transfer.hand_over import TransferChannel

PROTOCOL_VERSION = 2
CONNECT_TIMEOUT_S = 10.0


class Hello(msgspec.Struct, tag=True, frozen=True):
    """The first message of a decode engine; `channel` names the `TransferChannel` on which it listens."""

    protocol: int
    channel: str


class Prefill(msgspec.Struct, tag=True, frozen=True):
    """The worker shall compute a prefix and hand it over; `prefill_id` is of this prompt alone."""

    prefill_id: int = msgspec.field(name="number")  # its name on the wire
    tokens: list[int]
    salt: bytes | None


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """A prefix is not needed any more."""

    prefill_id: int = msgspec.field(name="number")


class Beat(msgspec.Struct, tag=True, frozen=True):
    """The worker's engine makes steps; the first one says that the worker serves."""


class Computed(msgspec.Struct, tag=True, frozen=True):
    """A prefix is handed over next."""

    prefill_id: int = msgspec.field(name="number")


class Refused(msgspec.Struct, tag=True, frozen=True):
    """A prefix is not handed over."""

    prefill_id: int = msgspec.field(name="number")
    reason: str


class End(msgspec.Struct, tag=True, frozen=True):
    """The worker does not serve this decode engine any more."""

    reason: str


Question = Hello | Prefill | Cancel
Answer = Beat | Computed | Refused | End
EngineCall = Callable[[Callable[[DynamicInferenceEngine], Any]], Awaitable[Any]]
"""Calls a function in the engine's thread, between two steps, as `AsyncEngine.call` does."""


def address_key(name: str) -> str:
    """Where in the store a prefill worker writes its address; ValueError for what is no name."""
    if not isinstance(name, str) or not name or not name.isprintable():
        raise refused("name", name, "a printable str that names the prefill worker")
    return f"mambaslots/prefill/{name}"


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
async def connected_channel(
    call: EngineCall, store: Store, name: str, side: Literal["source", "destination"], timeout_s: float
) -> AsyncIterator[TransferChannel]:
    """A channel, all of whose methods are called in the engine's thread; PeerLostError without a peer."""
    channel: TransferChannel = await call(
        lambda engine: TransferChannel(engine, store, name, side, timeout_s=timeout_s)
    )
    try:
        if failure := await call(lambda engine: channel.connect(timeout_s=CONNECT_TIMEOUT_S)):
            raise PeerLostError(f"no channel to it: {failure}")
        yield channel
    finally:
        with suppress(RuntimeError):  # an engine that is dead or closed makes no calls
            await asyncio.shield(asyncio.ensure_future(call(lambda engine: channel.close())))
