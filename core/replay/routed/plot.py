"""What routers resume, and how evenly they load replicas, as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..report import budget_head
from .cells import RoutedCellResult
from .report import one_cache_share

_COLOURS = ("black", "tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple")
_BARS_WIDTH = 0.8
"""Of all bars of one number of replicas, where numbers are 1 apart."""


def draw_routing(results: Sequence[RoutedCellResult], path: Path) -> None:
    """Write a picture with a column for each trace, and for each budget two rows: shares, and balance."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    traces = list(dict.fromkeys(one.trace for one in results))
    settings = list(dict.fromkeys(one.cell.setting for one in results))
    routers = list(
        dict.fromkeys(one.cell.routing.router for one in results if not one.cell.routing.is_one_cache)
    )
    numbers = sorted({one.cell.routing.num_replicas for one in results})
    size = (4.0 * len(traces) + 2.0, 4.6 * len(settings) + 0.4)
    figure, grid = plt.subplots(
        2 * len(settings), len(traces), figsize=size, squeeze=False, sharex=True, sharey="row",
        height_ratios=[3, 2] * len(settings), layout="constrained",
    )  # fmt: skip
    for line, setting in enumerate(settings):
        for column, trace in enumerate(traces):
            shares, balance = grid[2 * line][column], grid[2 * line + 1][column]
            cells = [one for one in results if (one.trace, one.cell.setting) == (trace, setting)]
            _draw_bars(shares, balance, cells, routers, numbers)
            shares.set_title(f"{trace}, {budget_head(setting)} a replica", fontsize=9)
            shares.set_ylim(0, 100)
            balance.set_xticks(range(len(numbers)), [f"{number:,}" for number in numbers])
            balance.tick_params(labelbottom=True)
            balance.set_xlabel("replicas", fontsize=9)
            if column == 0:
                shares.set_ylabel("% of prompt tokens resumed", fontsize=9)
                balance.set_ylabel("computed tokens,\nmost / mean", fontsize=9)
    for balance in grid[1::2].flat:
        balance.set_ylim(bottom=1)  # behind the last bar: axes of a row share their limits, which this fixes
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_bars(
    shares: Any,
    balance: Any,
    cells: Sequence[RoutedCellResult],
    routers: Sequence[str],
    numbers: Sequence[int],
) -> None:
    """A group of bars for each number of replicas, with a line for one cache."""
    width = _BARS_WIDTH / max(1, len(routers))
    for place, router in enumerate(routers):
        mine = [one for one in cells if one.cell.routing.router == router and one.result is not None]
        left = [
            numbers.index(one.cell.routing.num_replicas) - _BARS_WIDTH / 2 + place * width for one in mine
        ]
        style: dict[str, Any] = {
            "width": width * 0.92,
            "align": "edge",
            "color": _COLOURS[place % len(_COLOURS)],
        }
        found = [one.result for one in mine if one.result is not None]
        shares.bar(left, [100 * result.share for result in found], label=router, **style)
        balance.bar(left, [result.token_imbalance - 1 for result in found], bottom=1, **style)
    for place, number in enumerate(numbers):
        whole = next((one for one in cells if one.cell.routing.num_replicas == number), None)
        share = None if whole is None else one_cache_share(cells, whole)
        if share is not None:
            shares.plot(
                [place - _BARS_WIDTH / 2, place + _BARS_WIDTH / 2], [100 * share] * 2,
                color="black", linestyle=":", linewidth=1.6,
                label="one cache, sum of budgets" if place == 0 else None,
            )  # fmt: skip
    for axes in (shares, balance):
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
