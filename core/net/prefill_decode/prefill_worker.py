"""An engine that computes prompts for others, and hands their prefixes over."""

import asyncio
import json
import logging
import secrets
from contextlib import suppress
from functools import partial
from itertools import count

from torch.distributed import Store  # type: ignore[attr-defined]

from ...inference.engines.async_engine import AsyncEngine
from ...inference.engines.dynamic_engine import DynamicInferenceEngine
from ...validation import LONGEST_TIMEOUT_S, instance, real, shown
from .engine_channel import check_engine, connect, engine_channel
from .message_stream import MAX_LINE_BYTES, MessageStream, PeerLostError
from .prefill_session import SEND_TIMEOUT_S, PrefillSession, PromptRoom
from .prefix_computer import PrefixComputer

logger = logging.getLogger(__name__)

BEAT_S = 0.5
"""How often a worker says that its engine goes on."""
_HELLO_TIMEOUT_S = 10.0


def address_key(name: str) -> str:
    """Where in the store a prefill worker writes how it is reached."""
    return f"mambaslots/prefill/{checked_name(name)}"


def checked_name(name: str) -> str:
    """The name of a prefill worker; ValueError for what is none."""
    if not isinstance(name, str) or not name or not name.isprintable():
        raise ValueError(f"name is {shown(name)}; accepted: a printable str that names the prefill worker")
    return name


class PrefillWorker:
    """Serves `DisaggregatedEngine`s: it computes their prompts and hands the prefixes over.

    Prompts are batched as in any engine. From the step that completes a prompt until its prefix is handed
    over, its state and its KV blocks are pinned; a prompt begins only once its blocks fit beside those of the
    prompts under way. The prefixes stay cached, so later prompts resume here, too.

        asyncio.run(msd.PrefillWorker(engine, store).serve())

    Whoever can read the store can connect. Prompts and salts travel over the connection as they are.
    """

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        store: Store,
        name: str = "prefill",
        *,
        host: str = "127.0.0.1",
        hand_over_timeout_s: float = 3.0,
    ) -> None:
        """
        Args:
            engine: caches prefixes and has a `weights_version`; one process serves its model.
            store: a client of a store that outlives the engines, as for `send_prefixes`.
            name: by which decode engines find this worker in the store.
            host: address of this machine by which decode engines reach it; the worker listens on it.
            hand_over_timeout_s: a decode engine that does not take a prefix within this time, in seconds,
                is lost. The engine makes no step while it waits.

        Raises:
            ValueError: a bad argument, or an engine without prefix caching.
        """
        self._engine = instance("engine", engine, DynamicInferenceEngine)
        check_engine(engine)
        self._store = instance("store", store, Store)
        self._key = address_key(name)
        self._name = name
        self._host = instance("host", host, str)
        self._timeout_s = real("hand_over_timeout_s", hand_over_timeout_s, 1e-3, LONGEST_TIMEOUT_S)
        self._secret = secrets.token_hex(16)
        self._numbers = count()
        self._sessions: dict[asyncio.Task[None], MessageStream] = {}
        cache, size = engine.context.prefix_cache, engine.config.block_size_tokens
        self._room = PromptRoom(cache.kv_blocks.total_count, max(1, cache.pins.max_slots))
        self._block_size = size

    async def serve(self) -> None:
        """Serve until the task is cancelled.

        Raises:
            OSError: the worker cannot listen on `host`.
            EngineDeadError: the engine's thread has given up.
            RuntimeError: the store was lost, as torch says it.
        """
        async with AsyncEngine(self._engine) as server:
            computer = PrefixComputer(server, self._engine)
            listener = await asyncio.start_server(
                partial(self._accept, server, computer), self._host, 0, limit=MAX_LINE_BYTES
            )
            try:
                port = listener.sockets[0].getsockname()[1]
                address = json.dumps({"host": self._host, "port": port, "secret": self._secret})
                await asyncio.to_thread(self._store.set, self._key, address)
                while True:
                    await server.call(_nothing)  # returns once the engine is between two steps
                    for stream in list(self._sessions.values()):
                        with suppress(PeerLostError):  # its session notices, too
                            await stream.send({"beat": True}, SEND_TIMEOUT_S)
                    await asyncio.sleep(BEAT_S)
            finally:
                listener.close()
                for task in self._sessions:
                    task.cancel()
                await asyncio.gather(*self._sessions, return_exceptions=True)

    def _accept(
        self,
        server: AsyncEngine,
        computer: PrefixComputer,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Begin a session with whoever connects."""
        stream = MessageStream(reader, writer)
        task = asyncio.get_running_loop().create_task(self._serve_peer(server, computer, stream))
        self._sessions[task] = stream
        task.add_done_callback(self._sessions.pop)

    async def _serve_peer(self, server: AsyncEngine, computer: PrefixComputer, stream: MessageStream) -> None:
        """Serve one decode engine until it is lost."""
        try:
            hello = await stream.receive(_HELLO_TIMEOUT_S)
            if not secrets.compare_digest(_text(hello.get("secret")), self._secret.encode()):
                raise PeerLostError("it does not know the secret in the store")
            name = f"{self._name}/{self._secret}/{next(self._numbers)}"
            async with engine_channel(server.call, self._store, name, "source", self._timeout_s) as channel:
                await stream.send({"channel": name}, SEND_TIMEOUT_S)
                if "connect" not in await stream.receive(_HELLO_TIMEOUT_S):
                    raise PeerLostError("it does not connect")
                await connect(server.call, channel)
                session = PrefillSession(server, computer, self._room, self._block_size, stream, channel)
                await session.serve()
        except* PeerLostError as lost:
            logger.info("mambaslots: a decode engine is gone: %s", lost.exceptions[0])
        except* Exception as failed:
            logger.warning("mambaslots: a decode engine is not served any more", exc_info=failed)
        finally:
            stream.close()


def _text(value: object) -> bytes:
    """What a peer says as bytes; JSON may hold half a surrogate pair, which UTF-8 does not."""
    return str(value).encode("utf-8", "backslashreplace")


def _nothing(engine: DynamicInferenceEngine) -> None:
    pass
