"""A decode engine's connection to its prefill worker, which is made anew whenever the worker is lost."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from ...validation import instance, integer
from ..transfer.hand_over import TransferChannel
from ..transfer.import_ import ImportReport, PrefixCounts
from .engine_channel import EngineCall, connect, engine_channel
from .message_stream import MessageStream, PeerLostError
from .prefill_worker import address_key

logger = logging.getLogger(__name__)

FIRST_RETRY_S, LONGEST_RETRY_S = 0.2, 30.0
"""How long after a loss the worker is looked for again; each loss doubles the time, a hand-over ends that."""
_SEND_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class RemotePrefill:
    """What became of a prompt that a prefill worker was asked to compute.

    Attributes:
        imported: what was written into the decode engine's cache; what it held already was not sent.
        bytes: what the worker sent.
        prefill_s: seconds from the question until the worker had computed the prompt.
        hand_over_s: seconds from then until the prefix was in the decode engine's cache.
        failure: why the prefix did not come; empty where it did.
    """

    imported: PrefixCounts = field(default_factory=PrefixCounts)
    bytes: int = 0
    prefill_s: float = 0.0
    hand_over_s: float = 0.0
    failure: str = ""


@dataclass(eq=False)
class _Pending:
    """A question that is not answered yet.

    `answer`: the loop's future. `asked_s`, `computed_s`: when these happened, by `time.perf_counter`.
    """

    answer: "asyncio.Future[RemotePrefill]"
    asked_s: float = field(default_factory=time.perf_counter)
    computed_s: float = 0.0
    report: ImportReport | None = None
    received_s: float = 0.0


class PrefillClient:
    """Asks one prefill worker for prefixes, and imports what it sends."""

    def __init__(
        self, call: EngineCall, store: Store, name: str, *, silence_s: float, hand_over_timeout_s: float
    ) -> None:
        """
        Args:
            call: calls a function in the decode engine's thread, between two steps.
            store, name: as for the `PrefillWorker`.
            silence_s: a worker that says nothing for so long is lost.
            hand_over_timeout_s: for one hand-over, while which the decode engine makes no step.
        """
        self.connected = asyncio.Event()
        self._call = call
        self._store = store
        self._key = address_key(name)
        self._silence_s = silence_s
        self._timeout_s = hand_over_timeout_s
        self._numbers = count()
        self._pending: dict[int, _Pending] = {}
        self._stream: MessageStream | None = None
        self._absence = "it has not come yet"
        self._retry_s = FIRST_RETRY_S

    async def run(self) -> None:
        """Keep a connection until the task is cancelled."""
        while True:
            reason = "the connection is closed"
            try:
                async with self._connection() as (stream, channel):
                    await self._listen(stream, channel)
            except PeerLostError as lost:
                reason = str(lost)
                logger.warning("mambaslots: the prefill worker is lost: %s", lost)
            except Exception as failed:  # of the store, or of the engine's thread
                reason = str(failed)
                logger.warning("mambaslots: the prefill worker is lost", exc_info=failed)
            finally:
                self._forget(reason)
            await asyncio.sleep(self._retry_s)
            self._retry_s = min(2 * self._retry_s, LONGEST_RETRY_S)

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[tuple[MessageStream, TransferChannel]]:
        while not await asyncio.to_thread(self._store.check, [self._key]):
            await asyncio.sleep(FIRST_RETRY_S)
        text = await asyncio.to_thread(self._store.get, self._key)
        try:
            address = json.loads(text)
            host, port = instance("host", address["host"], str), integer("port", address["port"], 1, 65535)
            hello = {"secret": address["secret"]}
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise PeerLostError(f"the store has no address of it: {error!r}") from error
        stream = await MessageStream.connect(host, port, self._silence_s)
        try:
            await stream.send(hello, _SEND_TIMEOUT_S)
            name = (await self._next(stream)).get("channel")
            if not isinstance(name, str):
                raise PeerLostError("it names no channel")
            async with engine_channel(
                self._call, self._store, name, "destination", self._timeout_s
            ) as channel:
                await stream.send({"connect": True}, _SEND_TIMEOUT_S)
                await connect(self._call, channel)
                self._stream = stream
                self.connected.set()
                yield stream, channel
        finally:
            stream.close()

    def _forget(self, reason: str) -> None:
        """Answer every question with the failure, and let nobody ask."""
        self._stream, self._absence = None, reason
        self.connected.clear()
        pending, self._pending = self._pending, {}
        for one in pending.values():
            _resolve(one, RemotePrefill(failure=reason))

    async def _next(self, stream: MessageStream) -> dict[str, Any]:
        """The worker's next message that is no beat."""
        while "beat" in (message := await stream.receive(self._silence_s)):
            pass
        return message

    async def _listen(self, stream: MessageStream, channel: TransferChannel) -> None:
        while True:
            message = await self._next(stream)
            try:
                await self._hear(message, channel)
            except ValueError as error:
                raise PeerLostError(f"it answers what is no answer: {error}") from error

    async def _hear(self, message: dict[str, Any], channel: TransferChannel) -> None:
        if "computed" in message:
            # Whoever asked may have gone: the worker sends all the same.
            one = self._pending.get(integer("computed", message["computed"]))
            computed_s = time.perf_counter()
            report = await self._call(lambda engine: channel.receive())
            if report.failure:
                raise PeerLostError(report.failure)
            self._retry_s = FIRST_RETRY_S
            if one is not None:
                one.report, one.computed_s, one.received_s = report, computed_s, time.perf_counter()
        elif "sent" in message:
            number, num_bytes = integer("sent", message["sent"]), integer("bytes", message.get("bytes"), 0)
            one = self._pending.get(number)
            if one is not None:
                if one.report is None:  # `_forget` answers what is pending
                    raise PeerLostError("it says that it has sent what did not come")
                del self._pending[number]
                _resolve(one, _described(one, one.report, num_bytes))
        elif "refused" in message:
            one = self._pending.pop(integer("refused", message["refused"]), None)
            if one is not None:
                _resolve(one, RemotePrefill(failure=f"the prefill worker refuses: {message.get('why')}"))
        else:
            raise PeerLostError("it answers what is no answer")

    async def prefill(self, tokens: list[int], salt: bytes | None) -> RemotePrefill:
        """Let the worker compute a prefix, and import it. Cancelling the task tells the worker.

        A failure raises nothing.
        """
        stream, number = self._stream, next(self._numbers)
        if stream is None:
            return RemotePrefill(failure=f"the prefill worker is not connected: {self._absence}")
        one = self._pending[number] = _Pending(asyncio.get_running_loop().create_future())
        try:
            digits = None if salt is None else salt.hex()
            await stream.send({"prefill": number, "tokens": tokens, "salt": digits}, _SEND_TIMEOUT_S)
            return await one.answer
        except PeerLostError as lost:
            stream.close()  # so that `run` notices
            return RemotePrefill(failure=str(lost))
        finally:
            if self._pending.pop(number, None) is not None:
                with suppress(PeerLostError):
                    await stream.send({"cancel": number}, _SEND_TIMEOUT_S)


def _described(one: _Pending, report: ImportReport, num_bytes: int) -> RemotePrefill:
    failure = ""
    if report.other_key.prefixes:
        failure = "the prefill worker hashes salts under another key"
    elif report.left_out.states:
        failure = "the cache has no room for it"
    return RemotePrefill(
        report.imported, num_bytes, one.computed_s - one.asked_s, one.received_s - one.computed_s, failure
    )


def _resolve(one: _Pending, answer: RemotePrefill) -> None:
    if not one.answer.done():
        one.answer.set_result(answer)
