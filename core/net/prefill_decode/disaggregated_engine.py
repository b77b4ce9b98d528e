"""An engine whose long prompts a prefill worker computes."""

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from ...inference.contexts.cache.hashing import salt_bytes
from ...inference.engines.async_engine import AsyncEngine
from ...inference.engines.dynamic_engine import DynamicInferenceEngine
from ...inference.engines.request_factory import Prompt, Salt, checked_prompt
from ...validation import LONGEST_TIMEOUT_S, instance, integer, real
from .prefill_client import PrefillClient, RemotePrefill
from .prefill_messages import check_engine


@dataclass(frozen=True)
class PrefillCounts:
    """Where prompts were computed, since the start.

    Attributes:
        short: prompts with too few tokens that were not cached: computed by the decode engine.
        remote: prompts whose prefix was imported from the prefill worker.
        missed: prompts whose prefix was asked for and not imported: computed by the decode engine.
        imported_tokens: tokens of the KV blocks that were imported.
        bytes: what the worker sent.
    """

    short: int = 0
    remote: int = 0
    missed: int = 0
    imported_tokens: int = 0
    bytes: int = 0


class DisaggregatedEngine(AsyncEngine):
    """A decode engine for asyncio: an `AsyncEngine` whose long prompts a `PrefillWorker` computes.

    `stream` asks the worker for the prompt's prefix up to its last block boundary. Meanwhile the engine makes
    steps. The prefix is imported between two steps; then the request resumes from it, computes the rest of
    its prompt, less than a block, and decodes. What the engine has cached is not sent.

    The engine computes a prompt itself where little of it is not cached, and where the worker is not
    connected, is lost, or does not answer in time. So a worker that fails costs time and no answer. It is
    looked for again; a worker that is started anew under the same name is found.

        async with msd.DisaggregatedEngine(engine, store) as server:
            async with await server.stream(prompt, params) as stream:
                async for tokens in stream:
                    ...

    A prompt that is computed elsewhere has not reached the engine yet: `RequestResult.ttft_s` begins when
    the engine gets it.
    """

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        store: Store,
        name: str = "prefill",
        *,
        min_prefill_tokens: int = 512,
        timeout_s: float = 30.0,
        silence_s: float = 10.0,
        hand_over_timeout_s: float = 3.0,
        max_waiting_requests: int = 1024,
        max_step_failures: int = 3,
    ) -> None:
        """
        Args:
            engine: as for `AsyncEngine`; it caches prefixes, has the worker's blocks, weights version and
                salt key.
            store: a client of the worker's store.
            name: of the worker.
            min_prefill_tokens: the worker is asked where it would compute at least so many tokens, >= 1.
            timeout_s: the longest time that a prompt waits for the worker, in seconds.
            silence_s: a worker that sends nothing for so long is lost, with all that it was asked for. A
                worker reports twice a second that its engine is between two steps, so this is longer than
                its longest step.
            hand_over_timeout_s: the longest time that the import of one prefix may take. The engine makes no
                step meanwhile; a worker that freezes while it sends holds it up for so long, once.
            max_waiting_requests, max_step_failures: as for `AsyncEngine`; a prompt that waits for the worker
                counts as waiting.

        Raises:
            ValueError: a bad argument, or an engine that cannot import prefixes.
        """
        super().__init__(
            engine, max_waiting_requests=max_waiting_requests, max_step_failures=max_step_failures
        )
        check_engine(engine)
        self._min_tokens = integer("min_prefill_tokens", min_prefill_tokens, 1)
        self._prefill_timeout_s = real("timeout_s", timeout_s, 1e-3, LONGEST_TIMEOUT_S)
        self._client = PrefillClient(
            self.call, instance("store", store, Store), name,
            silence_s=real("silence_s", silence_s, 1e-3, LONGEST_TIMEOUT_S),
            hand_over_timeout_s=real("hand_over_timeout_s", hand_over_timeout_s, 1e-3, LONGEST_TIMEOUT_S),
        )  # fmt: skip
        self._connecting: asyncio.Task[None] | None = None
        self._prefills = PrefillCounts()

    # ---- its life

    def start(self) -> None:
        """As `AsyncEngine.start`; the worker is looked for from now on."""
        super().start()
        self._connecting = asyncio.get_running_loop().create_task(self._client.run())

    async def connected(self, timeout_s: float | None = None) -> bool:
        """Wait for the worker; returns whether it is connected. None waits as long as it takes."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._client.connected.wait(), timeout_s)
        return self._client.connected.is_set()

    async def close(self, timeout_s: float | None = None) -> bool:
        """As `AsyncEngine.close`."""
        if timeout_s is not None:
            timeout_s = real("timeout_s", timeout_s, 0.0, LONGEST_TIMEOUT_S)
        begun_s = time.monotonic()
        if self._connecting is not None and not self._connecting.get_loop().is_closed():
            self._check_loop("close")
            self._connecting.cancel()
            await asyncio.wait([self._connecting], timeout=timeout_s)
        return await super().close(timeout_s and max(0.0, timeout_s - (time.monotonic() - begun_s)))

    async def drain(self, timeout_s: float | None = None) -> bool:
        """As `AsyncEngine.drain`. Prompts that wait for the worker are computed by the engine.

        Those that have not reached the engine within `timeout_s` are refused.
        """
        self._usable_thread("drain")
        self._is_draining = True
        self._client.give_up("the engine drains")
        return await super().drain(timeout_s)

    # ---- requests

    @property
    def prefills(self) -> PrefillCounts:
        """Where prompts were computed."""
        return self._prefills

    async def _prepare(self, arguments: dict[str, Any]) -> None:
        """Import the prefix of a long prompt, or find that it will not come."""
        request = self._engine.factory.new_request("prompt", **arguments)
        arguments |= {
            "prompt": request.tokens,
            "sampling_params": request.sampling,
            "cache_salt": salt_bytes("cache_salt", arguments["cache_salt"]),
        }
        await self._prefill(request.tokens[: request.max_resume_tokens], arguments["cache_salt"])

    async def prefill(self, prompt: Prompt, *, cache_salt: Salt = None) -> RemotePrefill | None:
        """Let the worker compute a prefix and import it, as `stream` does for its prompt.

        Returns:
            What became of it; None where so little is not cached that the worker was not asked.

        Raises:
            ValueError: a bad argument.
            EngineDeadError, RuntimeError: as `AsyncEngine.stream`.
        """
        self._accepting_thread("prefill")
        tokens = checked_prompt("prompt", prompt, self._engine.context.spec.vocab_size)
        return await self._prefill(tokens, salt_bytes("cache_salt", cache_salt))

    async def _prefill(self, tokens: list[int], salt: bytes | None) -> RemotePrefill | None:
        """Import the whole blocks of a prefix from the worker, if that saves enough tokens."""
        block_size = self._engine.config.block_size_tokens
        whole = len(tokens) // block_size * block_size
        if whole < self._min_tokens or whole - await self._cached_tokens(tokens, salt) < self._min_tokens:
            self._count(short=1)
            return None
        if self._is_draining:  # since the call was made
            self._count(missed=1)
            return RemotePrefill(failure="the engine drains")
        try:
            async with asyncio.timeout(self._prefill_timeout_s):
                answer = await self._client.prefill(tokens[:whole], salt)
        except TimeoutError:
            answer = RemotePrefill(failure="the prefill worker did not answer in time")
        missed, num_imported = bool(answer.failure), answer.imported.tokens
        self._count(remote=not missed, missed=missed, imported_tokens=num_imported, bytes=answer.bytes)
        return answer

    async def _cached_tokens(self, tokens: list[int], salt: bytes | None) -> int:
        _, chain = self._engine.factory.hashed_prefix(tokens, salt)
        return await self.call(lambda engine: engine.context.prefix_cache.resumable_tokens(chain))

    def _count(self, **more: int) -> None:
        counts = self._prefills
        self._prefills = replace(counts, **{name: getattr(counts, name) + new for name, new in more.items()})
