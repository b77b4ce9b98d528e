"""The cells of a table, one row on one trace in one setting each, replayed in one process or in several."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Protocol

from .rows import row_named
from .savings import saved_share
from .setting import Progress, ReplayResult, ReplaySetting
from .trace import Trace
from .traces import KINDS, generate, read_trace


@dataclass(frozen=True)
class TraceSource:
    """Where a trace comes from.

    Attributes:
        origin: one of the generated `KINDS`, or the path of a file.
        seed: of a generated trace.
        shards, shard: which part of a file's requests is served: shard `shard` of `shards`.
        num_requests: how many of the first requests are served; None for all.
        speed: how many times as fast the requests come.
    """

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
    row: str
    setting: ReplaySetting


@dataclass(frozen=True)
class CellResult:
    """What came of a cell.

    Attributes:
        cell: what was replayed.
        trace: the name of the trace.
        num_requests: of the trace.
        result: None where the row cannot serve in the setting.
        refusal: why it cannot.
        flops_saved: share of the prefills' arithmetic; None where the row does not tell.
    """

    cell: Cell
    trace: str
    num_requests: int
    result: ReplayResult | None
    refusal: str = ""
    flops_saved: float | None = None

    @property
    def share(self) -> float | None:
        return None if self.result is None else self.result.share


def replay_cell(cell: Cell, progress: Progress = lambda num_served, num_all: None) -> CellResult:
    """Replay one cell. A setting that the row refuses with a ValueError makes a cell without a result."""
    trace = cell.source.load()
    number = len(trace.requests)
    try:
        result = row_named(cell.row).replay(trace, cell.setting, progress)
    except ValueError as error:
        return CellResult(cell, trace.name, number, None, str(error))
    saved = saved_share(trace, result, cell.setting.shape)
    return CellResult(cell, trace.name, number, replace(result, resumed_lengths=()), flops_saved=saved)


class NamedCell(Protocol):
    """What is replayed on its own; `row` says it in words."""

    @property
    def row(self) -> str: ...


def replay_cells[C: NamedCell, R](
    cells: Sequence[C],
    num_jobs: int,
    replay: Callable[[C, Progress], R],
    show: Callable[[int, str], None] = lambda num_done, doing: None,
) -> Iterator[R]:
    """Replay cells, and yield their results in the order of the cells.

    Args:
        cells: what to replay.
        num_jobs: processes; 1 replays here.
        replay: replays one cell; a function that other processes can import.
        show: called with the number of cells that are done, and with what is being done.
    """
    if num_jobs == 1:
        for index, cell in enumerate(cells):
            show(index, cell.row)
            yield replay(cell, _shown(index, cell.row, show))
        return
    context = multiprocessing.get_context("spawn")  # a fork copies threads' locks
    with ProcessPoolExecutor(min(num_jobs, len(cells)), mp_context=context) as pool:
        futures = [pool.submit(replay, cell, _unseen) for cell in cells]
        try:
            for index, future in enumerate(futures):
                show(index, cells[index].row)
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _shown(index: int, row: str, show: Callable[[int, str], None]) -> Progress:
    """Shows how far the cell `index` is."""
    return lambda num_served, num_all: show(index, f"{row}: {num_served:,} of {num_all:,} requests")


def _unseen(num_served: int, num_all: int) -> None:
    """The progress of a cell in another process, where nobody sees it."""
