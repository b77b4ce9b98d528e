"""megatron-core's engine serves conversations: without a cache, with its own, and with mambaslots dropped in.

A hybrid model with random weights is built with megatron-core and served by its DynamicInferenceEngine, in
chunks, several conversations at once. All runs are asked the same prompts: each turn sends again what was
said and answered before (in the first run without a cache), so that every answer can be judged by itself.

    python examples/mcore_dynamic_inference.py --conversations 4 --turns 3
    python examples/mcore_dynamic_inference.py --shape 8b --dtype bfloat16 --graphs both --conversations 8
    torchrun --nproc-per-node 2 examples/mcore_dynamic_inference.py      (the ranks share each layer's heads)

The first takes two minutes on a CPU, where `mcore_rig` lets megatron-core run. On a GPU, or with `--speed`,
there is also a run without a cache in steps of the others' size, and the runs are timed: in these each turn
sends again what the run itself has answered. In float32 the exit code is 1 if an answer with mambaslots
differs from the one without a cache. In bfloat16 other batches alone give other answers, so the script prints
how far apart the two best tokens were where two answers first differ.
"""

import argparse
import json
import logging
import sys

import mcore_rig
import torch
from arguments import add_count, add_device, check_device, make_parser
from conversation_texts import conversations
from mcore_report import figures, print_differences, print_machine, print_speed, print_table
from mcore_runs import LOADS, Host, Run, agree_on_all_ranks

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add_count(parser, "--conversations", 4, "conversations, served at a time")
    add_count(parser, "--turns", 3, "turns of each conversation")
    add_count(parser, "--seed", 0, "seed of the texts", at_least=0)
    choices = {"shape": tuple(mcore_rig.SHAPES), "dtype": tuple(DTYPES), "graphs": ("off", "on", "both")}
    texts = {
        "shape": "size of the model",
        "dtype": "of weights and states",
        "graphs": "CUDA graphs of decodes",
    }
    for name, accepted in choices.items():
        parser.add_argument(
            f"--{name}", choices=accepted, default=accepted[0], help=f"{texts[name]} (default: %(default)s)"
        )
    on_gpu = torch.cuda.is_available()
    add_device(parser, "cuda" if on_gpu else "cpu")
    parser.add_argument(
        "--speed",
        action=argparse.BooleanOptionalAction,
        default=on_gpu,
        help="measure times (default: on a GPU)",
    )
    add_count(parser, "--rounds", 1, "how often each run is timed")
    args = parser.parse_args()
    check_device(parser, args.device)
    if args.device == "cpu" and on_gpu:
        parser.error(
            "argument --device: 'cpu', and torch sees a GPU; accepted with CUDA_VISIBLE_DEVICES= set"
        )
    if args.graphs != "off" and (args.device == "cpu" or args.dtype == "float32"):
        parser.error(f"argument --graphs: {args.graphs!r}; accepted: off, unless on a GPU in bfloat16")
    return args


def report(args: argparse.Namespace, without: Run, runs: list[Run]) -> bool:
    """Print and write what the runs came to; whether mambaslots' answers are those without a cache."""
    print()
    if args.speed:
        print_machine(args, without)
        print_speed(without, runs)
        print_differences(without, runs)
    else:
        print_table(without, *runs)
    ours = (runs[-1].timed or runs)[-1]
    print(f"\nmambaslots.mcore.stats(context):\n  {ours.stats}")
    if args.json:
        args.json.write_text(json.dumps(figures(args, without, runs), indent=2) + "\n")
    identical = all(run.identical(without) == run.requests for run in runs if run.name == "mambaslots")
    if args.dtype == "float32":
        print(f"outputs identical: {'yes' if identical else 'no'}")
    return identical


def main() -> int:
    args = parse_arguments()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # of megatron-core
    users = conversations(args.conversations, args.turns, args.seed)
    identical = True
    with mcore_rig.on_this_machine():
        model = mcore_rig.hybrid_model(dtype=DTYPES[args.dtype], shape=mcore_rig.SHAPES[args.shape])
        host = Host(model, users, LOADS[args.shape])
        without = host.reference()
        runs: list[Run] = []
        for graphs in {"off": (False,), "on": (True,), "both": (False, True)}[args.graphs]:
            runs += (
                host.measured(without, graphs, args.rounds) if args.speed else host.cached(without, graphs)
            )
        agree_on_all_ranks([without, *runs])
        if host.rank == 0:
            identical = report(args, without, runs)
        mcore_rig.use_cuda_graphs(model, False)
    return 0 if identical or args.dtype == "bfloat16" else 1


if __name__ == "__main__":
    sys.exit(main())
