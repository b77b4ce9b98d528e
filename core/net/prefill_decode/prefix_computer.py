"""Prefixes that a prefill engine computes, each pinned from the step that completes it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

from ...errors import MambaSlotCapacityError
from ...inference.contexts.cache.prefix_cache import PinnedPrefix
from ...inference.contexts.request import DynamicInferenceRequest, GeneratedToken, RequestStep
from ...inference.engines.async_engine import AsyncEngine
from ...inference.engines.dynamic_engine import DynamicInferenceEngine
from ...inference.engines.engine_observer import NewTokens
from ...inference.engines.streams import TokenStream
from ...request import RequestResult, SamplingParams


class PrefixLostError(RuntimeError):
    """A prefix was not computed, or its state was not taken."""


@dataclass(eq=False)
class _Prefix:
    """A prefix that is to be computed; only the engine's thread touches `stream` and `pin`.

    Attributes:
        tokens, salt: its name.
        num_tokens: the loop's future for how many of its tokens can be resumed.
        stream: of the request that computes it; None before, and where all of it was cached.
        pin: keeps it in the cache; None until it is there.
    """

    tokens: Sequence[int]
    salt: bytes | None
    num_tokens: "asyncio.Future[int]"
    stream: TokenStream[GeneratedToken] | None = None
    pin: PinnedPrefix | None = None


class PrefixComputer:
    """Computes prefixes in the thread of an `AsyncEngine`, many at once. It observes the engine.

    A prefix is pinned as its request ends, so that no later step evicts it.
    """

    def __init__(self, server: AsyncEngine, engine: DynamicInferenceEngine) -> None:
        """
        Args:
            server: has been started; nobody else adds requests.
            engine: which `server` serves.
        """
        self._server = server
        self._engine = engine
        self._by_request: dict[int, _Prefix] = {}  # only the engine's thread touches it

    @asynccontextmanager
    async def computed(self, tokens: Sequence[int], salt: bytes | None) -> AsyncIterator[int]:
        """Compute a prefix of whole blocks; inside, it is pinned. Yields how many tokens can be resumed.

        Raises:
            ValueError: the prefix can never be computed.
            PrefixLostError: the engine did not compute it, or took no state.
            RuntimeError: as `AsyncEngine.call`.
        """
        prefix = _Prefix(tokens, salt, asyncio.get_running_loop().create_future())
        try:
            await self._server.call(partial(self._begin, prefix=prefix))
            yield await prefix.num_tokens
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
                _tell(prefix, prefix.pin.num_tokens)
                return
            engine.unpin(prefix.pin)
            prefix.pin = None
        once, plan = SamplingParams(num_tokens_to_generate=1), engine.config.checkpoint_plan
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
        """Pin the prefix of a request that has ended, and tell the task that waits for it."""
        prefix = self._by_request.pop(result.request_id, None)
        if prefix is None:  # the end is told twice after an interrupt
            return
        if result.finish_reason not in ("length", "stop"):
            _tell(prefix, PrefixLostError(f"its request ended with {result.finish_reason!r}"))
            return
        try:
            prefix.pin = self._engine.pin(prefix.tokens, cache_salt=prefix.salt)
            _tell(prefix, prefix.pin.num_tokens)
        except Exception as error:
            _tell(prefix, PrefixLostError(f"its state is not cached: {error}"))


def _tell(prefix: _Prefix, outcome: int | PrefixLostError) -> None:
    with suppress(RuntimeError):  # the loop is closed: nobody waits
        prefix.num_tokens.get_loop().call_soon_threadsafe(_settle, prefix.num_tokens, outcome)


def _settle(future: "asyncio.Future[int]", outcome: int | PrefixLostError) -> None:
    """In the loop: `outcome` is what the task that waits gets."""
    if future.done():
        return
    if isinstance(outcome, PrefixLostError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _end(engine: DynamicInferenceEngine, prefix: _Prefix) -> None:
    """Cancel a prefix that is not computed yet; let go of one that is."""
    if prefix.stream is not None:
        prefix.stream.close()
    if prefix.pin is not None:
        with suppress(ValueError):  # a reset has unpinned it
            engine.unpin(prefix.pin)
        prefix.pin = None
