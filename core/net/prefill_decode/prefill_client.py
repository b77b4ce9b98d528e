"""A decode engine's connection to its prefill worker, which is made anew whenever the worker is lost."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]

from ..message_sockets import Address, Link, PeerLostError
from ..transfer.hand_over import TransferChannel
from ..transfer.placement import PrefixCounts
from . import prefill_messages as messages
from .prefill_messages import Answer, Cancel, Computed, EngineCall, Hello, Prefill, connected_channel

logger = logging.getLogger(__name__)

FIRST_RETRY_S, LONGEST_RETRY_S = 0.2, 30.0
"""How long after a loss the worker is looked for again; each loss doubles the time, a hand-over ends that."""

_POLL_S = 0.1  # between two looks whether the worker's connection is there


@dataclass(frozen=True)
class RemotePrefill:
    """What became of a prompt that a prefill worker was asked to compute.

    Attributes:
        imported: what was written into the decode engine's cache; what it held already was not sent.
        bytes: what the worker sent.
        prefill_s: seconds from the question until the worker had computed the prompt.
        hand_over_s: seconds from then until the prefix was in the decode engine's cache.
        failure: why the prefix was not imported; empty where it was.
    """

    imported: PrefixCounts = field(default_factory=PrefixCounts)
    bytes: int = 0
    prefill_s: float = 0.0
    hand_over_s: float = 0.0
    failure: str = ""


class _Pending(NamedTuple):
    """A question that is not answered yet; `asked_s` is by `time.perf_counter`."""

    answer: "asyncio.Future[RemotePrefill]"
    asked_s: float

    def resolve(self, answer: RemotePrefill) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)


class PrefillClient:
    """Asks one prefill worker for prefixes, and imports what it sends."""

    def __init__(
        self, call: EngineCall, store: Store, name: str, *, silence_s: float, hand_over_timeout_s: float
    ) -> None:
        """`call` calls a function in the decode engine's thread, between two steps."""
        self.connected = asyncio.Event()
        self._call = call
        self._store = store
        self._key = messages.address_key(name)
        self._silence_s = silence_s
        self._timeout_s = hand_over_timeout_s
        self._prefill_ids = count()
        self._pending: dict[int, _Pending] = {}
        self._link: Link | None = None
        self._absence = "it was not found yet"
        self._retry_s = FIRST_RETRY_S

    async def run(self) -> None:
        """Keep a connection until the task is cancelled."""
        while True:
            reason = "the connection is closed"
            try:
                async with self._connection() as (link, channel):
                    while True:
                        await self._handle(await self._next_answer(link), channel)
            except Exception as lost:  # also of the store, or of the engine's thread
                reason = str(lost)
                unforeseen = None if isinstance(lost, PeerLostError) else lost
                logger.warning("mambaslots: the prefill worker is lost: %s", lost, exc_info=unforeseen)
            finally:
                self._link, self._absence = None, reason
                self.connected.clear()
                self.give_up(reason)
            await asyncio.sleep(self._retry_s)
            self._retry_s = min(2 * self._retry_s, LONGEST_RETRY_S)

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[tuple[Link, TransferChannel]]:
        while not await asyncio.to_thread(self._store.check, [self._key]):
            await asyncio.sleep(FIRST_RETRY_S)
        text = await asyncio.to_thread(self._store.get, self._key)
        try:
            address = Address.from_bytes(text)
        except ValueError as error:
            raise PeerLostError(f"the store has no address of it: {error}") from error
        name = f"{self._key}/{secrets.token_hex(16)}"
        async with (
            connected_channel(self._call, self._store, name, "destination", self._timeout_s) as channel,
            self._linked(address) as link,
        ):
            link.send(Hello(messages.PROTOCOL_VERSION, name))
            first = await self._next_answer(link)
            if not isinstance(first, messages.Beat):
                reason = getattr(first, "reason", "it sent another answer")
                raise PeerLostError(f"it does not serve: {reason}")
            self._link = link
            self.connected.set()
            yield link, channel

    @asynccontextmanager
    async def _linked(self, address: Address) -> AsyncIterator[Link]:
        connect = partial(Link, address, Answer, self._silence_s, silence_s=self._silence_s)
        connecting = asyncio.get_running_loop().run_in_executor(None, connect)
        try:
            yield await asyncio.shield(connecting)
        finally:
            connecting.add_done_callback(_close)  # also where this task was cancelled meanwhile

    def give_up(self, reason: str) -> None:
        """Answer every question with the failure; each one is cancelled at the worker, too."""
        for pending in self._pending.values():
            pending.resolve(RemotePrefill(failure=reason))

    async def _next_answer(self, link: Link) -> Answer:
        """The worker's next message, at most `silence_s` after the last one."""
        deadline = time.monotonic() + self._silence_s
        while (received := link.receive(0.0)) is None:
            if time.monotonic() > deadline:
                raise PeerLostError(f"it sent nothing for {self._silence_s:g} s")
            await link.await_message(_POLL_S)
        answer: Answer = received[0]
        return answer

    async def _handle(self, answer: Answer, channel: TransferChannel) -> None:
        if isinstance(answer, Computed):
            computed_s = time.perf_counter()
            report = await self._call(lambda engine: channel.receive())
            if report.failure:
                raise PeerLostError(report.failure)
            self._retry_s = FIRST_RETRY_S
            if (pending := self._pending.pop(answer.prefill_id, None)) is not None:  # None: it was cancelled
                failure = ""
                if report.other_key.prefixes:
                    failure = "the prefill worker hashes salts under another key"
                elif report.left_out.states:
                    failure = "the cache has no room for it"
                took_s = computed_s - pending.asked_s, time.perf_counter() - computed_s
                pending.resolve(RemotePrefill(report.imported, channel.num_bytes, *took_s, failure))
        elif isinstance(answer, messages.Refused):
            if (pending := self._pending.pop(answer.prefill_id, None)) is not None:
                pending.resolve(RemotePrefill(failure=f"the prefill worker refuses: {answer.reason}"))
        elif isinstance(answer, messages.End):
            raise PeerLostError(answer.reason)

    async def prefill(self, tokens: list[int], salt: bytes | None) -> RemotePrefill:
        """Let the worker compute a prefix, and import it; cancelling the task cancels that, too."""
        link = self._link
        prefill_id = next(self._prefill_ids)
        if link is None:
            return RemotePrefill(failure=f"the prefill worker is not connected: {self._absence}")
        answer: asyncio.Future[RemotePrefill] = asyncio.get_running_loop().create_future()
        self._pending[prefill_id] = _Pending(answer, time.perf_counter())
        try:
            link.send(Prefill(prefill_id, tokens, salt))
            return await answer
        except PeerLostError as lost:  # `run` finds that, too
            return RemotePrefill(failure=str(lost))
        finally:
            if self._pending.pop(prefill_id, None) is not None:
                with suppress(PeerLostError):
                    link.send(Cancel(prefill_id))


def _close(connecting: "asyncio.Future[Link]") -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().close()
