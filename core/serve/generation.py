"""The answers to one request, while the engine generates them."""

import asyncio
from collections.abc import Awaitable, Callable

from ..errors import EngineDeadError, KVBlockCapacityError, NoReplicaError, QueueFullError
from ..request import RequestResult
from ..text import TextCodec
from .answer_text import AnswerText, Piece
from .answers import Usage
from .errors import RequestError, unavailable
from .preparation import Choice, Job
from .served_engine import AnswerStream, ServedEngine

Emit = Callable[[int, Piece, str | None], Awaitable[None]]
"""Takes the number of an answer, a piece of it and, with the last piece, why the answer ends."""

_FINISH_REASONS = {"stop": "stop", "length": "length"}


class Generation:
    """Generates all answers of a job at once. Whoever leaves `run` early cancels what has not ended.

    Args:
        engine: serves the prompts.
        text: makes text of tokens; None for a model without a tokenizer.
        job: what is wanted.
        cache_salt: the engine's salt.
        tenant: whose requests these are.
    """

    def __init__(
        self,
        engine: ServedEngine,
        text: TextCodec | None,
        job: Job,
        cache_salt: bytes | None,
        tenant: str,
    ) -> None:
        self._engine = engine
        self._text = text
        self._job = job
        self._cache_salt = cache_salt
        self._tenant = tenant
        self._num_cached = 0
        self._num_answer_tokens = 0

    @property
    def usage(self) -> Usage:
        """The tokens of the request, complete after `run`. Of several answers to a prompt, the first counts
        what was cached.
        """
        return Usage(self._job.num_prompt_tokens, self._num_cached, self._num_answer_tokens)

    async def run(self, emit: Emit) -> None:
        """Generate all answers and give each piece to `emit`.

        Raises:
            RequestError: the engine takes no request, or could not end one.
        """
        streams: list[AnswerStream] = []
        try:
            async with asyncio.TaskGroup() as tasks:  # the engine has all requests before it has answers
                opening = [tasks.create_task(self._open(each, streams)) for each in self._job.choices]
            async with asyncio.TaskGroup() as tasks:
                for choice, opened in zip(self._job.choices, opening, strict=True):
                    tasks.create_task(self._answer(choice, opened.result(), emit))
        except BaseExceptionGroup as group:
            raise _first(group) from None
        finally:
            for stream in streams:
                stream.cancel()

    async def _open(self, choice: Choice, streams: list[AnswerStream]) -> AnswerStream:
        """Queue one prompt. Its stream is added to `streams`."""
        try:
            stream = await self._engine.stream(
                choice.tokens,
                choice.sampling,
                cache_salt=self._cache_salt,
                checkpoint_plan=choice.plan,
                tenant=self._tenant,
            )
            streams.append(stream)
            return stream
        except QueueFullError:
            raise queue_full() from None
        except EngineDeadError:
            raise dead() from None
        except NoReplicaError:
            raise no_replica() from None
        except KVBlockCapacityError:
            raise no_capacity() from None
        except ValueError as error:
            raise RequestError(400, str(error)) from None
        except RuntimeError:
            raise draining() from None

    async def _answer(self, choice: Choice, stream: AnswerStream, emit: Emit) -> None:
        options = self._job.options
        keeps_tokens = options.returns_token_ids or options.num_top_log_probs is not None
        text = AnswerText(self._text, options.stops, choice.tokens[-1], keeps_tokens)
        try:
            async for tokens in stream:
                if text.stopped:
                    continue  # until the request has left, and its result is there
                piece = text.push(tokens)
                if text.stopped:
                    stream.finish()
                if piece.text or piece.tokens:
                    await emit(choice.index, piece, None)
        except EngineDeadError:
            raise dead() from None
        except NoReplicaError:
            raise no_replica() from None
        except KVBlockCapacityError:
            raise no_capacity() from None
        result = stream.result
        assert result is not None
        piece = text.finish()
        reason = "stop" if text.stopped else _finish_reason(result)
        if choice.index == choice.prompt * options.num_choices:
            self._num_cached += result.num_resumed_tokens
        self._num_answer_tokens += text.num_tokens
        await emit(choice.index, piece, reason)


def queue_full() -> RequestError:
    message = "too many requests wait; try again later"
    return RequestError(429, message, code="queue_full", headers={"retry-after": "1"})


def draining() -> RequestError:
    return unavailable("the server is shutting down and takes no more requests", "draining")


def dead() -> RequestError:
    return unavailable("the engine has stopped; the server must be started again", "engine_dead")


def no_replica() -> RequestError:
    return unavailable("no replica of the model can answer now; try again later", "no_replica")


def no_capacity() -> RequestError:
    return unavailable("pinned prefixes leave too little memory for this request", "capacity")


def _finish_reason(result: RequestResult) -> str:
    """OpenAI's reason of an answer that came to its own end."""
    reason = _FINISH_REASONS.get(result.finish_reason)
    if reason is not None:
        return reason
    if result.finish_reason == "invalid_logits":
        message = "the model's logits were not finite, so that no token could be chosen"
        raise RequestError(500, message, code="invalid_logits")
    raise unavailable("the server ended the request before its answer was complete", "cancelled")


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a group that is no group; the others follow from it or equal it."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
