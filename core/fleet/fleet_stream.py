"""The answer to one request, put together from what replicas generate of it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from types import TracebackType

from ..inference.contexts.cache.checkpoint_plan import CheckpointPlan
from ..inference.contexts.cache.hashing import PrefixHashChain
from ..inference.contexts.request import GeneratedToken
from ..request import EarlyEnd, FinishReason, PromptFigures, RequestResult, SamplingParams
from .engine_request import AnswerEnd, AnswerPart, EngineRequest


class FleetAnswer:
    """What has come of one request, and what is still asked of replicas. One event loop uses it.

    Attributes:
        request_id: the fleet's number of the request.
        tokens: of the answer, as far as they have come.
        prompt_figures: what became of the prompt at the first replica that came to a token.
        early_end: how the client has ended the answer; None while the client wants all of it.
        opened: set once a replica has the request, or the answer has ended.
        result, error: how the answer ended, one of them; both None until then.
        lost: names of the replicas that were lost while they answered.
    """

    def __init__(
        self,
        request_id: int,
        name: str,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        chain: PrefixHashChain | None,
        *,
        cache_salt: bytes | None,
        plan: CheckpointPlan | None,
        tenant: str | None,
    ) -> None:
        """
        Args:
            request_id: the fleet's number of the request.
            name: the request's name for replicas.
            prompt: the client's prompt.
            sampling: has a seed.
            chain: the hashes of the prompt's blocks; None where nothing is cached.
            cache_salt, plan, tenant: as in `EngineRequest`.
        """
        self.request_id = request_id
        self.tokens: list[GeneratedToken] = []
        self.prompt_figures: PromptFigures | None = None
        self.early_end: EarlyEnd | None = None
        self.opened = asyncio.Event()
        self.result: RequestResult | None = None
        self.error: BaseException | None = None
        self.lost: tuple[str, ...] = ()
        self._name = name
        self._prompt = prompt
        self._sampling = sampling
        self._chain = chain
        self._cache_salt, self._plan, self._tenant = cache_salt, plan, tenant
        self._changed = asyncio.Event()
        self._begun_s = asyncio.get_running_loop().time()
        self._ttft_s: float | None = None

    @property
    def ended(self) -> bool:
        return self.result is not None or self.error is not None

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, and of the answer so far."""
        return len(self._prompt) + len(self.tokens)

    def next_request(self) -> EngineRequest:
        """The request for a replica that goes on behind the tokens that have come."""
        sequence = (*self._prompt, *(one.token for one in self.tokens))
        if self._chain is not None:
            self._chain.extend_to(sequence)
        sampling = self._sampling
        if self.prompt_figures is not None:  # prompt log-probs have come
            sampling = replace(sampling, skip_prompt_log_probs=True)
        return EngineRequest(
            request_id=self._name,
            prompt=sequence,
            num_generated=len(self.tokens),
            sampling=sampling,
            cache_salt=self._cache_salt,
            plan=self._plan,
            keys=() if self._chain is None else tuple(self._chain.keys),
            tenant=self._tenant,
            lost=self.lost,
        )

    def add(self, part: AnswerPart) -> None:
        """Take a part of the answer."""
        if self.prompt_figures is None:
            self.prompt_figures = part.prompt
        if part.tokens and self._ttft_s is None:
            self._ttft_s = asyncio.get_running_loop().time() - self._begun_s
        self.tokens += part.tokens
        if part.end is not None:
            self.end(part.end)
        self.opened.set()
        self._changed.set()

    def complete(self) -> bool:
        """End an answer whose last token has come, though its end has not. Returns whether it has ended."""
        if self.tokens and self.tokens[-1].token in self._sampling.stops:
            self.end(AnswerEnd("stop"))
        elif len(self.tokens) >= self._sampling.num_tokens_to_generate:
            self.end(AnswerEnd("length"))
        return self.ended

    def end(self, end: AnswerEnd) -> None:
        """Make the result, unless the answer has ended."""
        if not self.ended:
            self.result = self._result(end.finish_reason, end.num_recomputed_tokens)
        self._wake()

    def fail(self, error: BaseException) -> None:
        """End the answer with an error, unless it has ended."""
        if not self.ended:
            self.error = error
        self._wake()

    def _wake(self) -> None:
        self.opened.set()
        self._changed.set()

    async def wait(self) -> None:
        """Wait for `add`, `end` or `fail`."""
        self._changed.clear()
        await self._changed.wait()

    def _result(self, reason: FinishReason, num_recomputed: int) -> RequestResult:
        sampling, figures = self._sampling, self.prompt_figures or PromptFigures(0, {})
        tops = [() if one.top_log_probs is None else one.top_log_probs for one in self.tokens]
        return RequestResult(
            request_id=self.request_id,
            tokens=[one.token for one in self.tokens],
            log_probs=[one.log_prob for one in self.tokens if one.log_prob is not None]
            if sampling.return_log_probs
            else None,
            top_log_probs=tops if sampling.num_top_log_probs else None,
            prompt_log_probs=figures.prompt_log_probs or [] if sampling.returns_prompt_log_probs else None,
            num_prompt_tokens=len(self._prompt),
            num_resumed_tokens=figures.num_resumed_tokens,
            computed_by_reason=figures.computed_by_reason,
            num_recomputed_tokens=num_recomputed,
            ttft_s=self._ttft_s,
            finish_reason=reason,
        )


class FleetStream:
    """The tokens of one request to a fleet, as they come; `FleetEngine.stream` makes streams.

    Used as an `AsyncStream` is, by one reader: each item has all tokens since the last one. Iterating raises
    the error that ended the request. Who leaves a stream early cancels it, or uses `async with`.
    """

    def __init__(self, answer: FleetAnswer, end: Callable[[FleetAnswer, EarlyEnd], None]) -> None:
        """
        Args:
            answer: what comes of the request.
            end: ends the request at its replica.
        """
        self._answer = answer
        self._end = end
        self._num_read = 0

    @property
    def request_id(self) -> int:
        """The fleet's number of the request."""
        return self._answer.request_id

    @property
    def result(self) -> RequestResult | None:
        """The request's result; None until the answer has ended, and where an error ended it."""
        return self._answer.result

    @property
    def prompt_figures(self) -> PromptFigures | None:
        """What became of the prompt; None until a token, or the result, is there."""
        return self._answer.prompt_figures

    def cancel(self) -> None:
        """Cancel the request, unless it has ended. Returns at once.

        Iterating then goes on to the tokens that had come, and ends once the replica's call has ended.
        """
        self._end(self._answer, "cancelled")

    def finish(self) -> None:
        """As `cancel`, for an answer that is complete: `result` has the finish reason "stop"."""
        self._end(self._answer, "stop")

    def __aiter__(self) -> AsyncIterator[tuple[GeneratedToken, ...]]:
        return self

    async def __anext__(self) -> tuple[GeneratedToken, ...]:
        answer = self._answer
        while self._num_read == len(answer.tokens) and not answer.ended:
            await answer.wait()
        new = tuple(answer.tokens[self._num_read :])
        self._num_read += len(new)
        if new:
            return new
        if answer.error is not None:
            raise answer.error.with_traceback(None)
        raise StopAsyncIteration

    async def __aenter__(self) -> "FleetStream":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
