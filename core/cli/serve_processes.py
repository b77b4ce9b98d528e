"""`mambaslots serve` in several processes: replicas, and the ranks of torchrun."""

import argparse
import hashlib
import json
import os
import secrets
import signal
import sys
import time
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ..fleet.fleet_settings import FleetSettings, check_installed
from ..inference.contexts.cache.hashing import ENVIRONMENT_NAME
from ..inference.engines.dynamic_engine import DynamicInferenceEngine
from ..loaded_model import load_text
from ..net import LeadingEngine, follow
from ..net.all_ranks import RankDiedError
from ..parallel_groups import ParallelGroups
from ..serve import ServerSettings
from .engine_setup import chosen_device, load_model, make_engine
from .options import chosen_model

_SAMPLE_BYTES = 1 << 16
_POLL_INTERVAL_S = 0.5
_ENDING_S = 5.0
"""Requests have so long to end with an error once a rank is lost, and then a report has so long."""


@dataclass(frozen=True)
class ReplicaEngineFactory:
    """Makes the engine of a replica from a command line; can be pickled. `salt_key` is never shown."""

    options: argparse.Namespace
    salt_key: str

    def __call__(self, groups: ParallelGroups | None = None) -> DynamicInferenceEngine:
        """The engine, in the process that runs it."""
        os.environ[ENVIRONMENT_NAME] = self.salt_key
        folder, cache = chosen_model(self.options)
        loaded = load_model(self.options, folder, groups)
        is_leader = groups is not None and groups.is_split and not groups.rank
        kind = LeadingEngine if is_leader else DynamicInferenceEngine
        engine = make_engine(loaded, self.options, cache, kind)
        engine.set_weights_version(weights_version(loaded.folder))
        return engine

    def __repr__(self) -> str:
        return f"<ReplicaEngineFactory of {self.options.model}>"


def weights_version(folder: Path) -> str:
    """A digest of a model's files: names, sizes, and 64 KiB from the start, the middle and the end.

    Two models that differ in other bytes alone are taken for one; training changes all.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix not in (".safetensors", ".bin", ".json") or not path.is_file():
            continue
        size = path.stat().st_size
        digest.update(json.dumps([path.name, size]).encode())
        with path.open("rb") as file:
            for start in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
                file.seek(start)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def serve_replicated(options: argparse.Namespace, settings: ServerSettings, folder: Path) -> int:
    """Serve with replicas on Ray until a signal; returns the exit code. `folder`: of the model, here."""
    check_installed()
    from ..fleet.fleet_server import serve_replicas

    fewest, most = options.replicas or (1, 1)
    options.max_requests = options.max_requests or FleetSettings.max_requests
    fleet = FleetSettings(
        model_name=settings.model_name, trace=settings.trace, min_replicas=fewest, max_replicas=most,
        ranks=options.tp or 1, ingresses=options.ingresses or 1, max_requests=options.max_requests,
        drain_timeout_s=options.drain_timeout_s,
    )  # fmt: skip
    salt_key = os.environ.get(ENVIRONMENT_NAME) or secrets.token_hex(32)
    load_text(folder)  # a faulty one is refused here
    text = partial(load_text, options.model)  # other machines find or download it themselves
    make = ReplicaEngineFactory(_only_data(options), salt_key)
    return serve_replicas(make, text, salt_key, settings, fleet, device=options.device)


def _only_data(options: argparse.Namespace) -> argparse.Namespace:
    """The options without secrets, for another process."""
    values = {name: value for name, value in vars(options).items() if name not in ("run", "api_keys")}
    return argparse.Namespace(**values)


def serve_split(
    options: argparse.Namespace, settings: ServerSettings, folder: Path, cache: dict[str, Any]
) -> int:
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
        if groups.rank:  # torchrun's agent sends these to all ranks; rank 0 drains, and then ends the others
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
        loaded = load_model(options, folder, groups)
        try:
            if groups.rank:
                follow(make_engine(loaded, options, cache))
                return 0
            engine = make_engine(loaded, options, cache, LeadingEngine)
            assert isinstance(engine, LeadingEngine)
            stack.enter_context(engine)
            Thread(target=_end_when_lost, args=[engine], daemon=True).start()
            with nullcontext() if options.record is None else TraceRecorder(engine, options.record):
                status = serve(engine, loaded, settings)
            engine.check_ranks()
            if engine.core.broken_by is None:  # nccl ends no communicator that a CUDA graph has captured
                engine.suspend()
            return status
        except RankDiedError as error:
            _end_process(error)


def _end_when_lost(engine: LeadingEngine) -> None:
    """Once a rank is lost, end the server, and 5 s later the process: torchrun then ends the other ranks."""
    while True:
        time.sleep(_POLL_INTERVAL_S)
        try:
            engine.check_ranks()
        except RankDiedError as error:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(_ENDING_S)
            _end_process(error)


def _end_process(error: RankDiedError) -> NoReturn:
    """End with status 1, whatever hangs: a collective, the groups' end, or a pipe that is not read."""
    text = f"mambaslots serve: {error}"
    report = Thread(target=print, args=[text], kwargs={"file": sys.stderr, "flush": True}, daemon=True)
    report.start()
    report.join(_ENDING_S)
    os._exit(1)
