"""Rounds of replicas behind a router, with hand-overs between them."""

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from itertools import count
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import mambaslots as ms
import mambaslots.net as msd
import msgspec
import torch.distributed as dist
import zmq
from fuzzing.malformed_bodies import MAX_BODY_BYTES
from mambaslots.fleet.replica_answers import AnswerPart, EngineRequest, ReplicaLostError, answer_parts
from mambaslots.fleet.replica_reports import ReplicaReport, replica_report
from mambaslots.net import StatePublisher, message_sockets
from mambaslots.net.message_sockets import Link, Listener
from mambaslots.net.routing.state_router import ReplicaLoad, StateRouter
from mambaslots.net.transfer import pieces
from mambaslots.net.transfer.pipe import MessagePipe
from mambaslots.net.transfer.placement import ImportReport
from mambaslots.serve.served_engine import LocalEngine
from oracle.faulty_copies import make_faulty
from oracle.fleet import Replicas
from oracle.served import serving_replicas
from oracle.state_channel import LossyChannel, keys_of, resumable_keys
from oracle.toy_answers import Ask
from soaking.clients import World, clients
from soaking.model import KINDS, NUM_VERSIONS, TOLERANCE, Oracle, loaded_of, model_of
from soaking.rounds import RoundTally
from soaking.server import (
    LOGGED,
    check_end,
    compare,
    counts_of,
    lossless_encoding,
    new_world,
    quiet,
    random_config,
    watched_round,
)

FAULTS = (
    "late", "absent", "torn", "order", "cut piece", "slow", "checksums", "blocks", "states", "garbage",
    "huge", "offer",
)  # fmt: skip
PIECE_BYTES = 1 << 13
"""Small, so that a hand-over has several pieces."""
_PATIENCE_S = 10.0
_SHORT_S = 1.0


class Places:
    """The store where replicas meet, and the channels between them, which live on."""

    def __init__(self, engines: Sequence[LocalEngine]) -> None:
        """`engines`: the replicas, which may be replaced; each call looks."""
        self.failures = "", ""
        self._engines = engines
        self._host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_MINUTE)
        self._names = count()
        self._channels: dict[tuple[int, int], tuple[msd.TransferChannel, msd.TransferChannel]] = {}

    async def hand_over(
        self, source: int, target: int, prefixes: Any, fault: str, random: Random
    ) -> ImportReport | None:
        """Hand prefixes from one replica to another."""
        if fault:  # an open connection has the methods that it was made with, and would not lie
            self._forget((source, target))
        sending, receiving = await self._ends(source, target)
        timeout_s = _SHORT_S if fault else _PATIENCE_S
        late_s = _SHORT_S / 2 if fault == "late" else 0.0
        sent = self._engines[source].call(lambda _: sending.send(prefixes, timeout_s=timeout_s))

        def receive(_: ms.DynamicInferenceEngine) -> ImportReport:
            time.sleep(late_s)
            return receiving.receive(timeout_s=timeout_s)

        received = self._engines[target].call(receive)
        if fault == "absent":
            one = random.choice([sent, received])
            (received if one is sent else sent).close()
            report: Any = await one
            assert report.failure, "a hand-over without a peer succeeded"
            self.failures = report.failure, report.failure
            return None
        with lying(fault, random):
            both = await asyncio.gather(sent, received)
        if fault:  # and one that was made to lie would go on, where this hand-over had nothing to lie about
            self._forget((source, target))
        self.failures = both[0].failure, both[1].failure
        return both[1]

    def _forget(self, pair: tuple[int, int]) -> None:
        for end in self._channels.pop(pair, ()):
            end.close()

    async def _ends(self, source: int, target: int) -> tuple[msd.TransferChannel, msd.TransferChannel]:
        if (source, target) not in self._channels:
            name = f"channel {next(self._names)}"

            def end(side: Any) -> Callable[[ms.DynamicInferenceEngine], msd.TransferChannel]:
                store = dist.TCPStore("127.0.0.1", self._host.port, is_master=False, timeout=_MINUTE)
                return lambda engine: msd.TransferChannel(engine, store, name, side)

            made = (
                await self._engines[source].call(end("source")),
                await self._engines[target].call(end("destination")),
            )
            self._channels[source, target] = made
        return self._channels[source, target]

    def forget(self, replica: int) -> None:
        """End the channels of a replica that is gone."""
        for pair in [pair for pair in self._channels if replica in pair]:
            self._forget(pair)

    def close(self) -> list[str]:
        """End all channels. Returns what is left in the store."""
        for replica in range(len(self._engines)):
            self.forget(replica)
        return [key for key in self._host.list_keys() if "handover" in key]


