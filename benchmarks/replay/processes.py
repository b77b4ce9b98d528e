"""Cells of tables, replayed in one process or in several, with progress on stderr."""

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Protocol

from mambaslots.cli.options import count
from mambaslots.replay.setting import Progress, silent


def add_jobs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--jobs", type=count(), default=1, metavar="N", help="processes that replay (default: 1)"
    )


class Labelled(Protocol):
    """What is replayed on its own."""

    @property
    def label(self) -> str: ...


def replay_cells[C: Labelled, R](
    cells: Sequence[C], num_jobs: int, replay: Callable[[C, Progress], R]
) -> Iterator[R]:
    """Replay cells in `num_jobs` processes, here for 1, with progress on stderr; results in their order.

    `replay` is a function that other processes can import.
    """
    begun_s = shown_s = time.monotonic()

    def show(text: str) -> None:
        """A line on stderr, at most one in 10 s."""
        nonlocal shown_s
        if time.monotonic() - shown_s >= 10.0:
            shown_s = time.monotonic()
            _write(text)

    def show_requests(head: str, num_served: int, num_all: int) -> None:
        show(f"{head}: {num_served:,} of {num_all:,} requests")

    if num_jobs == 1:
        for index, cell in enumerate(cells):
            head = f"{index:,} of {len(cells):,} cells; {cell.label}"
            yield replay(cell, partial(show_requests, head))
    else:
        context = multiprocessing.get_context("spawn")  # a fork copies threads' locks
        with ProcessPoolExecutor(min(num_jobs, len(cells)), mp_context=context) as pool:
            futures = [pool.submit(replay, cell, silent) for cell in cells]
            try:
                for index, future in enumerate(futures):
                    show(f"{index:,} of {len(cells):,} cells; {cells[index].label}")
                    yield future.result()
            finally:
                pool.shutdown(cancel_futures=True)
    _write(f"{len(cells):,} cells, {time.monotonic() - begun_s:,.1f} s")


def _write(text: str) -> None:
    with suppress(OSError, ValueError, AttributeError):  # closed, a broken pipe, no stderr
        sys.stderr.write(f"replay: {text}\n")
