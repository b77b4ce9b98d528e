"""The cells of a table: one row on one trace in one setting each."""

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice

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
