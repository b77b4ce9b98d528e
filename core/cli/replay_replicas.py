"""`mambaslots replay --replicas`: several caches behind a router."""

import argparse
import json
from collections.abc import Sequence
from typing import Any

from ..net.routing.routers import ROUTERS
from ..replay.cells import TraceSource, replay_cells
from ..replay.progress_line import ReplayProgress
from ..replay.report import plain_setting
from ..replay.routed.cells import RoutedCell, replay_routed_cell
from ..replay.routed.report import routed_json, routing_table
from ..replay.routed.setting import EVENT_DELAY_MS, ONE_CACHE, Routing, router_named
from ..replay.setting import ReplaySetting
from .options import count, listed, not_negative

OWN_ROW = "ours"
BUDGETS_GB = (2.0, 8.0)
_ALL = "all"


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("replicas")
    group.add_argument(
        "--replicas", type=listed(count()), metavar="LIST",
        help="numbers of replicas behind a router; memory and --concurrency are those of each replica",
    )  # fmt: skip
    group.add_argument(
        "--router", type=listed(_routers), metavar="LIST",
        help=f"what chooses the replica ({', '.join(ROUTERS)}), divided by commas (default: all)",
    )  # fmt: skip
    group.add_argument(
        "--event-delay-ms", type=not_negative, metavar="MS",
        help=f"from the end of a step until the router knows of its states (default: {EVENT_DELAY_MS:g})",
    )  # fmt: skip


def check(options: argparse.Namespace) -> None:
    """Raise a ValueError for options that do not go together."""
    if not options.replicas:
        for name, given in (("--router", options.router), ("--event-delay-ms", options.event_delay_ms)):
            if given is not None:
                shown = ",".join(given) if isinstance(given, list) else f"{given:g}"
                raise ValueError(f"{name} is {shown}; accepted: with --replicas alone")
    elif options.rows != [OWN_ROW]:
        raise ValueError(
            f"--rows is {','.join(options.rows)}; accepted with --replicas: {OWN_ROW}, the only row that is "
            "served behind a router"
        )


def run(
    options: argparse.Namespace,
    sources: Sequence[TraceSource],
    settings: Sequence[ReplaySetting],
    given: dict[str, Any],
) -> int:
    """Replay, print the table and write the files.

    Args:
        options: of the command, checked.
        sources: the traces.
        settings: one for each budget of a replica.
        given: what was asked for, as plain values.
    """
    routers = list(dict.fromkeys(options.router or ROUTERS))
    delay_ms = EVENT_DELAY_MS if options.event_delay_ms is None else options.event_delay_ms
    cells = [
        RoutedCell(source, setting, Routing(number, router, options.seed, delay_ms))
        for source in sources
        for setting in settings
        for number in dict.fromkeys(options.replicas)
        for router in (ONE_CACHE, *routers)
    ]
    progress = ReplayProgress(len(cells))
    results = list(replay_cells(cells, options.jobs, replay_routed_cell, progress.show))
    progress.end()
    print(routing_table(results))
    if options.json:
        asked = {"replicas": options.replicas, "router": routers, "event_delay_ms": delay_ms}
        plain = routed_json(results, given | asked | plain_setting(settings[0]))
        options.json.write_text(json.dumps(plain, indent=2) + "\n")
    if options.plot:
        from ..replay.routed.plot import draw_routing

        draw_routing(results, options.plot)
    return 0


def _routers(text: str) -> list[str]:
    if text == _ALL:
        return list(ROUTERS)
    try:
        return [router_named(text)]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
