"""Several replicas behind a router, without a model.

    python benchmarks/replay/routed.py --trace chat --replicas 4 --budget-gb 2

Options are those of `mambaslots replay`, with budgets and --concurrency of each replica. Rows: one cache with
the sum of the budgets, and the routers.
"""  # fmt: skip

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mambaslots.cli.options import Parser, comma_list, count, new_file, positive
from mambaslots.cli.replay import add_options, asked_of, settings_of, sources_of
from mambaslots.inference.contexts.cache.pool_stats import NANOSECONDS
from mambaslots.replay.compared_caches import config_of, spec_of
from mambaslots.replay.engine_replay import Arrivals, EngineReplay
from mambaslots.replay.report import TraceSource, budget_head, load_trace, plain_setting
from mambaslots.replay.setting import ReplaySetting, StepCost
from mambaslots.replay.trace import Trace
from processes import add_jobs, replay_cells
from routed_replay import EVENT_DELAY_MS, ONE_CACHE, ReplicaResult, RoutedReplay, RoutedResult, Routing
from routers import ROUTERS


@dataclass(frozen=True)
class RoutedCell:
    """Replicas behind a router, on one trace; `setting` is that of each replica."""

    source: TraceSource
    setting: ReplaySetting
    routing: Routing


@dataclass(frozen=True)
class RoutedCellResult:
    """The result of a cell; None, with a refusal, where the memory buys no state or no KV block."""

    cell: RoutedCell
    trace: str
    num_requests: int
    result: RoutedResult | None
    refusal: str = ""


def replay_routed_cell(cell: RoutedCell) -> RoutedCellResult:
    """Replay one cell. A setting that buys nothing makes a cell without a result."""
    trace = load_trace(cell.source)
    serve = one_cache_replay if cell.routing.is_one_cache else routed_replay
    try:
        result = serve(trace, cell.setting, cell.routing)
    except ValueError as error:
        return RoutedCellResult(cell, trace.name, len(trace.requests), None, str(error))
    return RoutedCellResult(cell, trace.name, len(trace.requests), result)


def routed_replay(
    trace: Trace,
    setting: ReplaySetting,
    routing: Routing,
) -> RoutedResult:
    """Serve the trace with replicas, each of which has the memory of `setting`.

    Raises:
        ValueError: the memory buys no state or no KV block.
    """
    replay = RoutedReplay(
        trace, spec_of(setting.shape), config_of(trace, setting, {}), setting.cost,
        ROUTERS[routing.router](routing.seed), routing.num_replicas,
        event_delay_ms=routing.event_delay_ms,
    )  # fmt: skip
    return replay.run()


def one_cache_replay(
    trace: Trace,
    setting: ReplaySetting,
    routing: Routing,
) -> RoutedResult:
    """Serve the trace with one engine that is as large as all replicas together; see `sum_of`.

    Raises:
        ValueError: the memory buys no state or no KV block.
    """
    arrivals = Arrivals(trace, one_after_another=setting.max_requests == 1)
    whole = sum_of(setting, routing.num_replicas)
    config = config_of(trace, whole, {})
    replay = EngineReplay(trace, spec_of(whole.shape), config, whole.cost)
    replay.arrivals = arrivals
    served = replay.run()
    waits = [wait_ns for wait_ns in replay.first_token_ns if wait_ns is not None]
    num_generated = sum(
        len(request.answer)
        for request, wait_ns in zip(trace.requests, replay.first_token_ns, strict=True)
        if wait_ns is not None
    )
    return RoutedResult(
        replicas=(ReplicaResult(served, num_generated),),
        replica_of=(0,) * len(trace.requests),
        first_token_s=tuple(wait_ns / NANOSECONDS for wait_ns in waits),
        duration_s=replay.now_ns / NANOSECONDS,
        num_sessions=len({request.session for request in trace.requests}),
        num_moved_sessions=0,
    )


