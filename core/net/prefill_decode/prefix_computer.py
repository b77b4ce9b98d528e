"""Prefixes that a prefill engine computes, each pinned from the step that completes it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ...errors import MambaSlotCapacityError
from ...inference.contexts.cache.pins import PinnedPrefix
from ...inference.contexts.request import DynamicInferenceRequest, RequestStep
from ...inference.engines.async_engine import AsyncEngine
from ...inference.engines.dynamic_engine import DynamicInferenceEngine
from ...inference.engines.engine_observer import NewTokens
from ...inference.engines.streams import TokenStream
from ...request import RequestResult, SamplingParams


class PrefixLostError(RuntimeError):
    """A prefix was not computed, or its state was not cached."""


@dataclass(eq=False)
class _Prefix:
    """A prefix that is to be computed; only the engine's thread changes it.

    Attributes:
        tokens, salt: its name.
        pinned: done once the prefix is pinned.
        stream: of the request that computes it; None before, and where all of it was cached.
        pin: keeps it in the cache; None until it is there.
    """

    tokens: Sequence[int]
    salt: bytes | None
    pinned: "Future[None]" = field(default_factory=Future)
    stream: TokenStream[Any] | None = None
    pin: PinnedPrefix | None = None


class PrefixComputer:
    """Computes prefixes in the thread of an `AsyncEngine`, many at once. It observes the engine.

    A prefix is pinned as its request ends, so that no later step evicts it.
    """

    def __init__(self, server: AsyncEngine, engine: DynamicInferenceEngine) -> None:
        """
        Args:
            server: has been started; it gets no other requests.
            engine: which `server` serves.
        """
        self._server = server
        self._engine = engine
        self._by_request: dict[int, _Prefix] = {}  # only the engine's thread touches it

    @property
    def block_size_tokens(self) -> int:
        return self._engine.config.block_size_tokens

    @asynccontextmanager
    async def computed(self, tokens: Sequence[int], salt: bytes | None) -> AsyncIterator[None]:
        """Compute a prefix of whole blocks; inside, it is pinned.

        Raises:
            ValueError: the prefix can never be computed.
            PrefixLostError: the engine did not compute it, or cached no state.
            RuntimeError: as `AsyncEngine.call`.
        """
        prefix = _Prefix(tokens, salt)
        prefix.pinned.set_running_or_notify_cancel()  # a task that no longer waits for it cancels it not
        try:
            await self._server.call(partial(self._begin, prefix=prefix))
            await asyncio.wrap_future(prefix.pinned)
            yield
        finally:
            with suppress(RuntimeError):  # an engine that is dead or closed keeps nothing
                await asyncio.shield(asyncio.ensure_future(self._server.call(partial(_end, prefix=prefix))))

    # ---- in the engine's thread

    def _begin(self, engine: DynamicInferenceEngine, prefix: _Prefix) -> None:
        engine.observe(self)
        # Raised where nothing of it is cached, and where pins have all slots that they may have.
        with suppress(ValueError, MambaSlotCapacityError):
            prefix.pin = engine.pin(prefix.tokens, cache_salt=prefix.salt)
            if prefix.pin.num_tokens == len(prefix.tokens):
                prefix.pinned.set_result(None)
                return
            engine.unpin(prefix.pin)
            prefix.pin = None
        once, plan = SamplingParams(max_tokens=1), engine.config.checkpoint_plan
        prefix.stream = engine.stream(
            prefix.tokens,
            once,
            cache_salt=prefix.salt,
            checkpoint_plan=replace(plan, marks=(*plan.marks, len(prefix.tokens))),
        )
        self._by_request[prefix.stream.request_id] = prefix

    def request_added(self, request: DynamicInferenceRequest) -> None:
        pass

    def request_resumed(self, step: RequestStep) -> None:
        pass

    def step_made(self, steps: Sequence[RequestStep], tokens: NewTokens, duration_s: float) -> None:
        pass

    def request_ended(self, request: DynamicInferenceRequest, result: RequestResult) -> None:
        """Pin the prefix of a request that has ended, and wake the task that waits for it."""
        prefix = self._by_request.pop(result.request_id, None)
        if prefix is None:  # an end is reported twice after an interrupt
            return
        if result.finish_reason not in ("length", "stop"):
            lost = PrefixLostError(f"its request ended with {result.finish_reason!r}")
            prefix.pinned.set_exception(lost)
            return
        try:
            prefix.pin = self._engine.pin(prefix.tokens, cache_salt=prefix.salt)
            prefix.pinned.set_result(None)
        except Exception as error:
            prefix.pinned.set_exception(PrefixLostError(f"its state is not cached: {error}"))


def _end(engine: DynamicInferenceEngine, prefix: _Prefix) -> None:
    """Cancel a prefix that is not computed yet; unpin one that is."""
    if prefix.stream is not None:
        prefix.stream.close()
    if prefix.pin is not None:
        with suppress(ValueError):  # a reset has unpinned it
            engine.unpin(prefix.pin)
        prefix.pin = None
