"""What generates the answers of a server, and the HTTP responses that send them while they come."""

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..errors import EngineDeadError, KVBlockCapacityError, NoReplicaError, QueueFullError
from ..inference.contexts.cache.checkpoint_plan import CheckpointPlan
from ..inference.engines.arguments import Prompt, Salt
from ..inference.engines.async_engine import AsyncEngine
from ..inference.engines.dynamic_engine import DynamicInferenceEngine
from ..inference.engines.streams import AsyncStream
from ..monitor import Monitor
from ..request import RequestResult, SamplingParams
from ..text import TextCodec
from .errors import JSONAnswer, RequestError, bad_argument, json_bytes, refusal
from .gate import BROKEN_BY
from .http_answers import AnswerText, Form, Piece, usage
from .metrics import metrics_text
from .requests import AnswerRequest

Emit = Callable[[int, Piece], Awaitable[None]]
"""Called with the number of an answer and a piece of it."""

_LAST_EVENT_S = 1.0
"""Seconds in which a client must read the error that ends its stream."""
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the pieces
]


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
        config, cache = engine.config, engine.context.prefix_cache
        return cls(
            vocab_size=engine.context.spec.vocab_size,
            max_sequence_length=config.max_sequence_length,
            pool_tokens=cache.kv_blocks.total_count * config.block_size_tokens,
            max_requests=config.max_requests,
            block_size_tokens=config.block_size_tokens,
            caches_prefixes=config.enable_prefix_caching,
            checkpoint_plan=config.checkpoint_plan,
        )


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

    async def metrics_text(self) -> tuple[bytes, str]:
        """The body of a reply to Prometheus, and its content type."""

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
        self.monitor = Monitor(engine, model_name=model_name, trace=_print_line if trace else None)
        self.facts = EngineFacts.of(engine)
        self.max_running = self.facts.max_requests

    async def close(self, timeout_s: float | None = None) -> bool:
        ended = await super().close(timeout_s)
        with contextlib.suppress(ValueError):  # the engine has failed, and dropped its observers
            self.monitor.close()
        return ended

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

    async def metrics_text(self) -> tuple[bytes, str]:
        return await asyncio.to_thread(metrics_text, self.monitor)

    async def snapshot(self) -> dict[str, Any]:
        return await asyncio.to_thread(self.monitor.snapshot)


def _print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Choice:
    """One answer that the engine is to generate: the index-th of a request, to its prompt-th prompt."""

    index: int
    prompt: int
    tokens: list[int]
    sampling: SamplingParams
    plan: CheckpointPlan


@dataclass(frozen=True)
class Job:
    """All answers that one request wants, and how they are sent back."""

    choices: Sequence[Choice]
    request: AnswerRequest

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompts, each counted once."""
        return sum({choice.prompt: len(choice.tokens) for choice in self.choices}.values())


def _code_of(error: Exception) -> str:
    """The code with which a client sees an engine's error; an engine that is closing raises RuntimeError."""
    codes = {
        QueueFullError: "queue_full",
        EngineDeadError: "engine_dead",
        NoReplicaError: "no_replica",
        KVBlockCapacityError: "capacity",
    }
    return next((code for kind, code in codes.items() if isinstance(error, kind)), "draining")


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
        self._num_cached = 0
        self._num_tokens: dict[int, int] = {}  # of each answer, so far

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if not await _until_gone(receive, self._answer(scope, receive, send)):
                scope["state"][BROKEN_BY] = "client"
        finally:
            self.finished()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        answers: list[list[Piece]] = [[] for _ in self.job.choices]

        async def collect(index: int, piece: Piece) -> None:
            answers[index].append(piece)

        await before(self.deadline, self._generate(collect))
        answer = JSONAnswer(self.form.whole(list(map(Piece.joined, answers)), self._usage))
        await before(self.deadline, answer(scope, receive, send))

    @property
    def _usage(self) -> dict[str, Any]:
        """Complete after `_generate`. Of several answers to a prompt, the first counts its cached tokens."""
        return usage(self.job.num_prompt_tokens, self._num_cached, sum(self._num_tokens.values()))

    async def _generate(self, emit: Emit) -> None:
        """Give each piece of all answers to `emit`; RequestError where that fails."""
        streams: list[AsyncStream] = []
        try:
            async with asyncio.TaskGroup() as tasks:  # the engine has all requests before it has answers
                opening = [tasks.create_task(self._open(each, streams)) for each in self.job.choices]
            async with asyncio.TaskGroup() as tasks:
                for choice, opened in zip(self.job.choices, opening, strict=True):
                    tasks.create_task(self._read(choice, opened.result(), emit))
        except BaseExceptionGroup as group:
            raise _first(group) from None
        finally:
            for stream in streams:
                stream.cancel()

    async def _open(self, choice: Choice, streams: list[AsyncStream]) -> AsyncStream:
        """Queue one prompt. Its stream is added to `streams`."""
        try:
            stream = await self.engine.stream(
                choice.tokens,
                choice.sampling,
                cache_salt=self.cache_salt,
                checkpoint_plan=choice.plan,
                tenant=self.tenant,
            )
            streams.append(stream)
            return stream
        except ValueError as error:
            raise bad_argument(error, type(self.job.request).model_fields) from None
        except (QueueFullError, RuntimeError) as error:
            raise refusal(_code_of(error)) from None

    async def _read(self, choice: Choice, stream: AsyncStream, emit: Emit) -> None:
        request = self.job.request
        keeps_tokens = request.return_token_ids or request.num_top_log_probs is not None
        text = AnswerText(self.text, request.stop, choice.tokens[-1], keeps_tokens)
        try:
            async for tokens in stream:
                if text.stopped:
                    continue  # until the request has ended and its result is there
                piece = text.push(tokens)
                self._num_tokens[choice.index] = text.num_tokens
                if text.stopped:
                    stream.finish()
                if piece.text or piece.tokens:
                    await emit(choice.index, piece)
        except (EngineDeadError, NoReplicaError, KVBlockCapacityError) as error:
            raise refusal(_code_of(error)) from None
        result = stream.result
        assert result is not None
        piece = text.finish()
        piece.finish_reason = "stop" if text.stopped else _finish_reason(result)
        if choice.index == choice.prompt * request.n:
            self._num_cached += result.num_resumed_tokens
        self._num_tokens[choice.index] = text.num_tokens
        await emit(choice.index, piece)


class StreamedAnswer(GeneratedAnswer):
    """An answer in server-sent events. An error before the first event has its own status."""

    _started = False

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await before(self.deadline, self._events(send))
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


async def before[T](deadline: float, work: Awaitable[T], error: RequestError | None = None) -> T:
    """The result of `work`, or an error where it is not done at `deadline` of the loop's clock."""
    try:
        async with asyncio.timeout_at(deadline):
            return await work
    except TimeoutError:
        message = "the answer was not complete within the server's time limit for a request"
        raise error or RequestError(504, message, code="timeout") from None


async def _until_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Do `work`, whose request was read; cancel it where the client goes away. Returns whether it is done."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_gone(receive))
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


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
