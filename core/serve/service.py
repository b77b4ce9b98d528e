"""What the endpoints share: the engine, the work on text, and what the server takes."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from starlette.requests import Request

from ..errors import NoReplicaError
from ..loaded_model import LoadedModel, LoadedText
from .answers import Form
from .errors import RequestError, bad_field
from .generation import Generation, dead, draining, no_replica, queue_full
from .json_body import body_too_slow, parsed_object, read_body
from .keys import engine_salt
from .options import MAX_CHOICES
from .preparation import Job, Preparation
from .requests import Reader
from .responses import GeneratedAnswer, StreamedAnswer, before
from .served_engine import ServedEngine
from .settings import ServerSettings
from .tools_check import ToolsCheck

T = TypeVar("T")
SALT_HEADER = "x-cache-salt"
_LONGEST_STEP_S = 30.0
_LONG_BODY_BYTES = 2**18


class Service:
    """Takes requests for whatever generates answers.

    Bodies are parsed, and prompts encoded, in threads beside the event loop. Long bodies have a thread of
    their own, so that short ones do not wait for them. Python's parser of JSON lets no other thread run, not
    the event loop and not the engine's: `max_body_bytes` bounds how long all streams stop for a body.

    Attributes:
        engine: serves the prompts.
        loaded, settings: what the server was made with.
        max_body_bytes: longest body of a request.
        reader: reads bodies.
        preparation: makes jobs of them.
        is_draining: whether new requests are refused.
    """

    def __init__(
        self, engine: ServedEngine, loaded: LoadedModel | LoadedText, settings: ServerSettings
    ) -> None:
        self.engine = engine
        self.loaded = loaded
        self.settings = settings
        facts = engine.facts
        self.max_body_bytes = settings.max_body_bytes or _longest_body(facts.max_sequence_length)
        max_choices = min(MAX_CHOICES, settings.max_waiting_requests)
        self.reader = Reader(settings.model_name, facts.vocab_size, max_choices)
        self.preparation = Preparation(facts, loaded, max_choices)
        self.is_draining = False
        self._tools_check = ToolsCheck(loaded.text)
        self._text_threads = [ThreadPoolExecutor(1, f"mambaslots-{name}") for name in ("text", "long-text")]
        self._num_open = 0
        self._none_open = asyncio.Event()

    # ---- its life

    async def drain(self) -> bool:
        """Refuse new requests and wait for the others. Returns whether all came to their own end.

        What runs after `settings.drain_timeout_s` is cancelled.
        """
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
        """Cancel what runs, and end the threads. A step that hangs is left alone after some seconds."""
        self.is_draining = True
        await self.engine.close(_LONGEST_STEP_S)
        for thread in self._text_threads:
            thread.shutdown(wait=False, cancel_futures=True)

    @property
    def trouble(self) -> RequestError | None:
        """Why no request is taken; None where requests are taken."""
        failure = self.engine.failure
        if failure is not None and not isinstance(failure, NoReplicaError):
            return dead()
        if self.is_draining:
            return draining()
        return None if failure is None else no_replica()

    @property
    def _max_open(self) -> int:
        """Answers that may be open: those that run, and those that wait."""
        return self.settings.max_waiting_requests + self.engine.max_running

    # ---- requests

    async def answer(
        self,
        request: Request,
        tenant: str,
        job_of: Callable[[bytes, str | None], Job],
        form_of: Callable[[str, Job], Form],
    ) -> GeneratedAnswer:
        """The response to a request; it generates its answer when it is sent.

        Args:
            request: its body is not read yet.
            tenant: whose request it is.
            job_of: makes a job of the body and of the salt in the header; runs in the thread for text.
            form_of: makes the form of the answer.

        Raises:
            RequestError: the request is not taken.
        """
        if self.trouble is not None:
            raise self.trouble
        if self._num_open >= self._max_open:
            raise queue_full()  # before its body costs memory
        self._num_open += 1
        num_answers = 1
        try:
            arrival = asyncio.get_running_loop().time()
            deadline = arrival + self.settings.request_timeout_s
            body_deadline = min(deadline, arrival + self.settings.body_timeout_s)
            reading = read_body(request, self.max_body_bytes)
            body = await before(body_deadline, reading, body_too_slow())
            header_salt = _header_salt(request)
            job = await before(deadline, self._beside_the_loop(len(body), lambda: job_of(body, header_salt)))
            if self._num_open + len(job.choices) - 1 > self._max_open:
                raise queue_full()
            self._num_open += len(job.choices) - 1
            num_answers = len(job.choices)
            salt = engine_salt(tenant, job.options.cache_salt, bool(self.settings.api_keys))
            generation = Generation(self.engine, self.loaded.text, job, salt, tenant)
            kind = StreamedAnswer if job.options.streams else GeneratedAnswer
            form = form_of(self.settings.model_name, job)
            end = partial(self._end_answers, num_answers)
            answer = kind(generation, form, num_answers, deadline, end)
        except BaseException:
            self._end_answers(num_answers)
            raise
        if isinstance(answer, StreamedAnswer):
            answer.includes_usage = job.options.includes_usage
        return answer

    def completion_job(self, body: bytes, header_salt: str | None) -> Job:
        """The job of a body of /v1/completions."""
        return self.preparation.completion(self.reader.completion(parsed_object(body), header_salt))

    def chat_job(self, body: bytes, header_salt: str | None) -> Job:
        """The job of a body of /v1/chat/completions."""
        request = self.reader.chat(parsed_object(body), header_salt)
        job = self.preparation.chat(request)
        self._tools_check.note(request.chat)
        return job

    async def _beside_the_loop(self, num_bytes: int, work: Callable[[], T]) -> T:
        thread = self._text_threads[num_bytes > _LONG_BODY_BYTES]
        return await asyncio.get_running_loop().run_in_executor(thread, work)

    def _end_answers(self, num_answers: int) -> None:
        self._num_open -= num_answers
        if not self._num_open:
            self._none_open.set()


def _longest_body(max_sequence_length: int) -> int:
    """Bytes for a prompt of so many tokens, as token ids or as text, and for what stands beside it."""
    return max(2 * 2**20, 2**20 + 16 * max_sequence_length)


def _header_salt(request: Request) -> str | None:
    values = [value for name, value in request.headers.raw if name == SALT_HEADER.encode()]
    if not values:
        return None
    try:
        return b",".join(values).decode()
    except UnicodeDecodeError:
        raise bad_field("X-Cache-Salt", "the header X-Cache-Salt is no UTF-8") from None
