"""Other systems' prefix caches and clairvoyants, as rows of one table with our cache.

    python benchmarks/replay/rows.py --trace all --seed 5 --rows all --json results.json --plot replay.png

Options are those of `mambaslots replay`, and --rows and --plot. Equal command lines give equal results.
"""  # fmt: skip

import argparse
import json
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from block_cache import TakenStates
from block_rows import BlockRow, StockRow, capped_slots
from clairvoyant import CEILING
from mambaslots.cli.options import Parser, comma_list, new_file
from mambaslots.cli.replay import add_options, asked_of, settings_of, sources_of
from mambaslots.replay.compared_caches import UNLIMITED, ComparedCache, OwnCache
from mambaslots.replay.report import (
    Cell,
    CellResult,
    as_plain,
    budget_of,
    percent,
    plain_setting,
    replay_cell,
    sizing_sentences,
    table,
    unlimited_shares,
)
from marconi_row import MarconiRow
from processes import add_jobs, replay_cells
from sglang_row import SGLangRow
from vllm_row import VLLMRow

_USED_NODE = TakenStates(tail=True, branch=True, step_ends=True, decode=True)
PEERS: tuple[ComparedCache, ...] = (
    StockRow(),
    BlockRow("every-block", TakenStates(every=True)),
    BlockRow("tail", TakenStates(tail=True)),
    BlockRow("used-node-cap-3", _USED_NODE, capped_slots),
    BlockRow("used-node", _USED_NODE),
    BlockRow("tail-branch", TakenStates(tail=True, branch=True)),
    MarconiRow(),
    SGLangRow(),
    SGLangRow("sglang-cap-3", max_states_per_path=3),
    SGLangRow("sglang-coverage", thins=True),
    VLLMRow(),
)
ROWS = {row.name: row for row in (OwnCache(), OwnCache("lru"), *PEERS, *CEILING)}
GROUPS = {
    "all": tuple(ROWS),
    "peers": tuple(row.name for row in PEERS),
    "ceiling": tuple(row.name for row in CEILING),
}


def ceiling_share(results: Iterable[CellResult], one: CellResult) -> float | None:
    """The share of the best clairvoyant in the setting of `one`."""
    shares = (
        other.share
        for other in results
        if other.cell.cache in CEILING and other.cell.setting == one.cell.setting and other.trace == one.trace
    )
    return max((share for share in shares if share is not None), default=None)


def text(results: Sequence[CellResult], one: CellResult) -> str:
    """A cell of the table: "94.8 (99 %)"."""
    ceiling = ceiling_share(results, one)
    of_ceiling = f" ({100 * one.share / ceiling:.0f} %)" if ceiling and one.share is not None else ""
    return percent(one) + of_ceiling


def _row(name: str) -> list[str]:
    if name not in GROUPS and name not in ROWS:
        accepted = ", ".join((*GROUPS, *ROWS))
        raise argparse.ArgumentTypeError(f"row is {name!r}; accepted: {accepted}")
    return list(GROUPS.get(name, (name,)))


def main() -> None:
    parser = Parser(description=__doc__)
    add_options(parser)
    add_jobs(parser)
    parser.add_argument(
        "--rows", type=comma_list(_row), default=["ours"], metavar="LIST",
        help=f"rows and groups of rows: {', '.join((*GROUPS, *ROWS))}",
    )  # fmt: skip
    parser.add_argument("--plot", type=new_file, metavar="PATH", help="draw the table into this file")
    options = parser.parse_args()
    settings = settings_of(options)
    rows = [row for name, row in ROWS.items() if name in options.rows]
    cells = []
    for source in sources_of(options):
        cells += [Cell(source, row, setting) for setting in settings for row in rows]
        cells.append(Cell(source, UNLIMITED, settings[0]))
    results = list(replay_cells(cells, options.jobs, replay_cell))
    clairvoyant = any(row in CEILING for row in rows)
    print(table(results, partial(text, results), " (of the ceiling)" * clairvoyant))
    if options.json:
        found = {
            "settings": asked_of(options) | {"rows": options.rows} | plain_setting(settings[0]),
            "unlimited": unlimited_shares(results),
            "results": [_plain(results, one) for one in results],
            "answers": sizing_sentences(results, unlimited_shares(results), "ours"),
        }
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    if options.plot:
        draw(results, options.plot)


def _plain(results: Sequence[CellResult], one: CellResult) -> dict[str, Any]:
    ceiling = None if one.cell.cache == UNLIMITED else ceiling_share(results, one)
    share = one.share / ceiling if ceiling and one.share is not None else None
    return as_plain(one) | {"share_of_ceiling": share}


def draw(results: Sequence[CellResult], path: Path) -> None:
    """Write a picture with a column for each trace and a row for each kind of budget."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    cells = [one for one in results if one.cell.cache != UNLIMITED and one.share is not None]
    traces = list(dict.fromkeys(one.trace for one in cells))
    kinds = list(dict.fromkeys(budget_of(one.cell.setting)[0] for one in cells))
    rows = list(dict.fromkeys(one.cell.cache.name for one in cells))
    colours = plt.get_cmap("tab20").colors
    unlimited = unlimited_shares(results)
    size = (4.2 * max(1, len(traces)) + 2.4, 3.6 * max(1, len(kinds)) + 0.6)
    figure, grid = plt.subplots(
        max(1, len(kinds)),
        max(1, len(traces)),
        figsize=size,
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    for line, kind in enumerate(kinds):
        for column, trace in enumerate(traces):
            axes = grid[line][column]
            for number, row in enumerate(rows):
                points = sorted(
                    (budget_of(one.cell.setting)[1], 100 * (one.share or 0.0))
                    for one in cells
                    if (one.trace, one.cell.cache.name, budget_of(one.cell.setting)[0]) == (trace, row, kind)
                )
                if points:
                    axes.plot(*zip(*points, strict=True), label=row, **_style(row, number, colours))
            budgets = {
                gb for one in cells for of_kind, gb in [budget_of(one.cell.setting)] if of_kind == kind
            }
            _finish(axes, trace, kind, sorted(budgets), unlimited.get(trace), column == 0)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _style(row: str, number: int, colours: Sequence[Any]) -> dict[str, Any]:
    own = row == "ours"
    return {
        "color": "black" if own else colours[number % len(colours)],
        "linewidth": 2.4 if own else 1.2,
        "linestyle": "--" if row in GROUPS["ceiling"] else "-",
        "marker": "o",
        "markersize": 5 if own else 3,
        "zorder": 4 if own else 3,
        "clip_on": False,
    }


def _finish(
    axes: Any, trace: str, kind: str, budgets: Sequence[float], unlimited: float | None, is_first: bool
) -> None:
    """Axes, title and the line of the unlimited pool."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(budgets, [f"{budget:g}" for budget in budgets])
    axes.minorticks_off()
    axes.set_title(trace, fontsize=10)
    axes.set_xlabel(f"GB {kind}", fontsize=9)
    if is_first:
        axes.set_ylabel("% of prompt tokens resumed", fontsize=9)
    axes.set_ylim(0, 100)
    axes.grid(alpha=0.3)
    if unlimited is not None:
        axes.axhline(100 * unlimited, color="grey", linestyle=":", linewidth=1.2, label="unlimited pool")


if __name__ == "__main__":
    main()
