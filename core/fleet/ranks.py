"""The processes of one replica, over which its model is split."""

import asyncio
import logging
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ..inference.engines.dynamic_engine import DynamicInferenceEngine
from ..net.lockstep.following import follow
from ..parallel_groups import ParallelGroups
from .fleet_settings import FleetSettings

logger = logging.getLogger(__name__)

MakeEngine = Callable[[ParallelGroups | None], DynamicInferenceEngine]
"""Makes a rank's engine in its process: for rank 0 of a split model a `LeadingEngine`. Can be pickled."""
_MEETING_S = 600.0
"""Ranks load their weights before they meet."""


class FollowingRank:
    """A process of a replica but its first; it runs as a Ray actor."""

    def run(self, make_engine: MakeEngine, host: str, port: int, rank: int, num_ranks: int) -> None:
        """Follow rank 0 until it closes its engine.

        Raises:
            RankDiedError: rank 0 is lost.
        """
        groups = _join(_meeting(host, port, is_master=False), rank, num_ranks)
        follow(make_engine(groups))

    def process(self) -> int:
        """The process's id."""
        return os.getpid()


class Ranks:
    """The other ranks of a replica, as its first rank sees them.

    Ray ends them with the process that has made them.

    Attributes:
        engine: of the first rank.
    """

    def __init__(self, make_engine: MakeEngine, settings: FleetSettings) -> None:
        """Start the other ranks in this replica's placement group, and build the engine together.

        Args:
            make_engine: makes the engine of each rank.
            settings: how many ranks there are, and what each needs.
        """
        self._actors: list[Any] = []
        self._runs: list[Any] = []
        if settings.ranks == 1:
            self.engine = make_engine(None)
            return
        host = ray.util.get_node_ip_address()
        store = _meeting(host, 0, is_master=True)
        for rank in range(1, settings.ranks):
            place = PlacementGroupSchedulingStrategy(
                get_current_placement_group(), placement_group_bundle_index=rank
            )
            actor = ray.remote(FollowingRank).options(
                num_cpus=settings.cpus_per_rank,
                num_gpus=settings.gpus_per_rank,
                scheduling_strategy=place,
                max_concurrency=2,
            )
            self._actors.append(actor.remote())
        self._runs = [
            actor.run.remote(make_engine, host, store.port, rank, settings.ranks)
            for rank, actor in enumerate(self._actors, 1)
        ]
        self.engine = make_engine(_join(store, 0, settings.ranks))

    async def processes(self) -> list[int]:
        """The ids of the processes of the other ranks."""
        return list(await asyncio.gather(*(actor.process.remote() for actor in self._actors)))

    async def lost(self) -> BaseException:
        """Why a rank has ended, once one has."""
        runs = [asyncio.ensure_future(_ended(run)) for run in self._runs]
        done, others = await asyncio.wait(runs, return_when=asyncio.FIRST_COMPLETED)
        for other in others:
            other.cancel()
        return done.pop().result()

    @property
    def are_others(self) -> bool:
        """Whether there are other ranks."""
        return bool(self._runs)


async def _ended(run: Any) -> BaseException:
    try:
        await run
    except Exception as error:
        return error
    return RuntimeError("a rank has ended")


def _meeting(host: str, port: int, *, is_master: bool) -> TCPStore:
    """The store over which the ranks of a replica meet; the master with port 0 listens on a free one."""
    timeout = timedelta(seconds=_MEETING_S)
    return TCPStore(host, port, is_master=is_master, wait_for_workers=False, timeout=timeout)


def _join(store: TCPStore, rank: int, num_ranks: int) -> ParallelGroups:
    """Be a rank of torch.distributed; all ranks of the replica call this at once."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks)
    return ParallelGroups(tensor=dist.group.WORLD)
