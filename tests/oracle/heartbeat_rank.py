"""Ranks of a split model as processes, without torchrun: they serve until something ends them.

A server that has imported everything forks them: on a busy machine the imports would take longer than a test.
"""

import multiprocessing
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import mambaslots as ms
import pytest
import torch
import torch.distributed as dist
from mambaslots.net import Heartbeat
from mambaslots.parallel_groups import ParallelGroups
from oracle.serving import random_tokens, small_config, small_engine

TIMEOUT_S = 2.5
STARTING_S = 60.0
SERVED = "served"
ROUNDS = 3
PROCESSES: Any = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["oracle.heartbeat_rank"])


def _start_server() -> None:
    """The server of Python 3.12 ignores this process's `sys.path`, without a word, but reads PYTHONPATH."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
        forkserver.ensure_running()


class RankProcess:
    """A process, and what it says on stdout and stderr."""

    def __init__(self, log: Path, work: Callable[..., None], *arguments: object) -> None:
        self.log = log
        log.touch()
        _start_server()
        self.process = PROCESSES.Process(target=_logged, args=(log, work, *arguments))
        self.process.start()

    @property
    def said(self) -> str:
        return self.log.read_text()

    def await_saying(self, text: str) -> None:
        deadline = time.monotonic() + STARTING_S
        while text not in self.said:
            assert self.process.is_alive() or text in self.said, self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.01)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def status(self) -> int:
        """Once it has ended."""
        self.process.join(STARTING_S)
        assert not self.process.is_alive(), self.said
        return int(self.process.exitcode)

    def end(self) -> None:
        self.process.kill()
        self.process.join()


@contextmanager
def rank_processes(
    folder: Path, *roles: str, port: int | None = None, timeout_s: float = TIMEOUT_S
) -> Iterator[list[RankProcess]]:
    """The ranks of one model, all of them serving; this process hosts their store unless `port` is another's.

    Roles: "serves" for ever; "raises" after a few rounds; "leaves" after them, where others "stay" and watch;
    "serves unread stdout" or "stderr", which leads to a full pipe from the first round on.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if port is None else None
    port = port if store is None else store.port
    ranks = []
    try:
        for rank, role in enumerate(roles):
            arguments = rank, len(roles), port, role, timeout_s
            ranks.append(RankProcess(folder / f"rank {rank}", _serve, *arguments))
        for process in ranks:
            process.await_saying(SERVED)
        yield ranks
    finally:
        for process in ranks:
            process.end()


@contextmanager
def store_process(folder: Path) -> Iterator[tuple[RankProcess, int]]:
    """One that hosts a store, and its port."""
    process = RankProcess(folder / "store", _host_a_store)
    try:
        process.await_saying("\n")
        yield process, int(process.said)
    finally:
        process.end()


def _logged(log: Path, work: Callable[..., None], *arguments: object) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(descriptor, stream.fileno())
    torch.set_num_threads(1)
    work(*arguments)


def _host_a_store() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    print(store.port, flush=True)
    time.sleep(10 * STARTING_S)


def _lead_to_a_full_pipe(name: str) -> None:
    """sys.stdout or sys.stderr, with more in its buffer."""
    stream = open(getattr(sys, name).fileno(), "w", closefd=False)  # noqa: SIM115 - for ever; buffers
    _, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(select.PIPE_BUF))
    os.set_blocking(writer, True)
    os.dup2(writer, stream.fileno())
    stream.write("what no one reads")
    setattr(sys, name, stream)


def _serve(rank: int, ranks: int, port: int, role: str, timeout_s: float) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=STARTING_S))
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("groups", store),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=4 * STARTING_S),  # no help: far longer than anyone should wait
    )
    groups = ParallelGroups(tensor=dist.group.WORLD)
    engine = small_engine(model=ms.models.HybridLM(small_config(), groups=groups))
    with Heartbeat(store, rank, ranks, timeout_s, exit_when_stuck=True) as heartbeat:
        for count in range(10**9):
            if count == ROUNDS and role == "raises":
                raise KeyError("what this rank cannot find")
            if count == ROUNDS and role in ("leaves", "stays"):
                break
            with heartbeat.naming_the_dead():
                engine.generate([random_tokens(20, seed) for seed in range(3)])
            if count == 0:
                print(SERVED, flush=True)
                if role.startswith("serves unread"):
                    _lead_to_a_full_pipe(role.split()[-1])
        if role == "stays":
            time.sleep(2 * timeout_s)
            heartbeat.check()
    print("ended well", flush=True)
