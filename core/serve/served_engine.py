"""What the server needs of whatever generates its answers: one engine, or replicas of it."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..inference.contexts.cache.checkpoint_plan import CheckpointPlan
from ..inference.contexts.request import GeneratedToken
from ..inference.engines.dynamic_engine import DynamicInferenceEngine
from ..request import PromptFigures, RequestResult
from ..sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What does not change while an engine serves. It can be pickled: a replica tells it who has no model.

    Attributes:
        vocab_size: token ids are less.
        max_sequence_length: the engine's setting.
        pool_tokens: tokens that the whole KV pool holds.
        max_requests: requests that run at once.
        block_size_tokens: tokens of a block.
        caches_prefixes: whether prefixes are cached, so that blocks have hashes.
        checkpoint_plan: which states are taken unless a request says otherwise.
        salt_key_id: tells the keys of salts apart. Whose key has another id makes other hashes.
    """

    vocab_size: int
    max_sequence_length: int
    pool_tokens: int
    max_requests: int
    block_size_tokens: int
    caches_prefixes: bool
    checkpoint_plan: CheckpointPlan
    salt_key_id: str

    @classmethod
    def of(cls, engine: DynamicInferenceEngine) -> "EngineFacts":
        """The facts of an engine, which is not called."""
        config, cache = engine.config, engine.context.prefix_cache
        return cls(
            vocab_size=engine.context.spec.vocab_size,
            max_sequence_length=config.max_sequence_length,
            pool_tokens=cache.kv_blocks.total_count * config.block_size_tokens,
            max_requests=config.max_requests,
            block_size_tokens=config.block_size_tokens,
            caches_prefixes=config.enable_prefix_caching,
            checkpoint_plan=config.checkpoint_plan,
            salt_key_id=engine.salt_key.key_id,
        )


class AnswerStream(Protocol):
    """The tokens of one request, as they come; `AsyncStream` is one."""

    def __aiter__(self) -> AsyncIterator[tuple[GeneratedToken, ...]]: ...

    async def __anext__(self) -> tuple[GeneratedToken, ...]: ...

    @property
    def result(self) -> RequestResult | None:
        """The request's result; None until the answer has ended, and where an error ended it."""

    @property
    def prompt_figures(self) -> PromptFigures | None:
        """What became of the prompt; None until a token, or the result, is there."""

    def cancel(self) -> None:
        """Cancel the request, unless it has ended. Returns at once."""

    def finish(self) -> None:
        """As `cancel`, for an answer that is complete: `result` has the finish reason "stop"."""


class ServedEngine(Protocol):
    """Generates the answers of a server. All calls are made in one event loop."""

    @property
    def facts(self) -> EngineFacts:
        """What does not change."""

    @property
    def max_running(self) -> int:
        """Requests that can run at once now."""

    @property
    def num_waiting(self) -> int:
        """Requests that do not run yet."""

    @property
    def num_running(self) -> int:
        """Requests that run."""

    @property
    def failure(self) -> BaseException | None:
        """Why nothing is generated now; None while it is. A `NoReplicaError` may pass, others do not."""

    def start(self) -> None:
        """Begin, in the event loop that runs now."""

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Take no more requests, and wait for the others; cancel those that run after `timeout_s`.

        Returns:
            Whether all requests came to their own end.
        """

    async def close(self, timeout_s: float | None = None) -> bool:
        """Cancel what runs, and end. Returns whether it has ended within `timeout_s`."""

    async def stream(
        self,
        prompt: Sequence[int],
        sampling_params: SamplingParams,
        *,
        cache_salt: bytes | None,
        checkpoint_plan: CheckpointPlan | None,
        tenant: str | None,
    ) -> AnswerStream:
        """Queue a prompt. Returns once somebody has the request.

        Args:
            prompt: token ids.
            sampling_params: how tokens are chosen.
            cache_salt: as for `DynamicInferenceEngine.add_request`.
            checkpoint_plan: which states are taken; None for the plan of the facts.
            tenant: whom figures count requests with this salt for.

        Raises:
            ValueError: the request can never run.
            QueueFullError: too many requests wait.
            EngineDeadError: nothing is generated any more.
            NoReplicaError: no replica serves now.
            RuntimeError: `drain` or `close` was called.
        """

    async def metrics_text(self) -> tuple[bytes, str]:
        """The body of a reply to Prometheus, and its content type."""

    async def snapshot(self) -> Mapping[str, Any] | None:
        """What the page shows, as `Monitor.snapshot` makes it; None where nobody reports."""
