"""`mambaslots serve` in several processes: replicas, and the ranks of torchrun."""

import argparse
import hashlib
import json
import os
import signal
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from ..inference.contexts.cache.hashing import ENVIRONMENT_NAME
from ..inference.engines.dynamic_engine import DynamicInferenceEngine
from ..net import Heartbeat, LeadingEngine, follow
from ..net.heartbeat import RankDiedError
from ..parallel_groups import ParallelGroups
from ..serve import ServerSettings
from .setup import chosen_device, load_model, make_engine

_SAMPLE_BYTES = 1 << 16
_SUFFIXES = (".safetensors", ".bin", ".json")
_SILENCE_S = 60.0


@dataclass(frozen=True)
class ReplicaEngine:
    """Makes the engine of a replica from a command line; can be pickled. `salt_key` is never shown."""

    options: argparse.Namespace
    salt_key: str

    def __call__(self, groups: ParallelGroups | None = None) -> DynamicInferenceEngine:
        """The engine, in the process that runs it."""
        os.environ[ENVIRONMENT_NAME] = self.salt_key
        loaded = load_model(self.options, groups)
        leads = groups is not None and groups.is_split and not groups.rank
        engine = make_engine(loaded, self.options, LeadingEngine if leads else DynamicInferenceEngine)
        engine.set_weights_version(weights_version(loaded.folder))
        return engine

    def __repr__(self) -> str:
        return f"<ReplicaEngine of {self.options.model}>"


def weights_version(folder: Path) -> str:
    """A digest of a checkpoint's files: names, sizes, and 64 KiB from the start, the middle and the end.

    Two checkpoints that differ in other bytes alone are taken for one; training changes all.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix not in _SUFFIXES or not path.is_file():
            continue
        size = path.stat().st_size
        digest.update(json.dumps([path.name, size]).encode())
        with path.open("rb") as file:
            for start in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
                file.seek(start)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def is_under_torchrun() -> bool:
    """Whether this process is one of several ranks that torchrun has started."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "LOCAL_RANK" in os.environ


def serve_split(options: argparse.Namespace, settings: ServerSettings) -> int:
    """Serve on rank 0 until a signal, and follow on the others; returns the exit code."""
    from ..replay.recorder import TraceRecorder
    from ..serve import serve

    with ExitStack() as stack:
        on_gpus = chosen_device(options).type == "cuda"
        if on_gpus:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if on_gpus else "gloo")
        stack.callback(dist.destroy_process_group)
        groups = ParallelGroups(tensor=dist.group.WORLD)
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
            engine: Any = make_engine(loaded, options, partial(LeadingEngine, heartbeat=heartbeat))
            stack.enter_context(engine)
            if options.record is not None:
                stack.enter_context(TraceRecorder(engine, options.record))
            return serve(engine, loaded, settings)
        except RankDiedError as error:
            print(f"mambaslots serve: {error}", file=sys.stderr)
            return 1
