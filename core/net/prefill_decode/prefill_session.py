"""What one decode engine asks of a prefill worker."""

import asyncio
import math
from typing import Any

from ...inference.engines.async_engine import AsyncEngine
from ...validation import instance, integer, integers
from ..transfer.hand_over import TransferChannel
from .message_stream import MessageStream, PeerLostError
from .prefix_computer import PrefixComputer, PrefixLostError
from .prompt_room import PromptRoom

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
