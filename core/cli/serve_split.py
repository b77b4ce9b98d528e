"""`mambaslots serve` under torchrun: all ranks split the model, rank 0 serves, and the others follow."""

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from ..parallel_groups import ParallelGroups
from .setup import chosen_device, load_model, make_engine

if TYPE_CHECKING:
    from ..serve import ServerSettings

_SILENCE_S = 60.0


def is_under_torchrun() -> bool:
    """Whether this process is one of several ranks that torchrun has started."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "LOCAL_RANK" in os.environ


def serve_split(options: argparse.Namespace, settings: "ServerSettings") -> int:
    """Serve on rank 0 until it is told to stop, and follow on the others; returns the exit code."""
    from ..net import Heartbeat, LeadingEngine, RankDiedError, follow
    from ..replay.recorder import TraceRecorder
    from ..serve import serve

    with _joined_group(options) as groups, ExitStack() as stack:
        rank, size = groups.rank, groups.size
        if rank:  # torchrun's agent sends these to all ranks; rank 0 drains, and then ends the others
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
        loaded = load_model(options, groups)
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        try:
            heartbeat = stack.enter_context(
                Heartbeat(
                    PrefixStore(f"mambaslots serve {start}", store), rank, size,
                    timeout_s=_SILENCE_S, exit_when_stuck=True,
                )
            )  # fmt: skip
            if rank:
                follow(make_engine(loaded, options), heartbeat=heartbeat)
                return 0
            engine = make_engine(loaded, options, partial(LeadingEngine, heartbeat=heartbeat))
            assert isinstance(engine, LeadingEngine)
            stack.enter_context(engine)
            if options.record is not None:
                stack.enter_context(TraceRecorder(engine, options.record))
            return serve(engine, loaded, settings)
        except RankDiedError as error:
            print(f"mambaslots serve: {error}", file=sys.stderr)
            return 1


@contextmanager
def _joined_group(options: argparse.Namespace) -> Iterator[ParallelGroups]:
    """The ranks that torchrun has started, as the tensor group of one model."""
    on_gpus = chosen_device(options).type == "cuda"
    if on_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpus else "gloo")
    try:
        yield ParallelGroups(tensor=dist.group.WORLD)
    finally:
        dist.destroy_process_group()
