"""The answer to one request, which the engine generates while it is sent: whole, or as server-sent events."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..errors import EngineDeadError, KVBlockCapacityError, NoReplicaError
from ..inference.engines.streams import AsyncStream
from ..params_and_results import RequestResult
from ..text import TextCodec
from .answer_json import AnswerFormat
from .answer_text import AnswerDelta, AnswerText
from .error_answers import JSONAnswer, RequestError, bad_argument, json_bytes, refusal
from .jobs import Choice, Job
from .middleware import BROKEN_BY
from .served_engine import ServedEngine

Emit = Callable[[int, AnswerDelta], Awaitable[None]]  # called with the number of an answer and a delta of it

_LAST_EVENT_S = 1.0  # seconds in which a client must read the error that ends its stream
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the events
]


@dataclass(eq=False)
class GeneratedAnswer(Response):
    """The answer to a request, generated while it is sent, up to `deadline` of the loop's clock."""

    engine: ServedEngine
    codec: TextCodec | None
    job: Job
    tenant: str
    cache_salt: bytes | None
    answer_format: AnswerFormat
    deadline: float
    on_end: Callable[[], None]

    def __post_init__(self) -> None:
        super().__init__()
        request = self.job.request
        keeps_tokens = request.return_token_ids or request.num_top_log_probs is not None
        self._texts = [
            AnswerText(self.codec, request.stop, choice.tokens[-1], keeps_tokens)
            for choice in self.job.choices
        ]
        self._num_cached = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if not await _unless_disconnected(receive, self._answer(scope, receive, send)):
                scope["state"][BROKEN_BY] = "client"
        finally:
            self.on_end()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        answers: list[list[AnswerDelta]] = [[] for _ in self.job.choices]

        async def collect(index: int, delta: AnswerDelta) -> None:
            answers[index].append(delta)

        await within(self.deadline, self._generate(collect))
        answer = JSONAnswer(self.answer_format.whole(list(map(AnswerDelta.joined, answers)), self._usage))
        await within(self.deadline, answer(scope, receive, send))

    @property
    def _usage(self) -> dict[str, Any]:
        """Complete after `_generate`. Of several answers to a prompt, the first counts its cached tokens."""
        num_answer_tokens = sum(text.num_tokens for text in self._texts)
        return {
            "prompt_tokens": self.job.num_prompt_tokens,
            "completion_tokens": num_answer_tokens,
            "total_tokens": self.job.num_prompt_tokens + num_answer_tokens,
            "prompt_tokens_details": {"cached_tokens": self._num_cached},
        }

    async def _generate(self, emit: Emit) -> None:
        """Give each delta of all answers to `emit`; RequestError where that fails."""
        streams: dict[int, AsyncStream] = {}
        try:
            async with asyncio.TaskGroup() as tasks:  # the engine has all requests before it has answers
                for choice in self.job.choices:
                    tasks.create_task(self._open(choice, streams))
            async with asyncio.TaskGroup() as tasks:
                for choice in self.job.choices:
                    tasks.create_task(self._read(choice, streams[choice.index], emit))
        except BaseExceptionGroup as group:
            raise _first_error(group) from None
        finally:
            for stream in streams.values():
                stream.cancel()

    async def _open(self, choice: Choice, streams: dict[int, AsyncStream]) -> None:
        """Queue one prompt. Its stream is added to `streams`, by the choice's index."""
        try:
            streams[choice.index] = await self.engine.stream(
                choice.tokens, choice.sampling, cache_salt=self.cache_salt, checkpoint_plan=choice.plan,
                tenant=self.tenant,
            )  # fmt: skip
        except ValueError as error:
            raise bad_argument(error, type(self.job.request).model_fields) from None
        except RuntimeError as error:
            raise refusal(error) from None

    async def _read(self, choice: Choice, stream: AsyncStream, emit: Emit) -> None:
        text = self._texts[choice.index]
        try:
            async for tokens in stream:
                if text.has_stopped:
                    continue  # until the request has ended and its result is there
                delta = text.push(tokens)
                if text.has_stopped:
                    stream.finish()
                if delta.text or delta.tokens:
                    await emit(choice.index, delta)
        except (EngineDeadError, NoReplicaError, KVBlockCapacityError) as error:
            raise refusal(error) from None
        result = stream.result
        assert result is not None
        delta = text.finish()
        delta.finish_reason = "stop" if text.has_stopped else _finish_reason(result)
        if choice.index == choice.prompt * self.job.request.n:
            self._num_cached += result.num_resumed_tokens
        await emit(choice.index, delta)


class StreamedAnswer(GeneratedAnswer):
    """An answer in server-sent events. An error before the first event has its own status."""

    _has_started = False

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await within(self.deadline, self._events(send))
        except Exception as error:
            if not self._has_started:
                raise
            sent_error = error if isinstance(error, RequestError) else RequestError(500, "an internal error")
            scope["state"][BROKEN_BY] = sent_error.code or "error"
            async with asyncio.timeout(_LAST_EVENT_S):
                await self._send(send, sent_error.body)
                await send({"type": "http.response.body", "body": b""})
            if sent_error is not error:
                raise

    async def _events(self, send: Send) -> None:
        opened_indices: set[int] = set()
        options = self.job.request.stream_options
        lock = asyncio.Lock()  # events of one answer stay in order, and start before all

        async def emit(index: int, delta: AnswerDelta) -> None:
            async with lock:
                opening = None if index in opened_indices else self.answer_format.opening(index)
                opened_indices.add(index)
                if opening is not None:
                    await self._send(send, opening)
                chunk = self.answer_format.chunk(index, delta)
                if options.include_usage and options.continuous_usage_stats:
                    # What was cached is known when the answers have ended: the last event says it.
                    chunk["usage"] = self._usage | {"prompt_tokens_details": None}
                await self._send(send, chunk)

        await self._generate(emit)
        if options.include_usage:
            await self._send(send, self.answer_format.usage_chunk(self._usage))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _send(self, send: Send, event: dict[str, Any]) -> None:
        if not self._has_started:
            self._has_started = True
            await send({"type": "http.response.start", "status": 200, "headers": list(_STREAM_HEADERS)})
        body = b"data: " + json_bytes(event) + b"\n\n"
        await send({"type": "http.response.body", "body": body, "more_body": True})


async def within[T](deadline: float, work: Awaitable[T], error: RequestError | None = None) -> T:
    """The result of `work`, or an error where it is not done at `deadline` of the loop's clock."""
    try:
        async with asyncio.timeout_at(deadline):
            return await work
    except TimeoutError:
        message = "the answer was not complete within the server's time limit for a request"
        raise error or RequestError(504, message, code="timeout") from None


async def _unless_disconnected(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Do `work`, whose request was read; cancel it where the client goes away. Returns whether it is done."""
    work_task = asyncio.create_task(work)
    disconnect_task = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((work_task, disconnect_task), return_when=asyncio.FIRST_COMPLETED)
    finally:
        is_done = work_task.done()
        for task in (work_task, disconnect_task):
            task.cancel()
        await asyncio.gather(work_task, disconnect_task, return_exceptions=True)
    if is_done:
        work_task.result()
    return is_done


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _finish_reason(result: RequestResult) -> str:
    """OpenAI's reason of an answer that was not cancelled."""
    if result.finish_reason in ("stop", "length"):
        return result.finish_reason
    if result.finish_reason == "invalid_logits":
        message = "the model's logits were not finite, so that no token could be chosen"
        raise RequestError(500, message, code="invalid_logits")
    raise refusal("cancelled")


def _first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a group; the others follow from it or equal it."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