@contextmanager
def small_pieces() -> Iterator[None]:
    """Hand-overs within it have several pieces."""
    with patch.object(pieces, "PIECE_BYTES", PIECE_BYTES):
        yield


@contextmanager
def lying(fault: str, random: Random) -> Iterator[None]:
    """Hand-overs within it have a peer that sends or says something wrong; "" and other faults lie not."""
    send, link, listener = MessagePipe.send, Link.send, Listener.send

    def wrong_piece(self: MessagePipe, piece: Any, packed: Any) -> Any:
        sent = piece.clone()
        if fault == "torn":
            sent[random.randrange(len(sent))] ^= 1 << random.randrange(8)
        elif fault == "order":
            sent[8:] = piece[:-8]
            sent[0] ^= 1
        elif fault == "cut piece":
            sent = sent[: len(sent) // 2]
        elif fault == "slow":
            time.sleep(_SHORT_S / 3)
        return send(self, sent, packed)

    lies: dict[str, tuple[str, Callable[[Any], Any]]] = {
        "checksums": ("values", lambda sums: [value ^ 1 for value in sums]),
        "blocks": ("blocks", lambda nodes: [*nodes, 1 << 40]),
        "states": ("states", lambda nodes: nodes * 1000 or [7]),
        "garbage": ("over_nccl", lambda _: 3),
        "huge": ("blocks", lambda nodes: [1 << 63]),
        "offer": ("prefixes", lambda prefixes: random.randbytes(random.randrange(1, 5000))),
    }

    def altered(message: Any) -> Any:
        field, change = lies[fault]
        if field not in message.__struct_fields__:
            return message
        return msgspec.structs.replace(message, **{field: change(getattr(message, field))})

    patches: dict[str, list[tuple[Any, str, Any]]] = {
        **{name: [(MessagePipe, "send", wrong_piece)] for name in ("torn", "order", "cut piece", "slow")},
        **{
            name: [
                (Link, "send", lambda self, one, payload=None: link(self, altered(one), payload)),
                (
                    Listener,
                    "send",
                    lambda self, peer, one, payload=None: listener(self, peer, altered(one), payload),
                ),
            ]
            for name in lies
        },
    }
    if fault not in patches:
        yield
        return
    with ExitStack() as stack:
        for one in patches[fault]:
            stack.enter_context(patch.object(*one))
        yield


_MINUTE = timedelta(seconds=60)


sys.path.append(str(Path(__file__).parents[2] / "tests"))

REQUIRED_EVENTS = {
    "cpu": (
        "hand-overs", "hand-overs that were misses", "tokens resumed behind hand-overs", "killed replicas",
        "weights", "changes while a hand-over is under way", "tellings of states", "refused: queue_full",
    )
}  # fmt: skip
"""What must happen in some minutes."""
LOGGED_HERE = (*LOGGED, "hand-over", "lost its replica", "a channel was not connected")
_TRUE_LIES = ("torn", "order", "cut piece", "checksums", "blocks", "states", "garbage", "huge", "offer")


class Published:
    """Messages taken in the engine's thread, for a channel of another thread."""

    def __init__(self, publisher: StatePublisher) -> None:
        self._taken, self._snapshot = publisher.take(), publisher.snapshot()

    def take(self) -> Any:
        taken, self._taken = self._taken, None
        return taken

    def snapshot(self) -> Any:
        return self._snapshot


@dataclass
class RoutedReplicas(Replicas):
    """Replicas that a router by states chooses, and that may be killed at any moment."""

    make_engine: Callable[[int], ms.DynamicInferenceEngine] = field(kw_only=True)
    random: Random = field(kw_only=True)
    router: StateRouter = field(default_factory=StateRouter)
    events: Any = field(default_factory=lambda: RoundTally().events)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.engines = list(self.engines)
        self.names = [f"r{number}" for number in range(len(self.engines))]
        self.is_alive = [True] * len(self.engines)
        self.publishers = [
            StatePublisher(engine, name) for engine, name in zip(self.engines, self.names, strict=True)
        ]
        self.feeds = [LossyChannel(one, self.random.randrange(2**31)) for one in self.publishers]
        for feed in self.feeds:
            feed.index = self.router  # type: ignore[assignment]

    async def call(self, request: EngineRequest) -> AsyncGenerator[AnswerPart, None]:
        """Serve a request at the replica that the router chooses."""
        alive = [number for number, is_alive in enumerate(self.is_alive) if is_alive]
        left = [number for number in alive if self.names[number] not in request.lost] or alive
        if not left:
            raise ReplicaLostError("no replica serves")
        loads = [
            ReplicaLoad(self.names[i], self.local[i].num_running + self.local[i].num_waiting) for i in left
        ]
        number = self.names.index(self.router.choose(request.route, loads)[0])
        parts = answer_parts(self.local[number], request, self.names[number])
        try:
            async for part in parts:
                yield part
        finally:
            await parts.aclose()

    async def reports(self) -> list[ReplicaReport]:
        return [
            await replica_report(local, name, {})
            for local, name, is_alive in zip(self.local, self.names, self.is_alive, strict=True)
            if is_alive
        ]

    async def publish(self, number: int) -> None:
        """Let a replica publish to the router what has changed; some of it is lost, repeated or late."""
        feed = self.feeds[number]
        feed.publisher = await self._published(number)
        feed.publish()
        self.events["tellings of states"] += 1

    async def _published(self, number: int) -> Any:
        publisher = self.publishers[number]
        return await self.local[number].call(lambda _: Published(publisher))

    async def restart(self, number: int, begun: Callable[[], None]) -> None:
        """Kill a replica, and start another one in its place. `begun` is called while it is gone."""
        self.is_alive[number] = False
        begun()
        await self.local[number].close()
        self._count(number)
        old = self.engines[number]
        old.check_integrity()
        if self.random.random() < 0.5:
            self.router.remove(self.names[number])  # or it learns of the new one by what that publishes
        self.engines[number] = engine = self.make_engine(number)  # type: ignore[index]
        self.local[number] = LocalEngine(engine, model_name=self.model_name)
        self.publishers[number] = StatePublisher(engine, self.names[number])
        self.local[number].start()
        self.is_alive[number] = True
        self.events["killed replicas"] += 1

    def _count(self, number: int) -> None:
        self.events.update(counts_of(self.engines[number].stats()))

    async def settle(self) -> list[str]:
        """Bring the router all that is on its way. Returns what it then knows wrongly."""
        wrong = []
        for number, name in enumerate(self.names):
            feed = self.feeds[number]
            feed.publisher = await self._published(number)
            feed.settle()
            keys = await self.local[number].call(lambda engine: resumable_keys(engine.context.prefix_cache))
            known = keys_of(self.router.index, name)
            if known != keys:
                wrong.append(f"the router knows {len(known)} states of {len(keys)}")
        return wrong

    def stats(self) -> ms.EngineStats:
        """Of the replica that has most to do."""
        return max(
            (engine.stats() for engine in self.engines), key=lambda one: one.num_running + one.num_waiting
        )


class FleetOperator:
    """Moves prefixes between replicas, kills them, and changes their weights, while clients ask."""

    def __init__(
        self, replicas: RoutedReplicas, places: Places, world: World, random: Random, kind: str, models: Any
    ) -> None:
        self.faults: list[str] = []
        self.num_compared = self.num_tokens_compared = 0
        self._replicas, self._places, self._world = replicas, places, world
        self._random, self._models, self._oracle = random, models, Oracle(kind)
        self._num_resets = 0
        self._asked: list[tuple[Ask, ms.RequestResult]] = []

    async def act(self) -> None:
        """Do one thing, or two at once."""
        replicas, random = self._replicas, self._random
        number = random.randrange(len(replicas.engines))
        chance = random.random()
        await replicas.publish(random.randrange(len(replicas.engines)))
        if chance < 0.35:
            await replicas.publish(number)
        elif chance < 0.65:
            await self._hand_on(number, random.choice(["", "", *FAULTS]))
        elif chance < 0.8:
            others = [self._change_weights(), self._restart(1 - number), self._restart(number)]
            chosen = random.choice(others)
            for other in others:
                if other is not chosen:
                    other.close()
            both = [self._hand_on(number, ""), chosen]
            random.shuffle(both)
            await asyncio.gather(*both)
            replicas.events["changes while a hand-over is under way"] += 1
        elif chance < 0.88:
            await self._change_weights()
        elif chance < 0.94:
            await self._restart(number)
        else:
            await replicas.local[number].call(lambda engine: engine.check_integrity())
            await replicas.local[number].call(lambda engine: engine.reset_prefix_cache())
            replicas.events["reset"] += 1

    async def _restart(self, number: int) -> None:
        await self._replicas.restart(number, lambda: self._places.forget(number))

    async def _change_weights(self) -> None:
        version = (self._world.weights.version + self._random.randint(1, NUM_VERSIONS - 1)) % NUM_VERSIONS

        def change(engine: ms.DynamicInferenceEngine) -> None:
            model: Any = engine.model
            model.load_state_dict(self._models[version].state_dict())
            engine.set_weights_version(f"weights {version}")

        numbers = list(range(len(self._replicas.engines)))
        self._random.shuffle(numbers)
        with self._world.weights.changing(version):
            for number in numbers:
                await self._replicas.local[number].call(change)
        self._replicas.events["weights"] += 1

    # ---- hand-overs

    async def _hand_on(self, source: int, fault: str) -> None:
        """Hand the prefix of a new prompt over, and ask the other replica for what continues it."""
        begun, version = self._world.weights.num_changes, self._world.weights.version
        try:
            report, resumed = await self.hand_on(source, fault, begun, version)
        except RuntimeError as error:  # it was killed meanwhile
            if "clos" not in str(error):
                raise
            return
        if report is not None and report.imported.states and not self._places.failures[0]:
            if fault in _TRUE_LIES:
                self.faults.append(f"a hand-over with the fault {fault!r} imported {report}")
            self._replicas.events["hand-overs"] += 1
            self._replicas.events["tokens resumed behind hand-overs"] += resumed
        else:
            self._replicas.events["hand-overs that were misses"] += 1

    async def hand_on(self, source: int, fault: str, begun: int, version: int) -> tuple[Any, int]:
        """The report of a hand-over, and how many tokens the other replica then resumed."""
        random, local = self._random, self._replicas.local
        salt = random.choice([None, b"salt"])
        prompt = [random.randrange(256) for _ in range(random.choice([40, 70, 120]))]
        size = self._replicas.engines[0].config.block_size_tokens
        plan = ms.CheckpointPlan(decode="off", prefill_interval=size)
        params = ms.SamplingParams(max_tokens=3, return_log_probs=True)
        first = await local[source].generate(prompt, params, cache_salt=salt, checkpoint_plan=plan)
        self._note(prompt, first, begun, version)
        report = await self._places.hand_over(source, 1 - source, [(prompt, salt)], fault, random)
        longer = [*prompt, 7, 8, 9]
        second = await local[1 - source].generate(longer, params, cache_salt=salt, checkpoint_plan=plan)
        self._note(longer, second, begun, version)
        if fault:
            self._replicas.events[f"peer: {fault}"] += 1
        return report, second.num_resumed_tokens

    def _note(self, prompt: list[int], result: ms.RequestResult, begun: int, version: int) -> None:
        """Keep an answer to compare, unless weights changed meanwhile or the replica was killed."""
        if self._world.weights.are_those_of(begun) and result.finish_reason == "length":
            self._asked.append((Ask(tuple(prompt), 3, version), result))

    async def hand_over_at_last(self) -> None:
        """With nothing else under way, each replica resumes what the other one hands it."""
        begun, version = self._world.weights.num_changes, self._world.weights.version
        for source in range(len(self._replicas.engines)):
            for local in self._replicas.local:
                await local.call(lambda engine: engine.reset_prefix_cache())
            report, resumed = await self.hand_on(source, "", begun, version)
            if any(self._places.failures) or not report.imported.states or not resumed:
                self.faults.append(
                    f"in the end a hand-over gave {report} and {resumed} tokens: {self._places.failures}"
                )
            self._replicas.events["hand-overs in the end"] += 1
            self._replicas.events["tokens resumed behind hand-overs"] += resumed

    def check(self) -> None:
        """Hold the answers around hand-overs against the recurrence."""
        for ask, result in self._asked:
            expected = self._oracle.answer(ask)
            assert result.log_probs is not None
            self.num_compared += 1
            self.num_tokens_compared += len(expected.tokens)
            differ = max(abs(a - b) for a, b in zip(result.log_probs, expected.log_probs, strict=True))
            if tuple(result.tokens) != expected.tokens or differ > TOLERANCE:
                self.faults.append(
                    f"around a hand-over {ask} was answered {result}; expected {expected.tokens}"[:700]
                )


# ---- a round


def run_round(seed: int, seconds: float, device: str) -> RoundTally:
    """Two replicas, their clients and their operator."""
    name = f"replicas round, seed {seed}"
    _open_for_good()
    return watched_round(name, lambda tally: _serve(seed, seconds, name, tally), LOGGED_HERE)


@cache
def _open_for_good() -> None:
    """What a process keeps from its first hand-over on: torch's stores and ZeroMQ's context."""
    dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    message_sockets._context().socket(zmq.PAIR).close()


def _serve(seed: int, seconds: float, name: str, tally: RoundTally) -> None:
    random = Random(seed)
    kind = random.choice(list(KINDS))
    models = [model_of(kind, version) for version in range(NUM_VERSIONS)]
    own = [model_of(kind, 0) for _ in range(2)]
    begun = time.monotonic()
    world = new_world(random, begun + 0.5 * seconds, name)
    world.may_refuse |= {"no_replica", "cancelled"}
    tiers = Random(random.random())
    with ExitStack() as stack:
        stack.enter_context(small_pieces())
        config = random_config(random, own[0], "unused")
        config = replace(config, disk_cache=None)
        config = stack.enter_context(lossless_encoding(config, random.random() < 0.2))
        faulty = []

        def make_engine(number: int) -> ms.DynamicInferenceEngine:
            engine = ms.DynamicInferenceEngine(own[number], config)
            engine.set_weights_version(f"weights {world.weights.version}")
            if engine.context.prefix_cache.tiers is not None:
                faulty.append(make_faulty(engine.context.prefix_cache.tiers, tiers))
            return engine

        replicas = RoutedReplicas(
            [make_engine(number) for number in range(2)],
            make_engine=make_engine,
            random=Random(random.random()),
        )
        settings = {
            "model_name": "soak", "api_keys": world.keys, "admin_key": world.admin_key,
            "max_body_bytes": MAX_BODY_BYTES, "max_waiting_requests": random.randint(3, 6),
        }  # fmt: skip
        with serving_replicas(replicas, loaded_of(own[0]), config, **settings) as served:
            world.port = served.port
            places = Places(replicas.local)
            operator = FleetOperator(replicas, places, world, Random(random.random()), kind, models)
            with clients(world, random.randint(3, 8)) as asking:
                while not world.is_over:
                    served.do(operator.act)
                    time.sleep(random.uniform(0.0, 0.2))
            quiet(replicas.stats, name, tally)
            wrong = served.do(replicas.settle)
            served.do(operator.hand_over_at_last)
            tally.mismatches += [f"{name}: {text}" for text in (*wrong, *served.do(replicas.settle))]
            left = places.close()
            if left:
                tally.mismatches.append(f"{name}: left in the store: {left}")
        for number, engine in enumerate(replicas.engines):
            check_end(engine, name, tally)
            replicas._count(number)
    tally.events.update(replicas.events)
    tally.events["failed copies"] += sum(copies.num_faults for copies in faulty)
    operator.check()
    tally.mismatches += [f"{name}: {text}" for text in operator.faults]
    tally.comparisons += operator.num_compared
    tally.tokens_compared += operator.num_tokens_compared
    compare(kind, asking, begun + seconds, name, random, tally)
