"""What a monitor counts: distributions of durations, tenants, and all of it at once."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..cache_stats import EngineStats

FIRST_TOKEN_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
INTER_TOKEN_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
STEP_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


@dataclass(frozen=True)
class Histogram:
    """How many values there were in each class.

    Attributes:
        bounds: upper bounds of the classes; a last class has none.
        counts: for each class the number of its values.
        sum: the sum of all values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        return sum(self.counts)


class Latency:
    """The distribution of one duration in seconds."""

    def __init__(self, bounds_s: Sequence[float], num_recent: int = 512) -> None:
        """
        Args:
            bounds_s: upper bounds of the classes of the histogram.
            num_recent: so many of the last values make the percentiles.
        """
        self._bounds = tuple(bounds_s)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        self._recent: deque[float] = deque(maxlen=num_recent)

    def add(self, seconds: float, times: int = 1) -> None:
        """Count a value, `times` times."""
        self._counts[bisect_left(self._bounds, seconds)] += times
        self._sum += seconds * times
        self._recent.append(seconds)

    @property
    def histogram(self) -> Histogram:
        return Histogram(self._bounds, tuple(self._counts), self._sum)

    @property
    def percentiles(self) -> dict[str, float | None]:
        """p50, p90 and p99 of the last values; None where there are none."""
        return percentiles(self._recent)


@dataclass(frozen=True)
class TenantFigures:
    """What a tenant has asked for, and what the cache holds of it now."""

    name: str
    num_requests: int
    num_prompt_tokens: int
    num_resumed_tokens: int
    num_states: int
    num_kv_blocks: int


@dataclass(frozen=True)
class MonitorFigures:
    """What a monitor has counted since its start.

    Attributes:
        stats: the engine's own figures.
        num_added: users' requests that were queued, or ran when the monitor began.
        num_ended: finish reason -> users' requests that ended.
        num_generated: tokens of their answers.
        first_token, inter_token, step, queue: durations in seconds: from arrival to the first token, between
            two tokens, of a step, from arrival to the first step.
        tenants: by name.
        num_warnings: warnings that were given.
    """

    stats: EngineStats
    num_added: int
    num_ended: dict[str, int]
    num_generated: int
    first_token: Histogram
    inter_token: Histogram
    step: Histogram
    queue: Histogram
    tenants: tuple[TenantFigures, ...]
    num_warnings: int


def percentiles(values: Iterable[float], ranks: Sequence[int] = (50, 90, 99)) -> dict[str, float | None]:
    """The nearest-rank percentiles of these values: "p50" for rank 50. None where there are no values."""
    ordered = sorted(values)
    if not ordered:
        return {f"p{rank}": None for rank in ranks}
    return {f"p{rank}": ordered[max(0, -(-len(ordered) * rank // 100) - 1)] for rank in ranks}


def differences[Name: str](now: Mapping[Name, int], before: Mapping[Name, int]) -> dict[Name, int]:
    """How much counts have grown; a count that has fallen was reset, and has grown from 0."""
    return {
        name: number - before.get(name, 0) if number >= before.get(name, 0) else number
        for name, number in now.items()
    }
