"""One rank of a replica that serves a model split over all its ranks; `torchrun_serving.py` starts it.

    torchrun --nproc-per-node 2 examples/torchrun_replica.py NAME HOST:PORT

HOST:PORT is a store that outlives the replica. Orders come in over it, numbered; every rank reads the same
orders and makes the same calls, and rank 0 answers. The ranks compare their decisions at every step.
"""

import json
import os
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from itertools import count
from typing import Any

import mambaslots as ms
import mambaslots.distributed as msd
import torch
import torch.distributed as dist

CONFIG = ms.models.HybridConfig.tiny(torch.float64)
WEIGHTS = "seed 0"  # named, so that states of other weights are refused
FOREVER = timedelta(days=1)


def settings(**overrides: Any) -> ms.InferenceConfig:
    return ms.InferenceConfig(
        **{
            "block_size_tokens": 32, "max_requests": 8, "max_tokens": 512, "max_sequence_length": 2048,
            "num_kv_blocks": 512, "num_mamba_slots": 128,
        }
        | overrides
    )  # fmt: skip


class Replica:
    """This rank's engine, and the orders it takes."""

    def __init__(self, name: str, store: dist.Store) -> None:
        self.name = name
        self.store = store
        model = ms.models.HybridLM(CONFIG, seed=0, groups=ms.ParallelGroups(tensor=dist.group.WORLD))
        self.engine = ms.DynamicInferenceEngine(model, settings())
        self.engine.set_weights_version(WEIGHTS)
        decisions = dist.PrefixStore(f"decisions of {name}", store)
        msd.Agreement(self.engine.context, decisions, dist.get_rank(), dist.get_world_size())

    def serve(self, prompts: list[list[int]], length: int) -> list[dict[str, Any]]:
        """Greedy answers of `length` tokens."""
        sampling = ms.SamplingParams(num_tokens_to_generate=length)
        return [
            {
                "tokens": result.tokens,
                "resumed": result.num_resumed_tokens,
                "prompt": result.num_prompt_tokens,
            }
            for result in self.engine.generate(prompts, sampling)
        ]

    def send(self, hand_over: str, prefixes: list[list[int]], timeout_s: float) -> str:
        """Hand what is cached of `prefixes` to the replica that receives under this name; how it failed."""
        named = [(tokens, None) for tokens in prefixes]  # None: without a salt, as they were served
        return msd.send_prefixes(self.engine, self.store, hand_over, named, timeout_s=timeout_s).failure

    def receive(self, hand_over: str, timeout_s: float) -> dict[str, Any]:
        report = msd.receive_prefixes(self.engine, self.store, hand_over, timeout_s=timeout_s)
        return {**asdict(report.imported), "failure": report.failure}


def main() -> None:
    name, address = sys.argv[1:]
    host, port = address.split(":")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    store = dist.TCPStore(host, int(port), is_master=False, timeout=FOREVER)
    rank = dist.get_rank()
    store.set(f"{name}/pid/{rank}", str(os.getpid()))
    replica = Replica(name, store)
    for number in count():
        order, arguments = json.loads(store.get(f"{name}/order/{number}"))
        if order == "stop":
            break
        started = time.perf_counter()
        answer = getattr(replica, order)(**arguments)
        if rank == 0:
            store.set(f"{name}/answer/{number}", json.dumps([answer, time.perf_counter() - started]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
