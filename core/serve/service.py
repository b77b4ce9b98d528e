"""What the endpoints share: requests become answers of the engine, within the server's limits."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..errors import EngineDeadError, KVBlockCapacityError, NoReplicaError
from ..inference.engines.streams import AsyncStream
from ..loaded_model import LoadedText
from ..request import RequestResult
from ..text import TextCodec
from .errors import JSONAnswer, RequestError, bad_argument, json_bytes, refusal
from .http_answers import AnswerText, Form, Piece, usage
from .middleware import BROKEN_BY, engine_salt
from .preparation import Choice, Job, Preparation, body_too_slow, header_salt, read_body
from .served_engine import ServedEngine
from .settings import ServerSettings

Emit = Callable[[int, Piece], Awaitable[None]]
"""Called with the number of an answer and a piece of it."""

_LAST_EVENT_S = 1.0
"""Seconds in which a client must read the error that ends its stream."""
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the pieces
]
_LONGEST_STEP_S = 30.0
_LONG_BODY_BYTES = 2**18


class Service:
    """Admits requests to the engine; bodies are parsed and prompts encoded in two worker threads.

    The parser of JSON lets no other thread run: `max_body_bytes` bounds how long all streams stop for a body.
    """

    def __init__(self, engine: ServedEngine, loaded: LoadedText, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        facts = engine.facts
        longest = max(2 * 2**20, 2**20 + 16 * facts.max_sequence_length)  # as token ids or as text
        self.max_body_bytes = settings.max_body_bytes or longest
        self.preparation = Preparation(facts, loaded, settings)
        self.is_draining = False
        self._text = loaded.text
        self._text_threads = [ThreadPoolExecutor(1, f"mambaslots-{name}") for name in ("text", "long-text")]
        self._num_open = 0
        self._none_open = asyncio.Event()

    async def drain(self) -> bool:
        """Refuse new requests and wait for the others. Returns whether none was cancelled."""
        self.is_draining = True
        deadline = asyncio.get_running_loop().time() + self.settings.drain_timeout_s
        if not isinstance(self.engine.failure, NoReplicaError | None):
            return False
        complete = await self.engine.drain(self.settings.drain_timeout_s)
        try:
            async with asyncio.timeout_at(deadline):  # the answers are generated, and perhaps not sent
                while self._num_open:
                    self._none_open.clear()
                    await self._none_open.wait()
        except TimeoutError:
            return False
        return complete

    async def close(self) -> None:
        """Cancel all requests, and end the threads. A step that hangs is abandoned after 30 s."""
        self.is_draining = True
        await self.engine.close(_LONGEST_STEP_S)
        for thread in self._text_threads:
            thread.shutdown(wait=False, cancel_futures=True)

    @property
    def why_refused(self) -> RequestError | None:
        """Why requests are refused; None where they are served."""
        failure = self.engine.failure
        if failure is not None and not isinstance(failure, NoReplicaError):
            return refusal("engine_dead")
        if self.is_draining:
            return refusal("draining")
        return None if failure is None else refusal("no_replica")

    @property
    def _max_open(self) -> int:
        """Answers that may be open, running or waiting."""
        return self.settings.max_waiting_requests + self.engine.max_running

    async def answer(
        self, request: Request, job_of: Callable[[bytes, str | None], Job], form: type[Form]
    ) -> "GeneratedAnswer":
        """The response to a request, which generates its answer when it is sent; a thread calls `job_of`."""
        if self.why_refused is not None:
            raise self.why_refused
        if self._num_open >= self._max_open:
            raise refusal("queue_full")  # before its body costs memory
        self._num_open += 1
        num_answers = 1
        try:
            loop = asyncio.get_running_loop()
            deadline = loop.time() + self.settings.request_timeout_s
            body_deadline = min(deadline, loop.time() + self.settings.body_timeout_s)
            body = await within(body_deadline, read_body(request, self.max_body_bytes), body_too_slow())
            salt, tenant = header_salt(request), request.state.tenant
            thread = self._text_threads[len(body) > _LONG_BODY_BYTES]
            job = await within(deadline, loop.run_in_executor(thread, job_of, body, salt))
            if self._num_open + len(job.choices) - 1 > self._max_open:
                raise refusal("queue_full")
            self._num_open += len(job.choices) - 1
            num_answers = len(job.choices)
            return (StreamedAnswer if job.request.stream else GeneratedAnswer)(
                self.engine,
                self._text,
                job,
                tenant,
                engine_salt(tenant, job.request.cache_salt, bool(self.settings.api_keys)),
                form(self.settings.model_name, job.request),
                deadline,
                partial(self._end_answers, num_answers),
            )
        except BaseException:
            self._end_answers(num_answers)
            raise

    def _end_answers(self, num_answers: int) -> None:
        self._num_open -= num_answers
        if not self._num_open:
            self._none_open.set()


# ---- answers


def _finish_reason(result: RequestResult) -> str:
    """OpenAI's reason of an answer that was not cancelled."""
    if result.finish_reason in ("stop", "length"):
        return result.finish_reason
    if result.finish_reason == "invalid_logits":
        message = "the model's logits were not finite, so that no token could be chosen"
        raise RequestError(500, message, code="invalid_logits")
    raise refusal("cancelled")


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a group; the others follow from it or equal it."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@dataclass(eq=False)
class GeneratedAnswer(Response):
    """The answer to a request, generated while it is sent, up to `deadline` of the loop's clock."""

    engine: ServedEngine
    text: TextCodec | None
    job: Job
    tenant: str
    cache_salt: bytes | None
    form: Form
    deadline: float
    finished: Callable[[], None]

    def __post_init__(self) -> None:
        super().__init__()
        request = self.job.request
        keeps_tokens = request.return_token_ids or request.num_top_log_probs is not None
        self._texts = [
            AnswerText(self.text, request.stop, choice.tokens[-1], keeps_tokens)
            for choice in self.job.choices
        ]
        self._num_cached = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if not await _unless_disconnected(receive, self._answer(scope, receive, send)):
                scope["state"][BROKEN_BY] = "client"
        finally:
            self.finished()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        answers: list[list[Piece]] = [[] for _ in self.job.choices]

        async def collect(index: int, piece: Piece) -> None:
            answers[index].append(piece)

        await within(self.deadline, self._generate(collect))
        answer = JSONAnswer(self.form.whole(list(map(Piece.joined, answers)), self._usage))
        await within(self.deadline, answer(scope, receive, send))

    @property
    def _usage(self) -> dict[str, Any]:
        """Complete after `_generate`. Of several answers to a prompt, the first counts its cached tokens."""
        num_answer_tokens = sum(text.num_tokens for text in self._texts)
        return usage(self.job.num_prompt_tokens, self._num_cached, num_answer_tokens)

    async def _generate(self, emit: Emit) -> None:
        """Give each piece of all answers to `emit`; RequestError where that fails."""
        streams: dict[int, AsyncStream] = {}
        try:
            async with asyncio.TaskGroup() as tasks:  # the engine has all requests before it has answers
                for choice in self.job.choices:
                    tasks.create_task(self._open(choice, streams))
            async with asyncio.TaskGroup() as tasks:
                for choice in self.job.choices:
                    tasks.create_task(self._read(choice, streams[choice.index], emit))
        except BaseExceptionGroup as group:
            raise _first(group) from None
        finally:
            for stream in streams.values():
                stream.cancel()

    async def _open(self, choice: Choice, streams: dict[int, AsyncStream]) -> None:
        """Queue one prompt. Its stream is added to `streams`, by the choice's index."""
        try:
            streams[choice.index] = await self.engine.stream(
                choice.tokens,
                choice.sampling,
                cache_salt=self.cache_salt,
                checkpoint_plan=choice.plan,
                tenant=self.tenant,
            )
        except ValueError as error:
            raise bad_argument(error, type(self.job.request).model_fields) from None
        except RuntimeError as error:
            raise refusal(error) from None

    async def _read(self, choice: Choice, stream: AsyncStream, emit: Emit) -> None:
        text = self._texts[choice.index]
        try:
            async for tokens in stream:
                if text.stopped:
                    continue  # until the request has ended and its result is there
                piece = text.push(tokens)
                if text.stopped:
                    stream.finish()
                if piece.text or piece.tokens:
                    await emit(choice.index, piece)
        except (EngineDeadError, NoReplicaError, KVBlockCapacityError) as error:
            raise refusal(error) from None
        result = stream.result
        assert result is not None
        piece = text.finish()
        piece.finish_reason = "stop" if text.stopped else _finish_reason(result)
        if choice.index == choice.prompt * self.job.request.n:
            self._num_cached += result.num_resumed_tokens
        await emit(choice.index, piece)


