"""What it costs that tensor ranks add in the order of the ranks: beside plain all-reduces.

    python benchmarks/ordered_sums.py --ranks 4                            (GPUs with NCCL)
    python benchmarks/ordered_sums.py --ranks 4 --device cpu --shape tiny  (gloo)

HybridLM in the shape of Nemotron-H-8B, split over the ranks: 52 sums a step. Both orders of the sums are
measured in turns. The sums of two ranks have one order, so that `--ranks 2` measures the same twice.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import replace

import mambaslots as ms
import torch
import torch.distributed as dist
from promise.costs import TURNS, works_of
from serving.models import FULL, HYBRID_SHAPES, PATTERN, TINY, TINY_LAYERS, ServingModel
from serving.prefill import free
from support.command_line import add_count, add_device, check_device, make_parser


def measure(args: argparse.Namespace, device: torch.device) -> list[dict[str, float | str]]:
    """For each work: milliseconds with sums as they come and in order, and their ratio."""
    full = args.shape == "full"
    lengths = replace(FULL if full else TINY, steps=args.steps)
    served = {}
    for name in ("off", "on"):
        groups = ms.ParallelGroups(tensor=dist.group.WORLD, ordered_sums=name == "on")
        config = ms.models.HybridConfig(
            pattern=PATTERN if full else PATTERN[: 2 * TINY_LAYERS],
            dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
            **HYBRID_SHAPES["8b" if full else "tiny"],
        )
        model = ms.models.HybridLM(config, seed=0, device=device, groups=groups)
        served[name] = ServingModel("HybridLM-8B", device, lengths, model, [], model.lm_head, 0, 0)
    rows = []
    for work in works_of(served["on"])[: args.works]:
        times: dict[str, list[float]] = {"off": [], "on": []}
        for turn in TURNS:
            times[turn].append(work.measure(served[turn]))
            free(device)
        off, on = (statistics.median(times[name]) for name in ("off", "on"))
        rows.append({"what": work.name, "unordered_ms": off, "ordered_ms": on, "ratio": on / off})
        if dist.get_rank() == 0:
            print(f"{work.name:24s} {off:9.3f} ms, in order {on:9.3f} ms: {on / off - 1:+.2%}", flush=True)
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shape", choices=("full", "tiny"), default="full", help="(default: %(default)s)")
    add_count(parser, "--ranks", 4, "GPUs, or processes of a CPU")
    add_count(parser, "--steps", 128, "of each decode")
    add_count(parser, "--works", 5, "of prefill and decodes, only the first ones")
    add_device(parser, "cuda")
    args = parser.parse_args()
    check_device(parser, args.device)
    if args.device == "cuda" and torch.cuda.device_count() < args.ranks:
        sys.exit(print(f"nothing measured: GPUs here: {torch.cuda.device_count()}, --ranks {args.ranks}"))
    if "RANK" not in os.environ:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
        sys.exit(subprocess.run([sys.executable, *torchrun, *sys.argv], check=False).returncode)
    torch.set_num_threads(1)
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rows = measure(args, device)
    if args.json is not None and dist.get_rank() == 0:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        figures = {
            "benchmark": "ordered_sums",
            "device": name,
            "ranks": args.ranks,
            "torch": torch.__version__,
        }
        args.json.write_text(json.dumps(figures | {"works": rows}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
