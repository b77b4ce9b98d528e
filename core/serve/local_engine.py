"""An engine of this process, as a server takes it."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from ..inference.contexts.cache.checkpoint_plan import CheckpointPlan
from ..inference.engines.async_engine import AsyncEngine
from ..inference.engines.async_stream import AsyncStream
from ..inference.engines.dynamic_engine import DynamicInferenceEngine
from ..monitor import Monitor
from ..sampling_params import SamplingParams
from .metrics import metrics_text
from .served_engine import EngineFacts


class LocalEngine:
    """A `ServedEngine` over one engine, which it watches with a monitor.

    Attributes:
        engine: serves the prompts.
        monitor: counts what the engine does.
    """

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        *,
        model_name: str,
        max_waiting_requests: int = 1024,
        trace: Callable[[str], None] | None = None,
    ) -> None:
        """
        Args:
            engine: nobody else may call it while this runs.
            model_name, trace: as for `Monitor`.
            max_waiting_requests: as for `AsyncEngine`.

        Raises:
            ValueError: an argument is of another kind.
        """
        self.engine = AsyncEngine(engine, max_waiting_requests=max_waiting_requests)
        self.monitor = Monitor(engine, model_name=model_name, trace=trace)
        self._facts = EngineFacts.of(engine)

    @property
    def facts(self) -> EngineFacts:
        return self._facts

    @property
    def max_running(self) -> int:
        return self._facts.max_requests

    @property
    def num_waiting(self) -> int:
        return self.engine.num_waiting

    @property
    def num_running(self) -> int:
        return self.engine.num_running

    @property
    def failure(self) -> BaseException | None:
        return self.engine.failure

    def start(self) -> None:
        self.engine.start()

    async def drain(self, timeout_s: float | None = None) -> bool:
        return await self.engine.drain(timeout_s)

    async def close(self, timeout_s: float | None = None) -> bool:
        ended = await self.engine.close(timeout_s)
        with contextlib.suppress(ValueError):  # it has failed, and the engine dropped it
            self.monitor.close()
        return ended

    async def stream(
        self,
        prompt: Sequence[int],
        sampling_params: SamplingParams,
        *,
        cache_salt: bytes | None,
        checkpoint_plan: CheckpointPlan | None,
        tenant: str | None,
    ) -> AsyncStream:
        if cache_salt is not None and tenant is not None:
            self.monitor.name_salt(cache_salt, tenant)
        return await self.engine.stream(
            prompt, sampling_params, cache_salt=cache_salt, checkpoint_plan=checkpoint_plan
        )

    async def metrics_text(self) -> tuple[bytes, str]:
        """In another thread, so that the event loop does not wait."""
        return await asyncio.to_thread(metrics_text, self.monitor)

    async def snapshot(self) -> dict[str, Any]:
        """In another thread, so that the event loop does not wait."""
        return await asyncio.to_thread(self.monitor.snapshot)
