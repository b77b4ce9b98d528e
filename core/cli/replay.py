"""`mambaslots replay`: what a cache of this or that size would have resumed, without a model."""

import argparse
import json
from typing import Any

from ..replay.cells import Cell, TraceSource, replay_cell, replay_cells
from ..replay.generate import KINDS
from ..replay.ours import UNLIMITED, OursRow
from ..replay.report import answers, plain, plain_setting, table, unlimited_shares
from ..replay.setting import MODELS, STATE_DTYPES, ModelShape, ReplaySetting, model_shape
from .options import add_json, count, is_file, listed, positive

TEXT = """\
The scheduler, the cache and its policies are those of the engine; the clock counts steps. The table says
which share of all prompt tokens is resumed with each budget. The last lines answer "How much memory do I
give it?"."""
BUDGETS_GB = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("traffic")
    group.add_argument(
        "--trace", type=listed(_origin), default=["chat"], metavar="LIST",
        help=f"generated traces ({', '.join(KINDS)}), all of these by the name all, or files: JSON lines of "
        "your own traffic or in Mooncake's format; divided by commas (default: chat)",
    )  # fmt: skip
    group.add_argument(
        "--seed", type=count(0), default=0, metavar="N", help="of generated traces (default: 0)"
    )
    group.add_argument(
        "--shards", type=count(), default=1, metavar="N",
        help="replay what one of so many replicas gets of a file's traffic (default: 1)",
    )  # fmt: skip
    group.add_argument("--shard", type=count(0), default=0, metavar="N", help="which replica (default: 0)")
    group.add_argument("--requests", type=count(), metavar="N", help="the first requests of each trace only")
    group.add_argument(
        "--speed", type=positive, default=1.0, metavar="N",
        help="requests arrive N times as fast as in the trace (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--concurrency", type=count(), default=32, metavar="N",
        help="requests that run at once; 1 replays one after another (default: %(default)s)",
    )  # fmt: skip
    group = parser.add_argument_group("memory")
    group.add_argument(
        "--budget-gb", type=listed(positive), metavar="LIST",
        help="memory for cached states, in GB (default, unless --total-gb is given: 1,2,4,...,64)",
    )  # fmt: skip
    group.add_argument(
        "--kv-gb", type=positive, default=20.0, metavar="GB", help="for KV (default: %(default)g)"
    )
    group.add_argument(
        "--total-gb", type=listed(positive), metavar="LIST",
        help="memory for live states, cached states and KV together",
    )  # fmt: skip
    group.add_argument(
        "--host-gb", type=positive, default=0.0, metavar="GB",
        help="host memory for evicted states (default: none)",
    )  # fmt: skip
    group.add_argument(
        "--model", default="nemotron-h-8b", metavar="MODEL",
        help=f"whose sizes count: {', '.join(MODELS)} or the path of a config.json (default: %(default)s)",
    )  # fmt: skip
    group.add_argument("--state-dtype", choices=STATE_DTYPES, help="of cached states (default: the model's)")
    group.add_argument(
        "--block-size-tokens", type=count(), default=256, metavar="N",
        help="tokens of a KV block (default: %(default)s)",
    )  # fmt: skip
    group = parser.add_argument_group("cache")
    group.add_argument(
        "--policy", type=listed(str), default=[None], metavar="LIST",
        help="eviction policies, a row each: names, or FILE.py:Class for one's own (default: the engine's)",
    )  # fmt: skip
    group.add_argument(
        "--plan", metavar="PLAN", help="as --plan of serve, or FILE.py:Class (default: the engine's)"
    )
    group = parser.add_argument_group("output")
    group.add_argument(
        "--jobs", type=count(), default=1, metavar="N", help="processes that replay (default: 1)"
    )
    add_json(group, "all results")


def run(options: argparse.Namespace) -> int:
    if options.shard >= options.shards:
        raise ValueError(f"--shard is {options.shard}; accepted: less than --shards ({options.shards})")
    shape = model_shape(options.model, options.state_dtype)
    settings, rows = settings_of(options, shape), [OursRow(one, options.plan) for one in options.policy]
    for row in rows:
        row.changes()  # ValueError for a policy or plan that cannot be loaded
    cells = []  # trace by trace, budget by budget, row by row; the unlimited pool once a trace
    for source in sources_of(options):
        cells += [Cell(source, row, setting) for setting in settings for row in rows]
        cells.append(Cell(source, UNLIMITED, settings[0]))
    results = list(replay_cells(cells, options.jobs, replay_cell))
    unlimited = unlimited_shares(results)
    answered = list(dict.fromkeys(answers(results, unlimited, rows[0].name)))
    print(table(results))
    print("\nHow much memory do I give it?")
    for sentence in answered:
        print(sentence)
    if options.json:
        found = {
            "settings": asked_of(options) | plain_setting(settings[0]),
            "unlimited": unlimited,
            "results": [plain(one) for one in results],
            "answers": answered,
        }
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


def settings_of(options: argparse.Namespace, shape: ModelShape) -> list[ReplaySetting]:
    """One for each budget, those for states first."""
    budgets = options.budget_gb or ([] if options.total_gb else BUDGETS_GB)
    common: dict[str, Any] = {
        "max_requests": options.concurrency,
        "block_size_tokens": options.block_size_tokens,
        "host_gb": options.host_gb,
    }
    if options.block_size_tokens % shape.grid_tokens:
        raise ValueError(
            f"--block-size-tokens is {options.block_size_tokens}; accepted for {shape.name}: a multiple of "
            f"{shape.grid_tokens}"
        )
    return [
        *(ReplaySetting(shape, state_gb, options.kv_gb, **common) for state_gb in dict.fromkeys(budgets)),
        *(ReplaySetting(shape, total_gb=gb, **common) for gb in dict.fromkeys(options.total_gb or [])),
    ]


def sources_of(options: argparse.Namespace) -> list[TraceSource]:
    return [
        TraceSource(origin, options.seed, options.shards, options.shard, options.requests, options.speed)
        for origin in dict.fromkeys(options.trace)
    ]


def asked_of(options: argparse.Namespace) -> dict[str, Any]:
    """The options as plain values."""
    names = "trace seed shards shard requests speed policy plan model state_dtype"
    return {name: getattr(options, name) for name in names.split() if hasattr(options, name)}


def _origin(text: str) -> list[str]:
    if text == "all":
        return list(KINDS)
    if text not in KINDS and not is_file(text):
        accepted = ", ".join((*KINDS, "all"))
        raise argparse.ArgumentTypeError(f"{text!r}; accepted: {accepted}, or a file that is there")
    return [text]
