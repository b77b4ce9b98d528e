"""Two pipeline stages, each a process of its own; test_pipeline_stages.py starts them and compares.

    python pipeline_stage.py FOLDER ours stock engine WEIGHTS PATTERN

With "ours" or "stock": contexts alone, of models of a few layers, with mambaslots or megatron-core's own
class. With "engine": an engine with its stage of the model of this pattern.

Writes what each stage saw, as JSON, into FOLDER/output_of_stage_RANK, and its errors into another. A stage
whose peer has failed, or that takes too long, is ended. Classes and process group are megatron-core's own.
"""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import mambaslots.mcore
import mcore_rig
import torch
from mambaslots.mcore.recurrence import BLOCK, MODES, SERIES, RecurrenceDriver, make_context, tokens
from mcore_rig import cpu_as_gpu, free_blocks, num_blocks
from megatron.core import parallel_state

Options = tuple[dict[str, Any], dict[str, Any]]
SHARE: dict[str, Any] = {"mamba_memory_ratio": 0.1}

SERVED: dict[str, Options] = {
    "budgets": ({"slots": 20, "blocks": 64}, {"slots": 5, "blocks": 40}),
    "layer counts": ({"layers": "M**", "slots": 20}, {"layers": "MM*", "slots": 20}),
    "shares of memory": (SHARE | {"layers": "M**"}, SHARE | {"layers": "MM*"}),
    "a budget on one stage": ({}, {"prefix_caching_mamba_gb": None}),
    "no Mamba layers on one": ({"layers": "M*"}, {"layers": "*-"}),
    "no Mamba layers and no budget": ({"prefix_caching_mamba_gb": 0, "layers": "*-"}, {"layers": "M*"}),
}
"""How the two stages differ."""

SERVED_BY_STOCK = tuple(SERVED) if SERIES == "0.19" else ("budgets", "layer counts", "shares of memory")
"""Those that megatron-core alone gets to the end of; in the others stages of 0.20 wait for each other."""

REFUSED: dict[str, Options] = {
    "no room for a state": ({}, {"prefix_caching_mamba_gb": 1e-7}),
    "no room for the requests": ({}, {"layers": "MMMM*-", "blocks": 0}),
    "layers not said": ({}, {"mamba_inference_state_config": None}),
    "requests not said": (SHARE, SHARE | {"layers": "*-"}),
    "no attention layers": ({}, {"layers": "M-"}),
}


@dataclass
class Watched(RecurrenceDriver):
    """Notes before every step what stages must have in common."""

    seen: list[Any] = field(default_factory=list)

    def step(self, *arguments: Any, **named: Any) -> Any:
        context, slots = self.context, self.context.mamba_slot_allocator
        kv = context.kv_block_allocator
        states = [] if slots is None else sorted(slots.hash_to_block_id)
        hashes = sorted(kv.kv_hash_to_block_id)
        self.seen.append([context.active_token_count, free_blocks(context), hashes, states])
        return super().step(*arguments, **named)


def serve_context(options: dict[str, Any]) -> dict[str, Any]:
    """Prompts, branches of them and the prompts again: more states than the poorer stage has slots.

    Then the prompts after a suspend, which forgets everything.
    """
    context = make_context(stages=2, kv_cache_management_mode=MODES.RECOMPUTE, **options)
    host = Watched(context)
    whole = [tokens(4 * BLOCK + 5, seed) for seed in range(3)]
    branches = [prompt[: 2 * BLOCK] + tokens(BLOCK + 6, 10 + i) for i, prompt in enumerate(whole)]
    resumed = [host.serve(prompt)[0] for prompt in [*whole, *branches, *whole[::-1]]]
    context.deallocate_inference_state_buffers()
    context.reinitialize_inference_state_buffers()
    resumed += [host.serve(prompt)[0] for prompt in [*whole, *whole]]
    slots = context.mamba_slot_allocator
    return {
        "slots": None if slots is None else slots.max_slots,
        "blocks": num_blocks(context),
        "requests": context.max_requests,
        "resumed": resumed,
        "seen": host.seen,
    }


def reports(rank: int, cases: Mapping[str, Options]) -> dict[str, Any]:
    """What this stage saw of each case, or its error."""

    def report(options: Options) -> Any:
        try:
            return serve_context(options[rank])
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    with cpu_as_gpu():
        return {name: report(options) for name, options in cases.items()}


def engine(pattern: str, weights: str) -> dict[str, Any]:
    """Answers, where they resumed, and which states are left; `weights`: a file with the whole model's."""
    with mcore_rig.on_this_machine(), mambaslots.mcore.installed():
        model = mcore_rig.hybrid_model(pattern)
        mcore_rig.load_stage(model, torch.load(weights))
        made = mcore_rig.make_engine(model, num_mamba_slots=3)
        served = mcore_rig.serve(made, prompts(), new_tokens=2)
    return {
        "answers": [one.tokens for one in served],
        "resumed": [one.num_resumed_tokens for one in served],
        "states": sorted(made.context.mamba_slot_allocator.hash_to_block_id),
    }


def prompts() -> list[list[int]]:
    """One, another, the first again, and a branch of it."""
    size = mcore_rig.BLOCK
    first, other = ([token % 256 for token in tokens(2 * size + 9, seed)] for seed in (1, 2))
    return [first, other[: size + 4], first, first[: 2 * size] + other[:5]]


LIMIT_SECONDS, PEER_SECONDS = 200.0, 5.0  # of both stages; of one after the other has failed


def run_stage(rank: int, folder: Path, *what: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(folder / "store"), 2), rank=rank, world_size=2,
        timeout=timedelta(minutes=1),
    )  # fmt: skip
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, distributed_timeout_minutes=1)
    report: dict[str, Any] = {}
    if "ours" in what:
        with mambaslots.mcore.installed():
            report["ours"] = reports(rank, SERVED | REFUSED)
    if "stock" in what:  # those that megatron-core alone gets to the end of
        report["stock"] = reports(rank, {name: SERVED[name] for name in SERVED_BY_STOCK})
    if "engine" in what:
        *_, weights, pattern = what
        report["engine"] = engine(pattern, weights)
    (folder / f"output_of_stage_{rank}").write_text(json.dumps(report))


def begin(rank: int, folder: Path, *what: str) -> int:
    """Fork a stage, which shares what is imported, and return its process id."""
    if process := os.fork():
        return process
    status = 1
    try:
        os.dup2(os.open(folder / f"errors_of_stage_{rank}", os.O_WRONLY | os.O_CREAT), 2)
        run_stage(rank, folder, *what)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def main(folder: str, *what: str) -> int:
    stages = {begin(rank, Path(folder), *what) for rank in range(2)}
    end, failed = time.monotonic() + LIMIT_SECONDS, False
    while stages and time.monotonic() < end:
        process, status = os.waitpid(-1, os.WNOHANG)
        if status:
            failed, end = True, min(end, time.monotonic() + PEER_SECONDS)
        stages.discard(process)
        time.sleep(0.05)
    for process in stages:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    return int(failed or bool(stages))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
