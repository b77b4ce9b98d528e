"""Ranks of a split model as processes of their own: one leads, one follows, and something ends one of them.

The process groups have a timeout that is much shorter than the ranks idle.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import mambaslots as ms
import mambaslots.net as msd
import torch.distributed as dist
from mambaslots.net.lockstep import followers, following
from mambaslots.parallel_groups import ParallelGroups
from oracle.heartbeat_rank import RankProcess
from oracle.serving import random_tokens, small_config, small_engine

GROUP_TIMEOUT_S = 3.0
IDLE_S = 4.0
SILENCE_S = 2.5
"""A peer that stands still for so long is lost; the channel's own limit is longer."""
SERVED = "served"
ONE = ms.SamplingParams(max_tokens=1)


@contextmanager
def two_ranks(folder: Path, role: str) -> Iterator[list[RankProcess]]:
    """A leading rank with a role, and its follower; both have served a request.

    Roles: "idles" for longer than the groups' timeout, serves and closes; "serves" again and again; "waits"
    for a signal, and then serves.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks: list[RankProcess] = []
    try:
        for rank in range(2):
            ranks.append(RankProcess(folder / f"rank {rank}", _work, rank, store.port, role))
        ranks[0].await_saying(SERVED)
        yield ranks
    finally:
        for process in ranks:
            process.end()


def _work(rank: int, port: int, role: str) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
    group = dist.new_group([0, 1], timeout=timedelta(seconds=GROUP_TIMEOUT_S if role == "idles" else 30))
    followers.Listener = partial(followers.Listener, silence_s=SILENCE_S)  # type: ignore[assignment,misc]
    following.Link = partial(following.Link, silence_s=SILENCE_S)  # type: ignore[assignment,misc]
    model = ms.models.HybridLM(small_config(), groups=ParallelGroups(tensor=group))
    if rank:
        msd.follow(small_engine(model=model))
        print("ended well", flush=True)
        return
    ms.DynamicInferenceEngine = msd.LeadingEngine  # type: ignore[misc]
    engine = small_engine(model=model)
    assert isinstance(engine, msd.LeadingEngine)
    signals: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: signals.append(number))
    engine.generate([random_tokens(20, seed=1)], ONE)
    print(SERVED, flush=True)
    if role == "idles":
        time.sleep(IDLE_S)
    while role == "waits" and not signals:
        time.sleep(0.01)
    for _ in range(10**6 if role == "serves" else 1):
        engine.generate([random_tokens(20, seed=1)], ONE)
    engine.close()
    print("ended well", flush=True)
