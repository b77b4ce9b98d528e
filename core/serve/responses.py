"""Responses that end with their request: where the client goes away, or the time is over."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .answer_text import Piece
from .answers import Form, WholeAnswer
from .errors import RequestError, json_bytes
from .generation import Generation

_LAST_WORD_S = 1.0
"""Seconds that a client has to take the error that ends its stream."""
ENDED_BY = "ended_by"
"""A request's state has what ended its answer before it was complete, under this name."""
_CAUSES = {
    "timeout": "the timeout",
    "cancelled": "the shutdown",
    "engine_dead": "the engine's failure",
    "no_replica": "the loss of replicas",
    "capacity": "too little memory",
}
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the pieces
]


class JSONAnswer(Response):
    """A JSON object."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json_bytes(content)


def error_response(error: RequestError) -> JSONAnswer:
    """The response that tells a client of an error."""
    return JSONAnswer(error.body, error.status, error.headers)


class GeneratedAnswer(Response):
    """An answer that is generated while the response is sent.

    Args:
        generation: what is generated.
        form: how it is written.
        num_answers: how many answers there are.
        deadline: when the loop's clock shows this time, the request has failed.
        finished: is called once, when nothing is generated any more.
    """

    def __init__(
        self,
        generation: Generation,
        form: Form,
        num_answers: int,
        deadline: float,
        finished: Callable[[], None],
    ) -> None:
        super().__init__()
        self._generation = generation
        self._form = form
        self._num_answers = num_answers
        self._deadline = deadline
        self._finished = finished

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if not await until_gone(receive, self._answer(scope, receive, send)):
                scope["state"][ENDED_BY] = "the client"
        finally:
            self._finished()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        answers = [WholeAnswer() for _ in range(self._num_answers)]

        async def collect(index: int, piece: Piece, finish_reason: str | None) -> None:
            answers[index].add(piece)
            answers[index].finish_reason = finish_reason or ""

        await before(self._deadline, self._generation.run(collect))
        answer = JSONAnswer(self._form.whole(answers, self._generation.usage))
        await before(self._deadline, answer(scope, receive, send))


class StreamedAnswer(GeneratedAnswer):
    """An answer in server-sent events. An error before the first event has its own status."""

    includes_usage = False
    _started = False

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await before(self._deadline, self._events(send))
        except Exception as error:
            if not self._started:
                raise
            told = error if isinstance(error, RequestError) else RequestError(500, "an internal error")
            scope["state"][ENDED_BY] = _CAUSES.get(told.code or "", "an error")
            async with asyncio.timeout(_LAST_WORD_S):
                await self._send(send, told.body)
                await send({"type": "http.response.body", "body": b""})
            if told is not error:
                raise

    async def _events(self, send: Send) -> None:
        opened: set[int] = set()
        lock = asyncio.Lock()  # events of one answer stay in order, and start before all

        async def emit(index: int, piece: Piece, finish_reason: str | None) -> None:
            async with lock:
                opening = None if index in opened else self._form.opening(index)
                opened.add(index)
                if opening is not None:
                    await self._send(send, opening)
                await self._send(send, self._form.chunk(index, piece, finish_reason))

        await self._generation.run(emit)
        if self.includes_usage:
            await self._send(send, self._form.usage_chunk(self._generation.usage))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _send(self, send: Send, event: dict[str, Any]) -> None:
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": list(_STREAM_HEADERS)})
        body = b"data: " + json_bytes(event) + b"\n\n"
        await send({"type": "http.response.body", "body": body, "more_body": True})


async def before[T](deadline: float, work: Awaitable[T], error: RequestError | None = None) -> T:
    """What `work` returns; an error where the loop's clock shows `deadline` before.

    `error`: what is raised then; None for the error of an answer that is not complete.
    """
    try:
        async with asyncio.timeout_at(deadline):
            return await work
    except TimeoutError:
        message = "the answer was not complete within the server's time limit for a request"
        raise error or RequestError(504, message, code="timeout") from None


async def until_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Do `work`, whose request was read; cancel it where the client goes away. Returns whether it is done."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
    finally:
        is_left = not working.done()
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
    if not is_left:
        working.result()
    return not is_left


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
