"""A replica: an engine over one or more processes that Ray Serve starts, watches and ends."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray import serve
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ..inference.engines.dynamic_engine import DynamicInferenceEngine
from ..net.lockstep.follower import follow
from ..net.routing.state_events import StateEvents, StatePublisher
from ..net.transfer.exports import recent_states
from ..parallel_groups import ParallelGroups
from ..serve.served_engine import EngineFacts, LocalEngine
from .fleet_settings import FleetSettings
from .guard import kill_when_stalled
from .replica_answers import AnswerPart, EngineRequest, ReplicaLostError, answer_parts
from .replica_questions import Ingresses, IngressQuestion
from .replica_reports import ReplicaReport, replica_report
from .warming import meeting_store, on_all_ranks, send_states, warm_from_donor

logger = logging.getLogger(__name__)

MakeEngine = Callable[[ParallelGroups | None], DynamicInferenceEngine]
"""Makes a rank's engine in its process: for rank 0 of a split model a `LeadingEngine`. Can be pickled."""
_MEETING_S = 600.0  # so long ranks wait for each other: they load their weights before they meet


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """A replica's processes, the leading one first, its load, and the changes of its states, if asked for."""

    replica: str
    processes: tuple[int, ...]
    num_running: int
    num_states: int
    events: StateEvents | None = None


class FollowingRank:
    """A process of a replica but its first; a Ray actor."""

    def __init__(self, stall_s: float) -> None:
        kill_when_stalled(stall_s)

    def run(self, make_engine: MakeEngine, host: str, port: int, rank: int, num_ranks: int) -> None:
        """Follow rank 0 until it closes its engine; RankDiedError where rank 0 is lost."""
        groups = _joined_groups(meeting_store(host, port, _MEETING_S), rank, num_ranks)
        follow(make_engine(groups))

    def process(self) -> int:
        return os.getpid()


class ReplicaRanks:
    """The other ranks of a replica, as its first rank sees them; Ray ends them with its process."""

    def __init__(self, make_engine: MakeEngine, settings: FleetSettings) -> None:
        """Start the other ranks in this replica's placement group, and build the engine together."""
        self._actors: list[Any] = []
        self._runs: asyncio.Future[list[None]] | None = None  # of the other ranks
        if settings.ranks == 1:
            self.engine = make_engine(None)
            return
        host = ray.util.get_node_ip_address()
        store = meeting_store(host, 0, _MEETING_S, is_master=True)
        for rank in range(1, settings.ranks):
            group = get_current_placement_group()
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
            actor = ray.remote(FollowingRank).options(
                num_cpus=settings.cpus_per_rank, num_gpus=settings.gpus_per_rank, scheduling_strategy=place,
                max_concurrency=2,
            )  # fmt: skip
            self._actors.append(actor.remote(settings.stall_s))
        runs = [
            actor.run.remote(make_engine, host, store.port, rank, settings.ranks)
            for rank, actor in enumerate(self._actors, 1)
        ]
        self.engine = make_engine(_joined_groups(store, 0, settings.ranks))
        self._runs = asyncio.gather(*runs)

    async def processes(self) -> list[int]:
        return list(await asyncio.gather(*(actor.process.remote() for actor in self._actors)))

    @property
    def failure(self) -> BaseException | None:
        """Why a rank has failed, or that all have left; None before that."""
        if self._runs is None or not self._runs.done():
            return None
        return self._runs.exception() or RuntimeError("the ranks have ended")


def _joined_groups(store: TCPStore, rank: int, num_ranks: int) -> ParallelGroups:
    """Be a rank of torch.distributed; all ranks of the replica call this at once."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks)
    return ParallelGroups(tensor=dist.group.WORLD)


class EngineReplica:
    """What Ray Serve deploys as a replica: Ray constructs it, asks for its health, and lets requests end."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, make_engine: MakeEngine, settings: FleetSettings
    ) -> None:
        """`make_engine` makes the engine of each rank."""
        kill_when_stalled(settings.stall_s)
        self._name: str = serve.get_replica_context().replica_id.unique_id
        self._ranks = ReplicaRanks(make_engine, settings)
        self._processes = (os.getpid(), *await self._ranks.processes())
        engine = self._ranks.engine
        self._engine = LocalEngine(
            engine,
            model_name=settings.model_name,
            max_waiting_requests=10 * settings.max_requests,  # Ray sends fewer
            trace=settings.trace,
        )
        self._engine.start()
        caches = engine.config.enable_prefix_caching
        new_publisher = (lambda: StatePublisher(engine, self._name)) if caches else None
        self._ingresses = Ingresses(self._engine.call, new_publisher)
        self._watch_task = asyncio.create_task(self._end_when_lost())
        if caches and settings.warm_timeout_s:
            await warm_from_donor(self._name, settings, self._engine)

    async def stream(self, request: EngineRequest) -> AsyncIterator[AnswerPart]:
        """Answer a request; a caller that closes the stream cancels it."""
        try:
            answer: Any = answer_parts(self._engine, request, self._name)
            async with aclosing(answer) as parts:
                async for part in parts:
                    yield part
        except ReplicaLostError as error:
            is_split = len(self._processes) > 1
            if self._engine.failure is not None or (is_split and error.__cause__ is not None):
                self._end_process(error)  # a split engine that failed is broken
            raise

    async def facts(self) -> EngineFacts:
        return self._engine.facts

    async def status(self, question: IngressQuestion | None = None) -> ReplicaStatus:
        """Says that all ranks' event loops run, and to an ingress also how states changed."""
        await self._ranks.processes()
        events = self._ingresses.answer(question) if question is not None else None
        num_states = self._ranks.engine.context.prefix_cache.num_states
        return ReplicaStatus(self._name, self._processes, self._engine.num_running, num_states, events)

    async def recent_states(self) -> list[int]:
        """The hashes of the states that a replica which joins may ask for, those used last first."""
        hashes: list[int] = await self._engine.call(on_all_ranks(recent_states))
        return hashes

    async def hand_over(self, *arguments: Any) -> None:
        """Call `send_states` with these arguments on all ranks, between two steps."""
        await self._engine.call(on_all_ranks(send_states, *arguments))

    async def report(self) -> ReplicaReport:
        return await replica_report(self._engine, self._name, self._ingresses.counts)

    async def check_health(self) -> None:
        """Raise the failure of the engine; Ray then starts another replica instead."""
        failure = self._engine.failure
        if failure is not None:
            raise RuntimeError(f"the engine of replica {self._name} has given up") from failure
        await self._ranks.processes()  # late where one is stopped

    async def _end_when_lost(self) -> None:
        """End this process where the engine has failed, or a rank is lost."""
        while (reason := self._engine.failure or self._ranks.failure) is None:
            await asyncio.sleep(0.1)
        self._end_process(reason)

    def _end_process(self, reason: BaseException) -> None:
        """End at once; a replica that raised errors instead would get more requests: its queue is short."""
        logger.error("mambaslots: replica %s is lost: %s", self._name, reason)
        logging.shutdown()
        os._exit(1)
