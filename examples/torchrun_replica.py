"""One rank of a replica, which serves a model split over all its ranks; `torchrun_serving.py` starts it.

    torchrun --nproc-per-node 2 examples/torchrun_replica.py NAME HOST:PORT

The replica takes orders over the store at HOST:PORT, which outlives the replica. Orders are numbered. Every
rank reads the same orders and makes the same calls; rank 0 answers. The ranks compare their decisions at each
step.
"""

import argparse
import json
import os
import time
from dataclasses import asdict
from datetime import timedelta
from itertools import count
from typing import Any

import mambaslots as ms
import mambaslots.net as msd
import torch
import torch.distributed as dist

CONFIG = ms.models.HybridConfig.tiny(torch.float64)
WEIGHTS = "seed 0"  # states of weights with another name are refused
FOREVER = timedelta(days=1)


def settings(**overrides: Any) -> ms.InferenceConfig:
    return ms.InferenceConfig(
        **{
            "block_size_tokens": 32, "max_requests": 8, "max_tokens_per_step": 512,
            "max_sequence_length": 2048,
            "num_kv_blocks": 512, "num_mamba_slots": 128,
        }
        | overrides
    )  # fmt: skip


class Replica:
    """This rank's engine; the methods are the orders that it takes."""

    def __init__(self, name: str, store: dist.Store) -> None:
        self.name = name
        self.store = store
        model = ms.models.HybridLM(CONFIG, seed=0, groups=ms.ParallelGroups(tensor=dist.group.WORLD))
        self.engine = ms.DynamicInferenceEngine(model, settings())
        self.engine.set_weights_version(WEIGHTS)

    def serve(self, prompts: list[list[int]], length: int) -> list[dict[str, Any]]:
        """Greedy answers of `length` tokens."""
        sampling = ms.SamplingParams(max_tokens=length)
        return [
            {
                "tokens": result.tokens,
                "resumed": result.num_resumed_tokens,
                "prompt": result.num_prompt_tokens,
            }
            for result in self.engine.generate(prompts, sampling)
        ]

    def send(self, hand_over: str, prefixes: list[list[int]], timeout_s: float) -> str:
        """Hand what is cached of `prefixes` to another replica; why that failed, or an empty text."""
        named = [(tokens, None) for tokens in prefixes]  # None: they were served without a salt
        with msd.TransferChannel(
            self.engine, self.store, hand_over, "source", timeout_s=timeout_s
        ) as channel:
            return channel.send(named).failure

    def receive(self, hand_over: str, timeout_s: float) -> dict[str, Any]:
        """Import what another replica hands over; the counts of what came, and the failure."""
        with msd.TransferChannel(
            self.engine, self.store, hand_over, "destination", timeout_s=timeout_s
        ) as channel:
            report = channel.receive()
        return {**asdict(report.imported), "failure": report.failure}


def address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", metavar="NAME", help="the replica's name in the store")
    parser.add_argument("address", metavar="HOST:PORT", type=address, help="where the store is")
    args = parser.parse_args()
    name, (host, port) = args.name, args.address
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    store = dist.TCPStore(host, port, is_master=False, timeout=FOREVER)
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
