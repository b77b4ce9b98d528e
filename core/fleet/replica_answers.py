"""Requests to replicas, their answers in parts, and one answer put together from them."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace

from ..errors import KVBlockCapacityError, QueueFullError
from ..inference.contexts.cache.checkpoint_plan import CheckpointPlan
from ..inference.contexts.cache.hashing import PrefixHashChain
from ..inference.engines.streams import Answer
from ..net.routing.state_router import RouteRequest
from ..params_and_results import (
    EarlyEnd,
    FinishReason,
    GeneratedToken,
    PromptFigures,
    RequestResult,
    SamplingParams,
)
from ..serve.served_engine import ServedEngine


class ReplicaLostError(RuntimeError):
    """The replica that served a request is gone, or cannot go on; another one may answer."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request as a replica gets it. It can be pickled."""

    request_id: str  # the same in all attempts
    prompt: tuple[int, ...]  # the client's, then the tokens that lost replicas have generated
    num_given_tokens: int  # of the last of these tokens; sampling continues with the next random number
    sampling: SamplingParams
    cache_salt: bytes | None = None
    plan: CheckpointPlan | None = None
    hashes: tuple[int, ...] = ()  # the hash of each whole block of `prompt`, for the router
    block_size_tokens: int = 1
    tenant: str | None = None  # in whose figures it counts; None where requests have no salt
    lost: tuple[str, ...] = ()  # names of the replicas that were lost while they answered

    def __repr__(self) -> str:
        """One line, without tokens and salt: they are the user's."""
        num_prompt_tokens = len(self.prompt) - self.num_given_tokens
        counts = f"{num_prompt_tokens} prompt tokens, {self.num_given_tokens} generated"
        return f"<EngineRequest {self.request_id}: {counts}>"

    @property
    def route(self) -> RouteRequest:
        """What a router sees of it; its answer has at most the tokens that are still to be generated."""
        max_answer_tokens = self.sampling.max_tokens - self.num_given_tokens
        return RouteRequest(self.hashes, len(self.prompt), self.block_size_tokens, max_answer_tokens)


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """Some of a replica's answer. It can be pickled.

    The first part says that the replica has the request: it may be empty. The first part with tokens or
    `finish_reason` has the prompt's figures. The last part has `finish_reason`, or `error`, which says why
    the replica refuses the request (ValueError, QueueFullError or KVBlockCapacityError).
    """

    tokens: tuple[GeneratedToken, ...] = ()
    prompt: PromptFigures | None = None
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    replica: str = ""


async def answer_parts(
    engine: ServedEngine, request: EngineRequest, replica: str = ""
) -> AsyncGenerator[AnswerPart]:
    """Serve a request and yield its answer; closing this cancels it. ReplicaLostError: engine failed."""
    try:
        stream = await engine.stream(
            request.prompt, replace(request.sampling, num_given_tokens=request.num_given_tokens),
            cache_salt=request.cache_salt, checkpoint_plan=request.plan, tenant=request.tenant,
        )  # fmt: skip
    except (ValueError, QueueFullError) as error:
        yield AnswerPart(error=error, replica=replica)
        return
    except Exception as error:  # it is closing, or dead
        raise ReplicaLostError(f"the replica accepts no request: {error}") from error
    was_sent = False
    try:
        yield AnswerPart(replica=replica)
        async for tokens in stream:
            yield AnswerPart(tokens, None if was_sent else stream.prompt_figures)
            was_sent = True
        finish_reason = None if stream.result is None else stream.result.finish_reason
        if finish_reason in (None, "cancelled", "reset"):
            raise ReplicaLostError(f"the request ended early: {finish_reason}")
        figures = None if was_sent else stream.prompt_figures
        yield AnswerPart((), figures, finish_reason)
    except KVBlockCapacityError as error:
        yield AnswerPart(error=error)
    except ReplicaLostError:
        raise
    except Exception as error:
        raise ReplicaLostError(f"the replica could not end the request: {error!r}") from error
    finally:
        stream.cancel()


class FleetAnswer(Answer):
    """The tokens of one request so far, and the request for the rest of them; a `TokenStream` reads it."""

    def __init__(
        self,
        request_id: int,
        request: EngineRequest,
        chain: PrefixHashChain | None,
        end: Callable[["FleetAnswer", EarlyEnd], object],
    ) -> None:
        """`request` is for the first replica; `chain` hashes its blocks, or is None without a cache."""
        loop = asyncio.get_running_loop()  # a stream that is dropped may be collected in any thread

        def end_soon(answer: Answer, reason: EarlyEnd) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(end, self, reason)

        super().__init__(lambda answer: None, end_soon)
        self.request_id: int = request_id
        self.early_end: EarlyEnd | None = None  # how the client has ended the answer
        self.opened = asyncio.Event()  # set once a replica has the request, or the answer has ended
        self.lost: tuple[str, ...] = ()
        self._request = request
        self._chain = chain
        self._begun_s = loop.time()
        self._ttft_s: float | None = None

    @property
    def tokens(self) -> Sequence[GeneratedToken]:
        """The tokens of the answer so far."""
        return self._arrived

    def next_request(self) -> EngineRequest:
        """The request for a replica that continues after the tokens so far."""
        sequence = (*self._request.prompt, *(generated.token for generated in self.tokens))
        if self._chain is not None:
            self._chain.extend_to(sequence)
        sampling = self._request.sampling
        if self.prompt_figures is not None:  # prompt log-probs have come
            sampling = replace(sampling, skip_prompt_log_probs=True)
        return replace(
            self._request, prompt=sequence, num_given_tokens=len(self.tokens), sampling=sampling,
            hashes=() if self._chain is None else tuple(self._chain.hashes), lost=self.lost,
        )  # fmt: skip

    def add(self, part: AnswerPart) -> None:
        if self.prompt_figures is None:
            self.prompt_figures = part.prompt
        if part.tokens and self._ttft_s is None:
            self._ttft_s = asyncio.get_running_loop().time() - self._begun_s
        self.extend(part.tokens)
        if part.finish_reason is not None:
            self.end_as(part.finish_reason)
        self.wake()

    def end_if_complete(self) -> bool:
        """End an answer whose last token has come, though its end has not. Returns whether it has ended."""
        if self.tokens and self.tokens[-1].token in self._request.sampling.stops:
            self.end_as("stop")
        elif len(self.tokens) >= self._request.sampling.max_tokens:
            self.end_as("length")
        self.wake()
        return self.has_ended

    def wake(self) -> None:
        self.opened.set()
        super().wake()

    def end_as(self, finish_reason: FinishReason) -> None:
        """End the answer with the tokens so far, unless it has ended."""
        if self.has_ended:
            return
        sampling = self._request.sampling
        figures = self.prompt_figures or PromptFigures(0, {})
        log_probs = [token.log_prob for token in self.tokens if token.log_prob is not None]
        top_log_probs = [token.top_log_probs or () for token in self.tokens]
        result = RequestResult(
            request_id=self.request_id,
            tokens=[token.token for token in self.tokens],
            log_probs=log_probs if sampling.return_log_probs else None,
            top_log_probs=top_log_probs if sampling.num_top_log_probs else None,
            prompt_log_probs=None if sampling.skip_prompt_log_probs else figures.prompt_log_probs or [],
            num_prompt_tokens=len(self._request.prompt),
            num_resumed_tokens=figures.num_resumed_tokens,
            computed_by_reason=figures.computed_by_reason,
            num_recomputed_tokens=None,
            ttft_s=self._ttft_s,
            finish_reason=finish_reason,
        )
        self.end(result)
