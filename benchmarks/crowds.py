"""What does a step cost in a crowd: many requests waiting, long contexts, large vocabularies, large pools?

A row runs the same work twice: "small" and "large" differ in one size. "times" is large / small, and
"at most" is the target for it. Figures are medians of repeats that take turns, in milliseconds of CPU time of
this process, with one torch thread and without garbage collection. The model is a stub that computes
nothing, so the figures are bookkeeping and sampling alone. A row without "at most" is reported, not judged.

queue       a decode step of 32 requests, `cancel` of a random waiting request, and the first step after many
            such calls, by requests waiting
generate    `generate` of prompts of 32 tokens, 8 new tokens each, 8 at once: time per request, by prompts
burst       requests that share one document which is not cached arrive together; 5 others decode. Until all
            have their one token, and until the first of them has it: the median ("small") and the slowest
            ("large") of the steps that prefill. "add_request" compares its first calls with its last
length      a decode step of 256 short requests, by `max_sequence_length`
drafts      a decode step of 32 requests with 4 n-gram drafts each, by tokens of context. "repeated": answers
            repeat one token, and drafts are right; "random": most drafts are wrong
sampling    `sample` of 64 rows of 131,072 logits. "flat": the logits of a row differ little; "peaked": 1,024
            candidates of a row hold the probability
launches    kernels that `sample` of 8 and of 64 mixed rows launches on a GPU; judged is the larger number
pools       a step in which the model raises, the step after it, `set_weights_version`, and the slowest of
            the 20 steps after it, by KV blocks; all blocks are cached, 4 requests decode (block 4)
long head   a decode step of 32 requests without and with a prompt at the head of the queue that does not fit
            the pool now; half of it is cached

A block has 16 tokens where nothing else is said. A measurement that uses up `--budget` ends: the row then
says how many times at least, and the other rows of its case are left out. The script exits with 1 where a
target is missed. `--quick` takes small sizes, for a test of this script, and judges nothing.
"""

import datetime
import gc
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
from chunk_metadata import processor
from crowd.cases import CASES, Case
from crowd.rows import HEADER, OVER_BUDGET, QUICK, Bench, OverBudget, Row, Sizes
from support.command_line import add_count, make_parser

MAX_REPEATS = 300  # answers are long enough


def measured(case: Case, bench: Bench) -> Iterator[Row]:
    """The rows of a case, up to one that is over the budget."""
    bench.start_budget()
    try:
        for row in case(bench):
            bench.stop_budget()
            yield row
            if row.at_least or row.note == OVER_BUDGET:
                return
            bench.start_budget()
    except OverBudget:
        yield Row(f"{case.__name__}: what is left of it", None, None, note=OVER_BUDGET)
    finally:
        bench.stop_budget()
        gc.collect()


def commit() -> str | None:
    """The last commit of the package that is measured; None outside a checkout."""
    core = Path(__file__).parents[1] / "core"
    git = partial(subprocess.run, cwd=core, capture_output=True, text=True, check=False)
    changed = git(["git", "status", "--porcelain", "."]).stdout
    found = git(["git", "log", "-1", "--format=%h", "."]).stdout.strip()
    return found + " and changes" * bool(changed) if found else None


def main() -> int:
    parser = make_parser(__doc__)
    add_count(parser, "--repeats", 101, "timed calls of each; fewer of long ones")
    add_count(parser, "--budget", 120, "seconds of a measurement, and of a case's preparation")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="default: all")
    parser.add_argument("--quick", action="store_true", help="small sizes; judges nothing")
    arguments = parser.parse_args()
    if arguments.repeats > MAX_REPEATS:
        parser.error(f"--repeats is {arguments.repeats}; accepted: 1 to {MAX_REPEATS}")
    torch.set_num_threads(1)
    bench = Bench(QUICK if arguments.quick else Sizes(), arguments.repeats, arguments.budget)
    revision = commit()
    print(f"median ms of CPU time, {arguments.repeats} repeats, fewer of long calls; core at {revision}\n")
    print(HEADER)
    report = []
    for case in arguments.cases:
        for row in measured(CASES[case], bench):
            print(row, flush=True)
            report.append({"case": case} | asdict(row) | {"ratio": row.ratio, "met": row.met})
    if arguments.json is not None:
        figures = {
            "benchmark": "crowds",
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": revision,
            "machine": {
                "platform": platform.platform(),
                "processor": processor(),
                "cores": os.cpu_count(),
                "torch_threads": 1,
            },
            "versions": {
                "python": sys.version.split()[0],
                "torch": torch.__version__,
                "numpy": np.__version__,
            },
            "repeats": arguments.repeats,
            "quick": arguments.quick,
            "rows": report,
        }
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    missed = sum(row["met"] is False for row in report)
    print(f"\ntargets missed: {missed} of {sum(row['met'] is not None for row in report)}")
    return 1 if missed and not arguments.quick else 0


if __name__ == "__main__":
    sys.exit(main())
