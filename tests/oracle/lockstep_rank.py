"""Ranks of a split model as processes of their own: one leads, others follow, and something ends one of them.

They are copies of a process that has imported what tests do.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import mambaslots as ms
import mambaslots.net as msd
import torch.distributed as dist
from mambaslots.net import message_sockets
from mambaslots.net.lockstep import follower
from mambaslots.parallel_groups import ParallelGroups
from oracle.fresh_process import Begun
from oracle.serving import random_tokens, small_config, small_engine

STARTING_S = 60.0
GROUP_TIMEOUT_S = 3.0
IDLE_S = 4.0
LONG = timedelta(seconds=4 * STARTING_S)
"""No help to ranks that wait: far longer than anyone should wait."""
SILENCE_S = 2.5
"""A peer that stands still for so long is lost; the channel's own limit is longer."""
SERVED = "served"
ONE = ms.SamplingParams(max_tokens=1)
STARTS = "import sys; from oracle.lockstep_rank import work; work(*sys.argv[1:])"


class RankProcess(Begun):
    """A process, and what it says on stdout and stderr."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*map(str, arguments), code=STARTS)

    @property
    def said(self) -> str:
        return super().said + self.errors

    def await_saying(self, text: str) -> None:
        deadline = time.monotonic() + STARTING_S
        while text not in self.said:
            assert self.is_alive() or text in self.said, self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.01)

    def status(self) -> int:
        """Once it has ended."""
        status = self.wait(STARTING_S)
        assert status is not None, self.said
        return status


@contextmanager
def led_ranks(role: str, ranks: int = 2, silence_s: float = SILENCE_S) -> Iterator[list[RankProcess]]:
    """A leading rank with a role, and its followers; all have served a request.

    Roles: "idles" for longer than the groups' timeout, serves and closes; "serves" again and again; "waits"
    for a signal, and then serves; "checks" again and again whether a rank is lost; "exits" lets the last
    follower exit in a call.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes: list[RankProcess] = []
    try:
        for rank in range(ranks):
            processes.append(RankProcess(rank, ranks, store.port, role, silence_s))
        processes[0].await_saying(SERVED)
        yield list(processes)
    finally:
        for process in processes:
            process.close()


def exit_last(engine: ms.DynamicInferenceEngine) -> None:
    """For `call_on_all`."""
    if engine.context.spec.groups.rank == engine.context.spec.groups.size - 1:
        raise SystemExit("what this rank cannot do")


def work(*arguments: str) -> None:
    role = arguments[3]
    rank, ranks, port = map(int, arguments[:3])
    silence_s = float(arguments[4])
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=LONG)
    timeout = timedelta(seconds=GROUP_TIMEOUT_S) if role == "idles" else LONG
    group = dist.new_group(list(range(ranks)), timeout=timeout)
    message_sockets.SILENCE_S = silence_s
    follower.Link = partial(follower.Link, silence_s=silence_s)  # type: ignore[assignment,misc]
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
    while role == "checks":
        engine.check_ranks()
        time.sleep(0.01)
    if role == "exits":
        engine.call_on_all(exit_last)
    for _ in range(10**6 if role == "serves" else 1):
        engine.generate([random_tokens(20, seed=1)], ONE)
    engine.close()
    engine.check_ranks()  # ranks that have left now are not lost
    print("ended well", flush=True)
