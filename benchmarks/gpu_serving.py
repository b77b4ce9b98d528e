"""How fast models are served, each figure beside its limit measured in the same run.

Parts, of each model:
    transformers   transformers' own forward of 4,096 tokens (sdpa, and fla-core where it is installed)
    prefill        512, 4,096 and 16,384 tokens, beside the model's products
    prefill_trace  the kernels of a prefill of 4,096 tokens
    checkpoints    a prefill of 4,096 tokens with a state at every block boundary, beside none
    decode         1, 8, 32 and 128 requests of 3,000 tokens by CUDA graph, beside bytes / copy bandwidth; the
                   time that the GPU idles between steps, and the kernels of a step
    rolling        decode steps that keep a rolling state a request, beside none
    cold           prompts that share nothing, cache on, beside caching switched off
    conversations  12 users x 4 turns, 1,024 shared and 400 tokens a turn, with and without cache

    python benchmarks/gpu_serving.py --json out.json                (one GPU of 80 GB; random weights)
    python benchmarks/gpu_serving.py --shape tiny --device cpu      (does it run?)

A forward's time is the GPU's, by events; a step's is the clock's. Times are medians.
"""

import argparse
import datetime
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from serving.conversations import measure_conversations
from serving.decode import measure_decodes, measure_rolling
from serving.limits import copy_bandwidth
from serving.models import MODELS, ServingModel, build
from serving.prefill import (
    PrefillBench,
    free,
    measure_checkpoints,
    measure_cold,
    measure_prefills,
    measure_transformers,
)
from serving.report import PRINTERS, list_requirements, print_part
from serving.trace import kernel_table, record
from support.command_line import add_count, add_device, make_parser

PARTS = tuple(PRINTERS)


def trace_prefill(served: ServingModel) -> dict[str, Any] | None:
    """The kernels of one prefill; None on a CPU."""
    if served.device.type != "cuda":
        return None
    bench = PrefillBench(served, served.lengths.compared)
    for _ in range(3):
        bench.run()
    launches = record(bench.run)
    span = max(launch.end for launch in launches) - launches[0].start
    idle, busy_until = 0, launches[0].end
    for launch in launches:
        idle += max(0, launch.start - busy_until)
        busy_until = max(busy_until, launch.end)
    table = kernel_table(launches)
    del bench
    free(served.device)
    return table | {"tokens": served.lengths.compared, "span_us": span / 1e3, "idle_us": idle / 1e3}


def parts_of(
    served: ServingModel, args: argparse.Namespace, bandwidth: float
) -> dict[str, Callable[[], Any]]:
    """How each part is measured, in order; the first must come before `served.serve`."""
    rows = tuple(args.rows) if args.rows else served.lengths.rows
    few = max(2, args.repeats // 3)
    return {
        "transformers": lambda: measure_transformers(served, args.repeats),
        "prefill": lambda: measure_prefills(served, args.repeats),
        "prefill_trace": lambda: trace_prefill(served),
        "checkpoints": lambda: measure_checkpoints(served, args.repeats),
        "decode": lambda: measure_decodes(served, bandwidth, rows, args.traced),
        "rolling": lambda: measure_rolling(served),
        "cold": lambda: measure_cold(served, few),
        "conversations": lambda: measure_conversations(served),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shape", choices=("full", "tiny"), default="full", help="(default: %(default)s)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="which (default: all)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="which parts (default: all)")
    parser.add_argument("--rows", nargs="+", type=int, help="how many requests decode at once")
    add_count(parser, "--traced", 100, "decode steps that are traced, of 1 and of 32 requests", at_least=0)
    add_device(parser, "cuda")
    add_count(parser, "--repeats", 9, "timed prefills of each", at_least=2)
    args = parser.parse_args()
    if args.device != "cpu" and not torch.cuda.is_available():
        print("nothing measured: this needs a GPU (or --shape tiny --device cpu)")
        return
    torch.set_num_threads(1)
    device = torch.device(args.device)
    if device.type == "cpu":  # transformers takes fla wherever it is installed, and fla needs a GPU
        sys.modules["fla"] = None  # type: ignore[assignment]
    started = time.perf_counter()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    bandwidth = copy_bandwidth(device)
    free(device)
    print(f"{name}, torch {torch.__version__}; a large copy moves {bandwidth / 1e9:,.0f} GB/s")
    document: dict[str, Any] = {
        "benchmark": "gpu_serving",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": name,
        "torch": torch.__version__,
        "shape": args.shape,
        "copy_bytes_per_s": bandwidth,
        "models": {},
    }
    failed: list[str] = []
    for model_name in args.models:
        try:
            served = build(model_name, args.shape, device)
        except ImportError as error:
            print(f"\n{model_name}: not measured, {error}")
            continue
        parts: dict[str, Any] = {
            "weight_bytes": served.weight_bytes,
            "embedding_and_weight_bytes": served.all_weight_bytes,
        }
        document["models"][model_name] = parts
        print(f"\n{model_name}: {served.all_weight_bytes / 1e9:.2f} GB of weights")
        for part, measure in parts_of(served, args, bandwidth).items():
            if part != "transformers":
                served.serve()
            if part not in args.only:
                continue
            begun = time.perf_counter()
            try:
                for figures in rows_of(measure()):
                    parts[part] = figures
                    document["requirements"] = list_requirements(document["models"])
                    if args.json is not None:  # now, so that a time limit loses no figure
                        args.json.write_text(json.dumps(document, indent=1) + "\n")
                    print(f"  ({part}: {time.perf_counter() - begun:.0f} s)", flush=True)
            except Exception:  # the other parts are still wanted
                traceback.print_exc()
                failed.append(f"{model_name}: {part}")
            free(device)
            if part in parts:
                print_part(part, parts[part])
        del served, measure
        free(device)
    print()
    for requirement in document.get("requirements", ()) if device.type == "cuda" else ():
        verdict = "met" if requirement["met"] else "NOT MET"
        print(
            f"  {verdict:8}{requirement['what']}: {requirement['value']:.4g}, at most {requirement['most']}"
        )
    print(f"{time.perf_counter() - started:.0f} s in all")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def rows_of(figures: Any) -> Iterator[Any]:
    """The figures of a part; row by row where they come so."""
    if isinstance(figures, Iterator):
        rows = []
        for row in figures:
            rows.append(row)
            yield rows
    elif figures is not None:
        yield figures


if __name__ == "__main__":
    main()