def sum_of(setting: ReplaySetting, num_replicas: int) -> ReplaySetting:
    """What `num_replicas` engines in `setting` have together, as one engine.

    It has the sums of their memory and their rows, and is `num_replicas` times as fast: each of its steps has
    as many tokens as a step of theirs, and takes a part of the time. So prompts are cut where replicas cut
    them, and offer the same states; and requests wait no longer than behind a router that spreads them
    evenly. What it resumes more is what routing costs.
    """
    cost, number = setting.cost, num_replicas

    def times[T: float | None](gigabytes: T) -> T | float:
        return gigabytes if gigabytes is None else gigabytes * number

    return replace(
        setting,
        state_gb=times(setting.state_gb),
        kv_gb=times(setting.kv_gb),
        total_gb=times(setting.total_gb),
        host_gb=setting.host_gb * number,
        max_requests=setting.max_requests * number,
        cost=StepCost(cost.base_s / number, cost.prefill_token_s / number, cost.decode_row_s / number),
    )


def _routers(name: str) -> list[str]:
    if name != "all" and name not in ROUTERS:
        raise argparse.ArgumentTypeError(f"router is {name!r}; accepted: all, {', '.join(ROUTERS)}")
    return list(ROUTERS) if name == "all" else [name]


def main() -> None:
    parser = Parser(description=__doc__)
    add_options(parser)
    add_jobs(parser)
    parser.add_argument(
        "--replicas", type=comma_list(count()), default=[4], metavar="LIST", help="(default: 4)"
    )
    parser.add_argument(
        "--router", type=comma_list(_routers), default=list(ROUTERS), metavar="LIST", help=", ".join(ROUTERS)
    )
    parser.add_argument(
        "--event-delay-ms", type=_milliseconds, default=EVENT_DELAY_MS, metavar="MS",
        help="from the end of a step until the router knows of its states (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument("--plot", type=new_file, metavar="PATH", help="draw the table into this file")
    options = parser.parse_args()
    if not options.budget_gb and not options.total_gb:
        options.budget_gb = [2.0, 8.0]
    settings = settings_of(options)
    cells = [
        RoutedCell(source, setting, Routing(number, router, options.seed, options.event_delay_ms))
        for source in sources_of(options)
        for setting in settings
        for number in dict.fromkeys(options.replicas)
        for router in (ONE_CACHE, *dict.fromkeys(options.router))
    ]
    results = list(replay_cells(cells, options.jobs, replay_routed_cell))
    print(routing_table(results))
    if options.json:
        names = ("replicas", "router", "event_delay_ms")
        asked = asked_of(options) | {name: getattr(options, name) for name in names}
        found = {
            "settings": asked | plain_setting(settings[0]),
            "results": [_plain(results, one) for one in results],
        }
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    if options.plot:
        draw_routing(results, options.plot)


_COLUMNS = (
    ("replicas", 8), ("router", 14), ("resumed", 7), ("of one cache", 12), ("tokens", 6), ("requests", 8),
    ("first token", 12), ("moved sessions", 14), ("event bytes a request", 21), ("a second", 9),
)  # fmt: skip
"""Heads of the columns, and their widths."""


def _milliseconds(text: str) -> float:
    return 0.0 if text in ("0", "0.0") else positive(text)


def one_cache_share(results: Iterable[RoutedCellResult], one: RoutedCellResult) -> float | None:
    """What one cache with the memory of all replicas of `one` resumes; None where it was not replayed."""
    for other in results:
        if (
            other.cell.routing.is_one_cache
            and other.result is not None
            and (other.trace, other.cell.setting) == (one.trace, one.cell.setting)
            and other.cell.routing.num_replicas == one.cell.routing.num_replicas
        ):
            return other.result.share
    return None


def share_of_one_cache(results: Iterable[RoutedCellResult], one: RoutedCellResult) -> float | None:
    """The share of `one`, as a part of what one cache resumes; None where that is nothing or not known."""
    whole = one_cache_share(results, one)
    return one.result.share / whole if whole and one.result is not None else None


def routing_table(results: Sequence[RoutedCellResult]) -> str:
    """A table for each trace and budget: a line for each router and number of replicas."""
    parts = list(dict.fromkeys((one.trace, one.cell.setting) for one in results))
    return "\n\n".join(
        "\n".join(_lines([one for one in results if (one.trace, one.cell.setting) == part])) for part in parts
    )


def _lines(results: Sequence[RoutedCellResult]) -> Iterable[str]:
    first = results[0]
    num_tokens = next((one.result.prompt_tokens for one in results if one.result is not None), 0)
    delay_ms = first.cell.routing.event_delay_ms
    yield (
        f"{first.trace}: {first.num_requests:,} requests, {num_tokens:,} prompt tokens, "
        f"{budget_head(first.cell.setting)} a replica, events after {delay_ms:g} ms"
    )
    yield (
        "resumed: % of the prompt tokens. of one cache: % of what one cache with the sum of the budgets "
        "resumes."
    )
    yield "tokens, requests: most of a replica / mean. first token: mean / 95 % of the requests, ms."
    yield "  ".join(name.rjust(width) for name, width in _COLUMNS)
    for one in results:
        yield "  ".join(
            text.rjust(width) for text, (_, width) in zip(_texts(results, one), _COLUMNS, strict=True)
        )
    yield from dict.fromkeys(one.refusal for one in results if one.refusal)


def _texts(results: Sequence[RoutedCellResult], one: RoutedCellResult) -> Sequence[str]:
    """The cells of a line."""
    result, routing = one.result, one.cell.routing
    head = [str(routing.num_replicas), routing.router]
    if result is None:
        return [*head, "refused", *["-"] * (len(_COLUMNS) - 3)]
    of_whole = share_of_one_cache(results, one)
    first_token = f"{1000 * result.mean_first_token_s:.0f} / {1000 * result.p95_first_token_s:.0f}"
    known = [
        *head, f"{100 * result.share:.1f}", "-" if of_whole is None else f"{100 * of_whole:.1f}",
        f"{result.token_imbalance:.2f}", f"{result.request_imbalance:.2f}", first_token,
    ]  # fmt: skip
    if routing.is_one_cache:
        return [*known[:4], *["-"] * (len(_COLUMNS) - 4)]
    moved = f"{result.num_moved_sessions:,} of {result.num_sessions:,}"
    if not result.num_events:
        return [*known, moved, "-", "-"]
    return [*known, moved, f"{result.event_bytes_per_request:,.0f}", f"{result.event_bytes_per_s:,.0f}"]


def _plain(results: Sequence[RoutedCellResult], one: RoutedCellResult) -> dict[str, Any]:
    setting, routing, result = one.cell.setting, one.cell.routing, one.result
    plain: dict[str, Any] = {
        "trace": one.trace,
        "num_requests": one.num_requests,
        "num_replicas": routing.num_replicas,
        "router": routing.router,
        "state_gb": setting.state_gb,
        "kv_gb": setting.kv_gb,
        "total_gb": setting.total_gb,
        "share": None if result is None else result.share,
        "share_of_one_cache": share_of_one_cache(results, one),
        "refusal": one.refusal or None,
    }
    if result is not None:
        names = (
            "prompt_tokens", "resumed_tokens", "lost_by_reason", "token_imbalance", "request_imbalance",
            "mean_first_token_s", "p95_first_token_s", "duration_s", "num_sessions", "num_moved_sessions",
            "num_events", "event_bytes", "event_bytes_per_request", "event_bytes_per_s",
        )  # fmt: skip
        plain |= {name: getattr(result, name) for name in names}
        plain["replicas"] = [
            {
                "num_requests": replica.served.num_requests,
                "prompt_tokens": replica.served.prompt_tokens,
                "resumed_tokens": replica.served.resumed_tokens,
                "num_generated_tokens": replica.num_generated_tokens,
                "num_computed_tokens": replica.num_computed_tokens,
            }
            for replica in result.replicas
        ]
    return plain


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


if __name__ == "__main__":
    main()
