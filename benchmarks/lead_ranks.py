"""What it costs that one rank leads: the time of a step without requests, in microseconds.

    python benchmarks/lead_ranks.py --ranks 2

Rank 0 leads, and calls from its main thread and from another one, as an AsyncEngine does. A step is sent in
one message to each follower, and rank 0 waits for the answers to the step before. The last row is an engine
of one process: what a step without requests costs itself. The fastest round and the median; CPU, gloo.
"""

import argparse
import os
import statistics
import subprocess
import sys
import threading
import time

import mambaslots as ms
import mambaslots.net as msd
import torch
import torch.distributed as dist

CONFIG = ms.InferenceConfig(block_size_tokens=32, num_kv_blocks=32, num_mamba_slots=8)


def step_us(engine: ms.DynamicInferenceEngine, steps: int, rounds: int) -> tuple[float, float]:
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        for _ in range(steps):
            engine.step()
        times.append((time.perf_counter() - begun) / steps * 1e6)
    return min(times), statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100, help="of a round")
    parser.add_argument("--rounds", type=int, default=51)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
        sys.exit(subprocess.run([sys.executable, *torchrun, *sys.argv], check=False).returncode)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = ms.ParallelGroups(tensor=dist.group.WORLD)
    model = ms.models.HybridLM(ms.models.HybridConfig.tiny(), seed=0, groups=groups)
    if dist.get_rank():
        msd.follow(ms.DynamicInferenceEngine(model, CONFIG))
    else:
        with msd.LeadingEngine(model, CONFIG) as engine:
            rows = {"leads, called from the main thread": step_us(engine, options.steps, options.rounds)}

            def call() -> None:
                rows["leads, called from another thread"] = step_us(engine, options.steps, options.rounds)

            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
        whole = ms.DynamicInferenceEngine(ms.models.HybridLM(ms.models.HybridConfig.tiny(), seed=0), CONFIG)
        rows["one process"] = step_us(whole, options.steps, options.rounds)
        for name, (fastest, median) in rows.items():
            print(f"{name:40s} {fastest:8.1f} us a step, median {median:8.1f}, {dist.get_world_size()} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
