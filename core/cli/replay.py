"""`mambaslots replay`: what a cache of this or that size would have resumed, without a model."""

import argparse
import json
from typing import Any

from ..replay.answer import answers
from ..replay.cells import Cell, TraceSource, replay_cell, replay_cells
from ..replay.model_shapes import MODELS, STATE_DTYPES, model_shape
from ..replay.ours import UNLIMITED
from ..replay.progress_line import ReplayProgress
from ..replay.report import as_json, plain_setting, table, unlimited_shares
from ..replay.rows import GROUPS, ROWS, rows_named
from ..replay.setting import ModelShape, ReplaySetting
from ..replay.traces import KINDS
from . import replay_replicas
from .options import add_json, count, is_file, listed, new_file, positive
from .replay_replicas import OWN_ROW

TEXT = """Replay traces of requests without a model, and say how much memory the cache should get.

The scheduler, the cache and its policies are those of the engine; the clock counts steps. The table says
which share of all prompt tokens each row resumes with each budget. The last lines answer "How much memory do
I give it?". Other rows emulate other caches, or know the trace in advance."""
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
        help="requests come N times as fast as the trace has them (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--concurrency", type=count(), default=32, metavar="N",
        help="requests that run at once; 1 replays one after another (default: %(default)s)",
    )  # fmt: skip
    group = parser.add_argument_group("memory")
    group.add_argument(
        "--budget-gb", type=listed(positive), metavar="LIST",
        help="memory for cached states, in GB (default, unless --total-gb is given: 1,2,4,...,64; with "
        "--replicas 2,8)",
    )  # fmt: skip
    group.add_argument(
        "--kv-gb", type=positive, default=20.0, metavar="GB", help="for KV beside them (default: %(default)g)"
    )
    group.add_argument(
        "--total-gb", type=listed(positive), metavar="LIST",
        help="memory for live states, cached states and KV together, which each row divides itself",
    )  # fmt: skip
    group.add_argument(
        "--host-gb", type=positive, default=0.0, metavar="GB",
        help="host memory for evicted states, which rows without a host tier ignore (default: none)",
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
    replay_replicas.add_options(parser)
    group = parser.add_argument_group("table")
    group.add_argument(
        "--rows", type=listed(_row), default=[OWN_ROW], metavar="LIST",
        help=f"rows and groups of rows ({', '.join((*GROUPS, *ROWS))}), divided by commas "
        f"(default: {OWN_ROW})",
    )  # fmt: skip
    group.add_argument(
        "--jobs", type=count(), default=1, metavar="N", help="processes that replay (default: 1)"
    )
    add_json(group, "all results")
    group.add_argument("--plot", type=new_file, metavar="PATH", help="draw the table into this file")


def run(options: argparse.Namespace) -> int:
    if options.shard >= options.shards:
        raise ValueError(f"--shard is {options.shard}; accepted: less than --shards ({options.shards})")
    if options.plot:
        from ..replay.plot import draw, require_matplotlib

        require_matplotlib()
    replay_replicas.check(options)
    shape = model_shape(options.model, options.state_dtype)
    settings = _settings(options, shape)
    if options.replicas:
        return replay_replicas.run(options, _sources(options), settings, _given(options))
    cells = _cells(options, settings)
    progress = ReplayProgress(len(cells))
    results = list(replay_cells(cells, options.jobs, replay_cell, progress.show))
    progress.end()
    said = list(dict.fromkeys(answers(results, unlimited_shares(results), OWN_ROW)))
    print(table(results))
    print("\nHow much memory do I give it?")
    for sentence in said or [f"That is said of the row {OWN_ROW} alone."]:
        print(sentence)
    if options.json:
        given = _given(options) | plain_setting(settings[0])
        options.json.write_text(json.dumps(as_json(results, given, said), indent=2) + "\n")
    if options.plot:
        draw(results, options.plot)
    return 0


def _settings(options: argparse.Namespace, shape: ModelShape) -> list[ReplaySetting]:
    """One for each budget, those for states first."""
    default = replay_replicas.BUDGETS_GB if options.replicas else BUDGETS_GB
    budgets = options.budget_gb or ([] if options.total_gb else default)
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


def _cells(options: argparse.Namespace, settings: list[ReplaySetting]) -> list[Cell]:
    """Trace by trace, budget by budget, row by row; the unlimited pool once a trace."""
    rows = [row for row in rows_named(options.rows) if row != UNLIMITED.name]
    cells = []
    for source in _sources(options):
        cells += [Cell(source, row, setting) for setting in settings for row in rows]
        cells.append(Cell(source, UNLIMITED.name, settings[0]))
    return cells


def _sources(options: argparse.Namespace) -> list[TraceSource]:
    return [
        TraceSource(origin, options.seed, options.shards, options.shard, options.requests, options.speed)
        for origin in dict.fromkeys(options.trace)
    ]


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """What was asked for, as plain values."""
    names = ("trace", "seed", "shards", "shard", "requests", "speed", "rows", "model", "state_dtype")
    return {name: getattr(options, name) for name in names}


def _origin(text: str) -> list[str]:
    if text == "all":
        return list(KINDS)
    if text not in KINDS and not is_file(text):
        accepted = ", ".join((*KINDS, "all"))
        raise argparse.ArgumentTypeError(f"{text!r}; accepted: {accepted}, or a file that is there")
    return [text]


def _row(text: str) -> str:
    try:
        rows_named([text])
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text
