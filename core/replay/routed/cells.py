"""The cells of a routing table: replicas behind a router, or one cache, on one trace in one setting each."""

from dataclasses import dataclass, replace

from ...inference.contexts.cache.departures import NANOSECONDS
from ...net.routing.routers import ROUTERS
from ..arrivals import Arrivals
from ..cells import TraceSource
from ..engine_replay import EngineReplay
from ..ours import config_of, spec_of
from ..setting import Progress, ReplaySetting, StepCost
from ..trace import Trace
from .routed_replay import RoutedReplay
from .setting import ReplicaResult, RoutedResult, Routing


@dataclass(frozen=True)
class RoutedCell:
    """Replicas behind a router, on one trace.

    Attributes:
        source: of the trace.
        setting: memory and limits of each replica.
        routing: the replicas, and what chooses among them.
    """

    source: TraceSource
    setting: ReplaySetting
    routing: Routing

    @property
    def row(self) -> str:
        """What is replayed, in words."""
        return f"{self.routing.num_replicas} x {self.routing.router}"


@dataclass(frozen=True)
class RoutedCellResult:
    """What came of a cell.

    Attributes:
        cell: what was replayed.
        trace: the name of the trace.
        num_requests: of the trace.
        result: None where the memory buys no state or no KV block.
        refusal: why it does not.
    """

    cell: RoutedCell
    trace: str
    num_requests: int
    result: RoutedResult | None
    refusal: str = ""


def replay_routed_cell(
    cell: RoutedCell, progress: Progress = lambda num_served, num_all: None
) -> RoutedCellResult:
    """Replay one cell. A setting that buys nothing makes a cell without a result."""
    trace = cell.source.load()
    serve = one_cache_replay if cell.routing.is_one_cache else routed_replay
    try:
        result = serve(trace, cell.setting, cell.routing, progress)
    except ValueError as error:
        return RoutedCellResult(cell, trace.name, len(trace.requests), None, str(error))
    return RoutedCellResult(cell, trace.name, len(trace.requests), result)


def routed_replay(
    trace: Trace,
    setting: ReplaySetting,
    routing: Routing,
    progress: Progress = lambda num_served, num_all: None,
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
    return replay.run(progress)


def one_cache_replay(
    trace: Trace,
    setting: ReplaySetting,
    routing: Routing,
    progress: Progress = lambda num_served, num_all: None,
) -> RoutedResult:
    """Serve the trace with one engine that is as large as all replicas together; see `sum_of`.

    Raises:
        ValueError: the memory buys no state or no KV block.
    """
    arrivals = Arrivals(trace, one_after_another=setting.max_requests == 1)
    whole = sum_of(setting, routing.num_replicas)
    config = config_of(trace, whole, {})
    replay = EngineReplay(trace, spec_of(whole.shape), config, whole.cost, source=arrivals)
    served = replay.run(progress)
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
