"""What the endpoints share: requests become answers of the engine, within the server's limits."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from email.message import Message

from starlette.requests import Request

from ..errors import NoReplicaError
from ..loaded_model import LoadedText
from .answer_json import AnswerFormat
from .api_keys import engine_salt
from .error_answers import RequestError, bad_field, refusal
from .generated_answer import GeneratedAnswer, StreamedAnswer, within
from .jobs import Job, JobFactory
from .served_engine import ServedEngine
from .server_settings import ServerSettings

_LONGEST_STEP_S = 30.0
_LONG_BODY_BYTES = 2**18
_MAX_READ_BYTES = 64 * 2**20  # of a body that is too long so much is read before it is refused


class Service:
    """Admits requests to the engine; bodies are parsed and prompts encoded in two worker threads."""

    def __init__(self, engine: ServedEngine, loaded: LoadedText, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        facts = engine.facts
        longest = max(2 * 2**20, 2**20 + 16 * facts.max_sequence_length)  # as token ids or as text
        self.max_body_bytes = settings.max_body_bytes or longest  # while JSON is parsed, no other thread runs
        self.job_factory = JobFactory(facts, loaded, settings)
        self.is_draining = False
        self._codec = loaded.text
        self._text_thread = ThreadPoolExecutor(1, "mambaslots-text")
        self._long_text_thread = ThreadPoolExecutor(1, "mambaslots-long-text")
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
        for thread in (self._text_thread, self._long_text_thread):
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
        self, request: Request, job_of: Callable[[bytes, str | None], Job], answer_format: type[AnswerFormat]
    ) -> GeneratedAnswer:
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
            body = await within(body_deadline, _read_body(request, self.max_body_bytes), _body_too_slow())
            salt = _header_salt(request)
            tenant = request.state.tenant
            thread = self._long_text_thread if len(body) > _LONG_BODY_BYTES else self._text_thread
            job = await within(deadline, loop.run_in_executor(thread, job_of, body, salt))
            if self._num_open + len(job.choices) - 1 > self._max_open:
                raise refusal("queue_full")
            self._num_open += len(job.choices) - 1
            num_answers = len(job.choices)
            answer_class = StreamedAnswer if job.request.stream else GeneratedAnswer
            return answer_class(
                self.engine, self._codec, job, tenant,
                engine_salt(tenant, job.request.cache_salt, bool(self.settings.api_keys)),
                answer_format(self.settings.model_name, job.request), deadline,
                lambda: self._end_answers(num_answers),
            )  # fmt: skip
        except BaseException:
            self._end_answers(num_answers)
            raise

    def _end_answers(self, num_answers: int) -> None:
        self._num_open -= num_answers
        if not self._num_open:
            self._none_open.set()


async def _read_body(request: Request, max_bytes: int) -> bytes:
    """The body of a request; RequestError where it is no JSON (415) or longer than `max_bytes` (413)."""
    content = Message()
    content["content-type"] = request.headers.get("content-type", "")
    is_utf8 = content.get_content_charset("utf-8") in ("utf-8", "utf8")
    if content.get_content_type() != "application/json" or not is_utf8:
        raise RequestError(415, "the header Content-Type names another type; accepted: application/json")
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise RequestError(415, "the header Content-Encoding names an encoding; accepted: none")
    max_read_bytes = max(max_bytes, _MAX_READ_BYTES)
    num_bytes = int(request.headers.get("content-length", "0"))  # uvicorn refuses all but numbers
    parts: list[bytes] = []
    if num_bytes <= max_read_bytes:
        num_bytes = 0
        async for part in request.stream():  # to the end, so that the client reads the answer
            num_bytes += len(part)
            if num_bytes <= max_bytes:
                parts.append(part)
            elif num_bytes > max_read_bytes:
                break
    if num_bytes <= max_bytes:
        return b"".join(parts)
    message = f"the body is longer than the limit of {max_bytes} bytes"
    headers = {"connection": "close"} if num_bytes > max_read_bytes else {}
    raise RequestError(413, message, code="body_too_long", headers=headers)


def _body_too_slow() -> RequestError:
    """The connection is closed, because the rest of the body may never come."""
    message = "the body was not complete within the server's time limit for a body"
    return RequestError(408, message, code="timeout", headers={"connection": "close"})


def _header_salt(request: Request) -> str | None:
    values = [value for name, value in request.headers.raw if name == b"x-cache-salt"]
    if not values:
        return None
    try:
        return b",".join(values).decode()
    except UnicodeDecodeError:
        raise bad_field("X-Cache-Salt", "the header X-Cache-Salt is no UTF-8") from None
