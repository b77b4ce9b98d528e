"""What generates the answers of a server: an engine, or replicas as one, and what the server asks of it."""

import asyncio
import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from prometheus_client.core import Metric

from ..inference.contexts.cache.checkpoint_plan import CheckpointPlan
from ..inference.engines.async_engine import AsyncEngine
from ..inference.engines.dynamic_engine import DynamicInferenceEngine
from ..inference.engines.request_factory import Prompt, Salt
from ..inference.engines.streams import AsyncStream
from ..monitor import Monitor
from ..params_and_results import SamplingParams
from .prometheus_text import monitor_metrics


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What does not change while an engine serves; replicas send it to processes without a model."""

    vocab_size: int
    max_sequence_length: int
    pool_tokens: int  # of the whole KV pool
    max_requests: int  # that run at once
    block_size_tokens: int
    caches_prefixes: bool  # so that blocks have hashes
    checkpoint_plan: CheckpointPlan

    @classmethod
    def of(cls, engine: DynamicInferenceEngine) -> "EngineFacts":
        config = engine.config
        return cls(
            vocab_size=engine.context.spec.vocab_size, max_sequence_length=config.max_sequence_length,
            pool_tokens=engine.context.pool_tokens, max_requests=config.max_requests,
            block_size_tokens=config.block_size_tokens, caches_prefixes=config.enable_prefix_caching,
            checkpoint_plan=config.checkpoint_plan,
        )  # fmt: skip


class ServedEngine(Protocol):
    """Generates the answers of a server. All calls are made in one event loop."""

    @property
    def facts(self) -> EngineFacts: ...

    @property
    def max_running(self) -> int:
        """Requests that can run at once now."""

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_running(self) -> int: ...

    @property
    def failure(self) -> BaseException | None:
        """Why nothing is generated now, or None. A `NoReplicaError` may pass, others do not."""

    def start(self) -> None:
        """Begin, in the event loop that runs now."""

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Refuse new requests, wait for the others for `timeout_s`; returns whether none was cancelled."""

    async def close(self, timeout_s: float | None = None) -> bool:
        """Cancel all requests, and end. Returns whether it has ended within `timeout_s`."""

    async def stream(
        self,
        prompt: Sequence[int],
        sampling_params: SamplingParams,
        *,
        cache_salt: bytes | None,
        checkpoint_plan: CheckpointPlan | None,
        tenant: str | None,
    ) -> AsyncStream:
        """Queue a prompt; ValueError where it can never run, QueueFullError or RuntimeError where not now."""

    async def metrics(self) -> Sequence[Metric]:
        """What Prometheus reads."""

    async def snapshot(self) -> Mapping[str, Any] | None:
        """What the page shows, as `Monitor.snapshot` makes it; None without reports."""


class LocalEngine(AsyncEngine):
    """A `ServedEngine`: one engine, which a monitor watches."""

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        *,
        model_name: str,
        max_waiting_requests: int = 1024,
        trace: bool = False,
    ) -> None:
        """`trace`: whether a line about each request is written to stderr."""
        super().__init__(engine, max_waiting_requests=max_waiting_requests)
        write = (lambda line: print(line, file=sys.stderr, flush=True)) if trace else None
        self.monitor = Monitor(engine, model_name=model_name, trace=write)
        self.facts = EngineFacts.of(engine)
        self.max_running = self.facts.max_requests

    async def close(self, timeout_s: float | None = None) -> bool:
        has_ended = await super().close(timeout_s)
        with contextlib.suppress(ValueError):  # the engine has failed, and dropped its observers
            self.monitor.close()
        return has_ended

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: Salt = None,
        tenant: str | None = None,
        **options: Any,
    ) -> AsyncStream:
        if cache_salt is not None and tenant is not None:
            self.monitor.name_salt(cache_salt, tenant)
        return await super().stream(prompt, sampling_params, cache_salt=cache_salt, **options)

    async def metrics(self) -> list[Metric]:
        return await asyncio.to_thread(lambda: list(monitor_metrics(self.monitor)))

    async def snapshot(self) -> dict[str, Any]:
        return await asyncio.to_thread(self.monitor.snapshot)