class StreamedAnswer(GeneratedAnswer):
    """An answer in server-sent events. An error before the first event has its own status."""

    _started = False

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await within(self.deadline, self._events(send))
        except Exception as error:
            if not self._started:
                raise
            shown = error if isinstance(error, RequestError) else RequestError(500, "an internal error")
            scope["state"][BROKEN_BY] = shown.code or "error"
            async with asyncio.timeout(_LAST_EVENT_S):
                await self._send(send, shown.body)
                await send({"type": "http.response.body", "body": b""})
            if shown is not error:
                raise

    async def _events(self, send: Send) -> None:
        opened: set[int] = set()
        options = self.job.request.stream_options
        lock = asyncio.Lock()  # events of one answer stay in order, and start before all

        async def emit(index: int, piece: Piece) -> None:
            async with lock:
                opening = None if index in opened else self.form.opening(index)
                opened.add(index)
                if opening is not None:
                    await self._send(send, opening)
                chunk = self.form.chunk(index, piece)
                if options.include_usage and options.continuous_usage_stats:
                    # What was cached is known when the answers have ended: the last event says it.
                    chunk["usage"] = self._usage | {"prompt_tokens_details": None}
                await self._send(send, chunk)

        await self._generate(emit)
        if options.include_usage:
            await self._send(send, self.form.usage_chunk(self._usage))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _send(self, send: Send, event: dict[str, Any]) -> None:
        if not self._started:
            self._started = True
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
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
    finally:
        is_done = working.done()
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
    if is_done:
        working.result()
    return is_done


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
