"""An engine that computes prompts for others, and hands their prefixes over."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress

from torch.distributed import Store  # type: ignore[attr-defined]

from ...errors import KVBlockCapacityError, MambaSlotCapacityError, QueueFullError
from ...inference.contexts.cache.pins import PinnedPrefix
from ...inference.engines.async_engine import AsyncEngine
from ...inference.engines.dynamic_engine import DynamicInferenceEngine
from ...params_and_results import SamplingParams
from ...validation import LONGEST_TIMEOUT_S, ceil_div, instance, real
from ..message_sockets import Listener, PeerLostError
from ..transfer.hand_over import TransferChannel
from . import prefill_messages as messages
from .prefill_messages import PROTOCOL_VERSION, Answer, Cancel, Computed, Hello, Prefill, Question

logger = logging.getLogger(__name__)

BEAT_S = 0.5  # how often a worker says that its engine makes steps
_MAX_COMPUTATIONS = 3  # of one prefix: its state may be evicted between its request's end and the pin


class PrefixLostError(RuntimeError):
    """A prefix was not computed, or its state was not cached."""


class PrefillWorker:
    """Serves `DisaggregatedEngine`s: it computes their prompts and hands the prefixes over.

    Prompts are batched as in any engine. From the step that completes a prompt until its prefix is handed
    over, its state and its KV blocks are pinned; a prompt begins only once its blocks fit with those of the
    prompts under way. The prefixes stay cached, so later prompts resume here, too.

        asyncio.run(msd.PrefillWorker(engine, store).serve())

    Only processes that can read the store can connect; connections are encrypted.
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
            store: a client of a store that outlives the engines, as for `TransferChannel`.
            name: by which decode engines find this worker in the store.
            host: address of this machine by which decode engines reach it; the worker listens on it.
            hand_over_timeout_s: a decode engine that does not take a prefix within this time, in seconds,
                is lost. The engine makes no step while it waits.

        Raises:
            ValueError: a bad argument, or an engine without prefix caching.
        """
        self._engine = instance("engine", engine, DynamicInferenceEngine)
        messages.check_engine(engine)
        self._store = instance("store", store, Store)
        self._key = messages.address_key(name)
        self._host = instance("host", host, str)
        self._timeout_s = real("hand_over_timeout_s", hand_over_timeout_s, 1e-3, LONGEST_TIMEOUT_S)
        context = engine.context
        num_prompts = max(1, context.prefix_cache.pins.max_slots)
        self._room = PromptRoom(context.admission.max_blocks, num_prompts, engine.config.block_size_tokens)

    async def serve(self) -> None:
        """Serve until the task is cancelled.

        Raises:
            OSError: the worker cannot listen on `host`.
            EngineDeadError: the engine's thread has given up.
            RuntimeError: the store was lost, as torch says it.
        """
        try:
            async with AsyncEngine(self._engine) as server:
                with closing(Listener(Question, hosts=(self._host,))) as listener:
                    address = listener.address.to_bytes().decode()
                    await asyncio.to_thread(self._store.set, self._key, address)
                    async with asyncio.TaskGroup() as sessions:
                        await self._serve_peers(server, listener, sessions)
        except ExceptionGroup as group:  # of the engine's thread: sessions raise nothing
            raise group.exceptions[0] from None

    async def _serve_peers(self, server: AsyncEngine, listener: Listener, tasks: asyncio.TaskGroup) -> None:
        sessions: dict[bytes, PrefillSession] = {}
        loop = asyncio.get_running_loop()
        beat_s = loop.time()
        while True:
            await listener.await_message(beat_s - loop.time())
            if (received := listener.receive(0.0)) is not None:
                peer, question, _ = received
                if isinstance(question, Hello) and peer not in sessions:
                    session = PrefillSession(server, self._room, self._store, listener, peer)
                    serving = tasks.create_task(session.serve(question, self._timeout_s))
                    serving.add_done_callback(lambda _, name=peer: sessions.pop(name))  # type: ignore[misc]
                    sessions[peer] = session
                elif peer in sessions:
                    sessions[peer].questions.put_nowait(question)
            if loop.time() >= beat_s:
                await server.call(lambda engine: None)  # returns once the engine is between two steps
                for session in list(sessions.values()):
                    session.beat()
                beat_s = loop.time() + BEAT_S


class PromptRoom:
    """Lets prompts begin in the order of their arrival, each once its KV blocks fit with the others'.

    A prompt's blocks and state are held until its prefix is handed over. Shared blocks are counted for each.
    """

    def __init__(self, num_blocks: int, num_prompts: int, block_size_tokens: int) -> None:
        """`num_blocks`: KV blocks for all prompts together; `num_prompts`: the most prompts under way."""
        self._num_blocks, self._block_size_tokens = num_blocks, block_size_tokens
        self._free_blocks = num_blocks
        self._free_prompts = num_prompts
        self._head = asyncio.Lock()  # is given in the order in which it was asked for
        self._room_freed = asyncio.Event()

    @asynccontextmanager
    async def prompt(self, num_tokens: int) -> AsyncIterator[None]:
        """Inside, a prompt of so many tokens is under way."""
        num_blocks = min(self._num_blocks, ceil_div(num_tokens, self._block_size_tokens) + 1)
        async with self._head:
            while self._free_blocks < num_blocks or not self._free_prompts:
                self._room_freed.clear()
                await self._room_freed.wait()
            self._free_blocks -= num_blocks
            self._free_prompts -= 1
        try:
            yield
        finally:
            self._free_blocks += num_blocks
            self._free_prompts += 1
            self._room_freed.set()


@asynccontextmanager
async def computed_prefix(server: AsyncEngine, tokens: list[int], salt: bytes | None) -> AsyncIterator[None]:
    """Compute a prefix of whole blocks, pinned inside; ValueError or PrefixLostError where that fails."""
    pins: list[PinnedPrefix] = []  # only the engine's thread touches it

    def unpin(engine: DynamicInferenceEngine) -> None:
        while pins:
            with suppress(ValueError):  # a reset has unpinned it
                engine.unpin(pins.pop())

    def pin(engine: DynamicInferenceEngine) -> str:
        """Why the whole prefix is not pinned; empty where it is."""
        try:
            pins.append(engine.pin(tokens, cache_salt=salt))
        except (ValueError, MambaSlotCapacityError) as error:  # nothing is cached, or pins have all slots
            return str(error)
        if (num_tokens := pins[-1].num_tokens) < len(tokens):
            unpin(engine)
            return f"{num_tokens} of {len(tokens)} tokens are cached"
        return ""

    try:
        computations = 0
        while missing := await server.call(pin):
            if computations == _MAX_COMPUTATIONS:
                raise PrefixLostError(f"its state is not cached: {missing}")
            await _compute(server, tokens, salt)
            computations += 1
        yield
    finally:
        with suppress(RuntimeError):  # an engine that is dead or closed keeps nothing
            await asyncio.shield(asyncio.ensure_future(server.call(unpin)))


async def _compute(server: AsyncEngine, tokens: list[int], salt: bytes | None) -> None:
    """Serve a request for one token, whose prefill stores the state after all `tokens`."""
    plan = await server.call(lambda engine: engine.config.checkpoint_plan.with_marks([len(tokens)]))
    try:
        once = SamplingParams(max_tokens=1)
        result = await server.generate(tokens, once, cache_salt=salt, checkpoint_plan=plan)
    except (KVBlockCapacityError, QueueFullError) as error:
        raise PrefixLostError(str(error)) from error
    if result.finish_reason not in ("length", "stop"):
        raise PrefixLostError(f"its request ended with {result.finish_reason!r}")


class PrefillSession:
    """What one decode engine asks for: `questions`, its messages after the first; None once it is gone."""

    def __init__(
        self, server: AsyncEngine, room: PromptRoom, store: Store, listener: Listener, peer: bytes
    ) -> None:
        self.questions: asyncio.Queue[Question | None] = asyncio.Queue()
        self._server, self._room, self._store = server, room, store
        self._listener, self._peer = listener, peer
        self._serves = False
        self._sending = asyncio.Lock()
        self._computing: dict[int, asyncio.Task[None]] = {}

    def beat(self) -> None:
        """Say that the engine makes steps; end the session where the peer is gone."""
        if not self._listener.is_connected(self._peer):
            self.questions.put_nowait(None)
        elif self._serves:
            with suppress(PeerLostError):  # the next beat finds it gone
                self._send(messages.Beat())

    async def serve(self, hello: Hello, timeout_s: float) -> None:
        """Serve until the peer is lost, or the task is cancelled."""
        reason = "the prefill worker ends"
        try:
            if hello.protocol != PROTOCOL_VERSION:
                raise PeerLostError(f"its protocol is {hello.protocol}; accepted: {PROTOCOL_VERSION}")
            async with messages.connected_channel(
                self._server.call, self._store, hello.channel, "source", timeout_s
            ) as channel:
                self._serves = True
                self._send(messages.Beat())
                await self.answer(channel)
        except* PeerLostError as lost:
            reason = str(lost.exceptions[0])
            logger.info("mambaslots: a decode engine is gone: %s", reason)
        except* Exception as failed:
            reason = str(failed.exceptions[0])
            logger.warning("mambaslots: a decode engine is not served any more", exc_info=failed)
        finally:
            with suppress(PeerLostError):
                self._send(messages.End(reason[:500]))

    async def answer(self, channel: TransferChannel) -> None:
        """Answer questions until the peer is lost, which raises a group with a PeerLostError."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                question = await self.questions.get()
                if isinstance(question, Cancel):
                    if (task := self._computing.get(question.prefill_id)) is not None:
                        task.cancel()
                elif isinstance(question, Prefill) and question.prefill_id not in self._computing:
                    self._computing[question.prefill_id] = tasks.create_task(self._prefill(question, channel))
                elif question is None:
                    raise PeerLostError("its connection is closed")
                else:
                    raise PeerLostError("it asks for what is no new prefix")

    async def _prefill(self, prefix: Prefill, channel: TransferChannel) -> None:
        """Compute a prefix and hand it over."""
        try:
            async with (
                self._room.prompt(len(prefix.tokens)),
                computed_prefix(self._server, prefix.tokens, prefix.salt),
                self._sending,
            ):
                del self._computing[prefix.prefill_id]  # it is not cancelled any more: the peer receives it
                self._send(Computed(prefix.prefill_id))
                try:
                    report = await self._server.call(lambda _: channel.send([(prefix.tokens, prefix.salt)]))
                except ValueError as error:  # of an engine that can hand nothing over
                    raise PeerLostError(str(error)) from error
                if report.failure:
                    raise PeerLostError(f"a prefix did not reach it: {report.failure}")
        except (ValueError, PrefixLostError) as error:
            self._send(messages.Refused(prefix.prefill_id, str(error)))
        finally:
            self._computing.pop(prefix.prefill_id, None)

    def _send(self, answer: Answer) -> None:
        self._listener.send(self._peer, answer)
