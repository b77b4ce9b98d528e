"""The cells of a table, one row on one trace in one setting each, replayed in one process or in several."""

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import islice
from typing import Protocol

from .generate import KINDS, generate
from .read_trace import read_trace
from .setting import Progress, ReplayResult, ReplayRow, ReplaySetting, silent
from .trace import Trace


@dataclass(frozen=True)
class TraceSource:
    """A kind with a seed, or a file; of it the first requests, `speed` times as fast."""

    origin: str
    seed: int = 0
    shards: int = 1
    shard: int = 0
    num_requests: int | None = None
    speed: float = 1.0

    def load(self) -> Trace:
        """Make or read the trace; the last two are kept."""
        return _load(self)


@lru_cache(maxsize=2)
def _load(source: TraceSource) -> Trace:
    if source.origin in KINDS:
        trace = generate(source.origin, source.seed)
    else:
        trace = read_trace(source.origin, shards=source.shards, shard=source.shard)
    if source.num_requests is not None:
        trace = replace(trace, requests=list(islice(trace.requests, source.num_requests)))
    if source.speed != 1:
        faster = [replace(one, arrival_s=one.arrival_s / source.speed) for one in trace.requests]
        trace = replace(trace, name=f"{trace.name}, {source.speed:g} x as fast", requests=faster)
    if not trace.requests:
        raise ValueError(f"{source.origin} has no requests; accepted: a trace with one or more")
    return trace


@dataclass(frozen=True)
class Cell:
    """One row on one trace in one setting."""

    source: TraceSource
    row: ReplayRow
    setting: ReplaySetting

    @property
    def label(self) -> str:
        return self.row.name


@dataclass(frozen=True)
class CellResult:
    """The result of a cell; None, with a refusal, where the row cannot serve in the setting."""

    cell: Cell
    trace: str
    num_requests: int
    result: ReplayResult | None
    refusal: str = ""
    flops_saved: float | None = None  # share of the prefills' arithmetic

    @property
    def share(self) -> float | None:
        return None if self.result is None else self.result.share


def replay_cell(cell: Cell, progress: Progress = silent) -> CellResult:
    """Replay one cell. A ValueError of the row becomes the cell's refusal."""
    trace = cell.source.load()
    number = len(trace.requests)
    try:
        result = cell.row.replay(trace, cell.setting, progress)
    except ValueError as error:
        return CellResult(cell, trace.name, number, None, str(error))
    saved = None
    if result.resumed_lengths:  # a request that resumed several times counts as if it had resumed once
        flops = cell.setting.shape.prefill_flops
        saved = sum(map(flops, result.resumed_lengths)) / sum(
            flops(len(one.prompt)) for one in trace.requests
        )
    return CellResult(cell, trace.name, number, replace(result, resumed_lengths=()), flops_saved=saved)


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
