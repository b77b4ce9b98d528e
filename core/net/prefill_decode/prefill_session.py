"""What one decode engine asks of a prefill worker."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from ...inference.engines.async_engine import AsyncEngine
from ...validation import instance, integer, integers
from ..transfer.hand_over import TransferChannel
from .message_stream import MessageStream, PeerLostError
from .prefix_computer import PrefixComputer, PrefixLostError


class PromptRoom:
    """Lets prompts begin in the order of their arrival, each once its KV blocks fit beside the others'.

    A prompt is under way until its prefix is handed over. Until then its blocks and its state are held, so
    prompts that do not fit together must not begin together. Blocks that prompts share are counted for each.
    """

    def __init__(self, num_blocks: int, num_prompts: int) -> None:
        """
        Args:
            num_blocks: KV blocks for all prompts together.
            num_prompts: the most prompts under way.
        """
        self.num_blocks = num_blocks
        self._free_blocks = num_blocks
        self._free_prompts = num_prompts
        self._head = asyncio.Lock()  # is given in the order in which it was asked for
        self._left = asyncio.Event()

    @asynccontextmanager
    async def prompt(self, num_blocks: int) -> AsyncIterator[None]:
        """Inside, a prompt of so many blocks, at most `num_blocks` of the room, is under way."""
        async with self._head:
            while self._free_blocks < num_blocks or not self._free_prompts:
                self._left.clear()
                await self._left.wait()
            self._free_blocks -= num_blocks
            self._free_prompts -= 1
        try:
            yield
        finally:
            self._free_blocks += num_blocks
            self._free_prompts += 1
            self._left.set()


SaltedPrefix = tuple[list[int], bytes | None]
"""The tokens of a prefix, and its salt."""
SEND_TIMEOUT_S = 10.0
"""A peer that reads nothing for so long is lost."""


class PrefillSession:
    """What one decode engine asks for.

    Messages from it are {"prefill": number, "tokens": [...], "salt": hexadecimal digits or null} and
    {"cancel": number}. Messages to it, for each number: {"computed": number} just before the prefix is sent
    over the channel, and {"sent": number, "bytes": ...} behind it; or {"refused": number, "why": ...}.
    """

    def __init__(
        self,
        server: AsyncEngine,
        computer: PrefixComputer,
        room: PromptRoom,
        block_size: int,
        stream: MessageStream,
        channel: TransferChannel,
    ) -> None:
        self._server, self._computer, self._room = server, computer, room
        self._block_size, self._stream, self._channel = block_size, stream, channel
        self._sending = asyncio.Lock()
        self._computing: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Serve until the peer is lost, which raises a group with a PeerLostError."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                message = await self._stream.receive()
                try:
                    if "cancel" in message:
                        computing = self._computing.get(integer("cancel", message["cancel"]))
                        if computing is not None:
                            computing.cancel()
                    else:
                        number, prefix = _asked(message)
                        if number in self._computing:
                            raise ValueError(f"prefill is {number}; accepted: a number that is not under way")
                        self._computing[number] = tasks.create_task(self._prefill(number, prefix))
                except (KeyError, ValueError) as error:
                    raise PeerLostError(f"it asks for what is no prefix: {error}") from error

    async def _prefill(self, number: int, prefix: SaltedPrefix) -> None:
        """Compute a prefix and send it."""
        try:
            blocks = min(self._room.num_blocks, math.ceil(len(prefix[0]) / self._block_size) + 1)
            async with self._room.prompt(blocks), self._computer.computed(*prefix), self._sending:
                del self._computing[number]  # it is not cancelled any more: the peer takes what comes
                await self._send(number, prefix)
        except (ValueError, PrefixLostError) as error:
            await self._tell({"refused": number, "why": str(error)})
        finally:
            self._computing.pop(number, None)

    async def _send(self, number: int, prefix: SaltedPrefix) -> None:
        await self._tell({"computed": number})
        try:
            report = await self._server.call(lambda engine: self._channel.send([prefix], states="deepest"))
        except ValueError as error:  # of an engine that can hand nothing over
            raise PeerLostError(str(error)) from error
        if report.failure:
            raise PeerLostError(f"a prefix did not reach it: {report.failure}")
        await self._tell({"sent": number, "bytes": report.bytes})

    async def _tell(self, message: dict[str, Any]) -> None:
        await self._stream.send(message, SEND_TIMEOUT_S)


def _asked(message: dict[str, Any]) -> tuple[int, SaltedPrefix]:
    """The number of a request and the prefix that it asks for; KeyError or ValueError for anything else."""
    salt = message["salt"]
    tokens = integers("tokens", message["tokens"], 0)
    salt = None if salt is None else bytes.fromhex(instance("salt", salt, str))
    return integer("prefill", message["prefill"], 0), (tokens, salt)
