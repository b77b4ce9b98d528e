"""Do answers depend on anything but their requests? Tokens, and bits of log-probs, under many conditions.

The same requests are served under every condition: alone, in a batch, eagerly and by CUDA graph, with a cache
that is empty or full, cut at every grid point, with drafts, preempted, beside random traffic, as prompts of
later turns, in another engine and in another process. Each is compared with the request alone.

    python benchmarks/bits.py --json out.json                     (one GPU of 80 GB: batch_invariant=True)
    python benchmarks/bits.py --device cpu --shape tiny           (float64: decode_by_replay=True)

Two machines of one kind: `--models MODEL --only batch --answers FILE` on one, `--expected FILE` on the other.

Columns: requests and log-probs (positions) that were compared; requests, tokens and log-probs that differ;
bits in which the float32 numbers of log-probs differ; the largest difference; seconds. On a CPU, log-probs
differ where they are more than 1e-9 apart.

Further parts: `off` serves the requests in batches with the setting off, without and with a cache. `costs`
measures prefills and decodes with the setting and without it, in turns. `replay` measures decodes by replay
beside decodes that update the state at each token.
"""

import argparse
import datetime
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from promise.answers import HEADING, Answer, read_answers, total, write_answers
from promise.bench import BitsBench
from promise.conditions import CONDITIONS, without_setting
from promise.costs import cost_line, measure_costs, measure_replay, replay_line
from promise.traffic import FULL, SMALL
from serving.limits import copy_bandwidth
from serving.models import MODELS, ServingModel, build
from serving.prefill import free
from support.command_line import add_count, add_device, check_device, make_parser

PARTS = (*CONDITIONS, "off", "costs", "replay")
PACKAGES = ("torch", "triton", "transformers", "fla-core", "tokenspeed-fa3")
TOLERANCE_OF_CPU = 1e-9


class Measurement:
    """The parts of one model, whose figures are written after every row."""

    def __init__(
        self,
        served: ServingModel,
        args: argparse.Namespace,
        figures: dict[str, Any],
        save: Callable[[], None],
    ) -> None:
        self._served, self._args, self._figures, self._save = served, args, figures, save
        on_gpu = served.device.type == "cuda"
        self._settings = {"batch_invariant": True} if on_gpu else {"decode_by_replay": True}
        self._sizes = FULL if args.shape == "full" else SMALL
        self._tolerance = 0.0 if on_gpu else TOLERANCE_OF_CPU

    def run(self) -> None:
        """Measure the parts that were asked for."""
        wanted = self._args.only
        if any(group in wanted for group in CONDITIONS):
            self._compare(wanted)
        if "off" in wanted:
            without_setting(self._bench("off", {"batch_invariant": False}, []))
        if "costs" in wanted:
            for row in measure_costs(self._served, self._settings, self._args.steps):
                self._add("costs", row, cost_line(row))
        if "replay" in wanted:
            bandwidth = copy_bandwidth(self._served.device)
            free(self._served.device)
            rows = tuple(self._args.rows)
            for row in measure_replay(self._served, bandwidth, rows, self._args.steps):
                self._add("replay", row, replay_line(row))

    def _add(self, part: str, row: dict[str, Any], line: str) -> None:
        self._figures.setdefault(part, []).append(row)
        print(line, flush=True)
        self._save()

    def _bench(self, part: str, settings: dict[str, Any], expected: list[Answer]) -> BitsBench:
        bench = BitsBench(
            self._served,
            self._sizes,
            settings,
            tolerance=self._tolerance,
            deadline=time.perf_counter() + self._args.seconds,
            report=lambda row: self._add(part, asdict(row), row.line()),
        )
        bench.expected = expected
        bench.arguments = ["--shape", self._args.shape, "--device", self._args.device]
        return bench

    def _compare(self, wanted: list[str]) -> None:
        """Serve the requests alone, then under each condition."""
        given = self._args.expected
        bench = self._bench("comparisons", self._settings, read_answers(given) if given else [])
        print(HEADING)
        if not given:
            seconds = bench.serve_alone()
            positions = sum(len(one.log_probs) + len(one.prompt_log_probs) for one in bench.expected)
            print(
                f"alone: {len(bench.requests)} requests, {positions:,} positions, {seconds:.1f} s", flush=True
            )
            bench.free()
        if self._args.answers:
            write_answers(self._args.answers, bench.expected)
        self._figures["description"] = bench.description
        for group, condition in CONDITIONS.items():
            if group in wanted and not bench.late:
                try:
                    condition(bench)
                except Exception:  # the other conditions are still wanted
                    traceback.print_exc()
                    self._figures.setdefault("failed", []).append(group)
                bench.free()
                whole = total(bench.rows)
                self._figures["total"] = asdict(whole)
                self._save()
        print(whole.line())
        if bench.cuts:
            longest = max(len(request.prompt) for request in bench.requests)
            points = range(bench.grid, longest, bench.grid)
            figures = {"points": len(points), "cut_at": len(bench.cuts & set(points))}
            self._figures["grid"] = figures
            print(f"prompts were cut at {figures['cut_at']} of {figures['points']} grid points")
            self._save()
        if bench.late:
            print("the time limit came; the conditions that are left were not served")


def versions() -> dict[str, str]:
    """Of the packages whose kernels serve; those that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shape", choices=("full", "tiny"), default="full", help="(default: %(default)s)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="which (default: all)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="which parts (default: all)")
    parser.add_argument("--expected", type=Path, help="answers that another process or machine has written")
    parser.add_argument("--answers", type=Path, help="write them, of one model, to this file")
    parser.add_argument("--rows", nargs="+", type=int, default=(1, 32, 128), help="requests of `replay`")
    add_count(parser, "--seconds", 10_000, "after which no further condition of a model is served")
    add_count(parser, "--steps", 256, "decode steps of each cost; a multiple of the chunk")
    add_device(parser, "cuda")
    args = parser.parse_args()
    if args.answers and len(args.models) > 1:
        parser.error("--answers: write the answers of one of --models at a time")
    check_device(parser, args.device)
    torch.set_num_threads(1)
    device = torch.device(args.device)
    if device.type == "cpu":  # transformers takes fla wherever it is installed, and fla needs a GPU
        sys.modules["fla"] = None  # type: ignore[assignment]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    document: dict[str, Any] = {
        "benchmark": "bits",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": name,
        "versions": versions(),
        "shape": args.shape,
        "models": {},
    }

    def save() -> None:
        if args.json is not None:
            args.json.write_text(json.dumps(document, indent=1) + "\n")

    print(f"{name}; " + ", ".join(f"{package} {number}" for package, number in versions().items()))
    failed: list[str] = []
    for model in args.models:
        started = time.perf_counter()
        try:
            served = build(model, args.shape, device, torch.float64)
        except ImportError as error:
            print(f"\n{model}: not measured, {error}")
            continue
        served.serve()
        print(f"\n{model}")
        figures = document["models"][model] = {}
        Measurement(served, args, figures, save).run()
        differing = figures.get("total", {}).get("differing_requests", 0)
        failed += [f"{model}: {differing} answers differ"] if differing else []
        failed += [f"{model}: {group}" for group in figures.get("failed", ())]
        figures["seconds"] = time.perf_counter() - started
        save()
        del served
        free(device)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
