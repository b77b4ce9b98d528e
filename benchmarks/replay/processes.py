"""Cells of tables, replayed in one process or in several, with progress on stderr."""

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress

from mambaslots.cli.options import count


def add_jobs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--jobs", type=count(), default=1, metavar="N", help="processes that replay (default: 1)"
    )


def replay_cells[C, R](cells: Sequence[C], num_jobs: int, replay: Callable[[C], R]) -> Iterator[R]:
    """Replay cells in `num_jobs` processes, here for 1, with a line each on stderr; results in their order.

    `replay` is a function that other processes can import.
    """
    begun_s = time.monotonic()

    def show(number: int) -> None:
        with suppress(OSError, ValueError, AttributeError):  # closed, a broken pipe, no stderr
            took_s = time.monotonic() - begun_s
            sys.stderr.write(f"replay: {number:,} of {len(cells):,} cells, {took_s:,.1f} s\n")

    if num_jobs == 1:
        for number, cell in enumerate(cells, 1):
            yield replay(cell)
            show(number)
        return
    context = multiprocessing.get_context("spawn")  # a fork copies threads' locks
    with ProcessPoolExecutor(min(num_jobs, len(cells)), mp_context=context) as pool:
        futures = [pool.submit(replay, cell) for cell in cells]
        try:
            for number, future in enumerate(futures, 1):
                yield future.result()
                show(number)
        finally:
            pool.shutdown(cancel_futures=True)
