"""The share of resumed tokens against the budget, as a picture."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .answer import budget_of
from .cells import CellResult
from .ours import UNLIMITED
from .report import unlimited_shares
from .rows import GROUPS

_OWN = "ours"


def draw(results: Sequence[CellResult], path: Path) -> None:
    """Write a picture with a column for each trace and a row for each kind of budget."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    cells = [one for one in results if one.cell.row != UNLIMITED.name and one.share is not None]
    traces = list(dict.fromkeys(one.trace for one in cells))
    kinds = list(dict.fromkeys(budget_of(one.cell.setting)[0] for one in cells))
    rows = list(dict.fromkeys(one.cell.row for one in cells))
    colours = plt.get_cmap("tab20").colors  # type: ignore[attr-defined]
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
                    if (one.trace, one.cell.row, budget_of(one.cell.setting)[0]) == (trace, row, kind)
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


def require_matplotlib() -> None:
    """Raise an ImportError that says what to install, unless matplotlib is there."""
    if find_spec("matplotlib") is None:
        raise ImportError("--plot needs matplotlib; accepted: pip install 'mambaslots[plot]'")


def _style(row: str, number: int, colours: Sequence[Any]) -> dict[str, Any]:
    own = row == _OWN
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
