"""What a monitor counts: durations, tenants, requests, and figures over time."""

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, get_args

from ..cache_stats import EngineStats
from ..inference.contexts.cache.hashing import PUBLIC_ROOT
from ..inference.contexts.cache.pool_stats import AGE_BOUNDS_S
from ..inference.contexts.dynamic_request import DynamicInferenceRequest, ScheduledRequest
from ..params_and_results import FinishReason, RequestResult
from ..validation import ceil_div
from .advice import differences, why_not_deeper

FIRST_TOKEN_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
INTER_TOKEN_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
STEP_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

DEFAULT_TENANT = "default"
OTHER_TENANTS = "other"
MAX_TENANTS = 64
MAX_SALTS = 1 << 14

NUM_RECENT = 512
INTERVAL_S = 2
NUM_POINTS = 450


@dataclass
class DurationHistogram:
    """The distribution of one duration in seconds, and the percentiles of its last values."""

    bounds: Sequence[float]  # of the classes, upper ones; a last class has none
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))
    percents: Sequence[int] = (50, 90, 99)  # of the percentiles

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, seconds: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += times
        self.sum += seconds * times
        self.recent.extend([seconds] * times)

    @property
    def percentiles(self) -> dict[str, float | None]:
        """By nearest rank: "p50" for percent 50. None where there are no values."""
        values = sorted(self.recent)
        return {
            f"p{percent}": values[ceil_div(len(values) * percent, 100) - 1] if values else None
            for percent in self.percents
        }


@dataclass
class TenantFigures:
    """What a tenant has asked for."""

    name: str
    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_resumed_tokens: int = 0


@dataclass
class MonitorFigures:
    """The counts of a monitor since its start, of users' requests; durations in seconds."""

    stats: EngineStats
    max_requests: int
    tenants: tuple[TenantFigures, ...] = ()
    num_warnings: int = 0
    num_added: int = 0
    num_ended: dict[str, int] = field(default_factory=lambda: dict.fromkeys(get_args(FinishReason), 0))
    num_generated: int = 0
    prefill_tokens: int = 0
    prefill_s: float = 0.0  # the share of computed prompt tokens in the steps' time
    first_token: DurationHistogram = field(default_factory=partial(DurationHistogram, FIRST_TOKEN_BOUNDS_S))
    inter_token: DurationHistogram = field(default_factory=partial(DurationHistogram, INTER_TOKEN_BOUNDS_S))
    step: DurationHistogram = field(default_factory=partial(DurationHistogram, STEP_BOUNDS_S))
    queue: DurationHistogram = field(default_factory=partial(DurationHistogram, FIRST_TOKEN_BOUNDS_S))

    @property
    def slots_by_use(self) -> dict[str, int]:
        cache = self.stats.cache
        return {
            "free": cache.num_free_slots,
            "reserved": cache.num_reserved_slots,
            "committed": cache.num_committed_slots,
            "live": cache.num_live_slots,
        }

    @property
    def kv_blocks_by_use(self) -> dict[str, int]:
        cache = self.stats.cache
        return {
            "free": cache.num_free_kv_blocks,
            "cached": cache.num_cached_kv_blocks,
            "held": cache.num_held_kv_blocks,
        }

    @property
    def states_by_tier(self) -> dict[str, int]:
        """Copies of states below the device's memory."""
        tiers = self.stats.cache.tiers
        return {"host": tiers.num_host_states, "disk": tiers.num_disk_states}

    @property
    def fetched_by_tier(self) -> dict[str, int]:
        """States that were copied back."""
        tiers = self.stats.cache.tiers
        from_disk = tiers.num_states_fetched_from_disk
        return {"host": tiers.num_states_fetched - from_disk, "disk": from_disk}

    @property
    def eviction_age(self) -> DurationHistogram:
        """From the last use of states to their eviction."""
        ages = self.stats.cache.state_ages
        return DurationHistogram(AGE_BOUNDS_S, list(ages.counts), ages.sum_s, deque(ages.recent_s), (50, 90))

    @property
    def saved_s(self) -> float | None:
        """What resumed tokens would have taken: 6,000 resumed, 2,000 computed in 1.2 s: 3.6 s."""
        if not self.prefill_tokens:
            return None
        return self.stats.cache.num_resumed_tokens * self.prefill_s / self.prefill_tokens


class Tenants:
    """Names for root digests, and figures for names. Both are bounded, and no salt is kept."""

    def __init__(self) -> None:
        self._figures = {DEFAULT_TENANT: TenantFigures(DEFAULT_TENANT)}
        self._names: OrderedDict[bytes, str] = OrderedDict()

    def assign(self, root: bytes, tenant: str) -> None:
        """Let requests with this root count for `tenant`."""
        if tenant not in self._figures and len(self._figures) >= MAX_TENANTS:
            tenant = OTHER_TENANTS
        self.figures_of(tenant)
        self._names[root] = tenant
        self._names.move_to_end(root)
        if len(self._names) > MAX_SALTS:
            self._names.popitem(last=False)

    def name_of(self, root: bytes) -> str:
        return self._names.get(root, DEFAULT_TENANT if root == PUBLIC_ROOT else OTHER_TENANTS)

    def figures_of(self, name: str) -> TenantFigures:
        return self._figures.setdefault(name, TenantFigures(name))

    def copies(self) -> tuple[TenantFigures, ...]:
        return tuple(map(replace, self._figures.values()))


class Series:
    """What each interval of `INTERVAL_S` seconds computed, its most requests, and its end's pools."""

    def __init__(self, now_s: float, stats: EngineStats) -> None:
        """`now_s`: on the clock of all calls."""
        self._points: deque[tuple[float, dict[str, Any]]] = deque(maxlen=NUM_POINTS)
        self._ends_s = now_s + INTERVAL_S
        self._stats = stats
        self._counts = self._counts_at_start = _counts(stats, 0)
        self._most_running = self._most_waiting = 0

    def record(self, now_s: float, stats: EngineStats, num_generated: int) -> None:
        if now_s >= self._ends_s:
            self._end_intervals(now_s)
        self._stats = stats
        self._counts = _counts(stats, num_generated)
        self._most_running = max(self._most_running, stats.num_running)
        self._most_waiting = max(self._most_waiting, stats.num_waiting)

    def _end_intervals(self, now_s: float) -> None:
        num_ended = int((now_s - self._ends_s) // INTERVAL_S) + 1
        num_skipped = max(0, num_ended - NUM_POINTS)
        self._ends_s += num_skipped * INTERVAL_S
        for _ in range(num_ended - num_skipped):
            self._points.append((self._ends_s, self._point()))
            self._counts_at_start = self._counts
            self._most_running = self._stats.num_running
            self._most_waiting = self._stats.num_waiting
            self._ends_s += INTERVAL_S

    def _point(self) -> dict[str, Any]:
        cache = self._stats.cache
        counts = differences(self._counts, self._counts_at_start)
        return {
            "prompt": counts.pop("prompt"), "resumed": counts.pop("resumed"),
            "generated": counts.pop("generated"), "by_reason": counts,
            "states_committed": cache.num_committed_slots, "states_pinned": cache.num_pinned_slots,
            "kv_cached": cache.num_cached_kv_blocks, "kv_held": cache.num_held_kv_blocks,
            "running": self._most_running, "waiting": self._most_waiting,
        }  # fmt: skip

    def as_json(self, unix_offset_s: float) -> dict[str, Any]:
        """The series as `Monitor.snapshot` has it. `unix_offset_s`: from the clock's time to Unix time."""
        points = [{"time_s": end + unix_offset_s, **point} for end, point in self._points]
        return {"every_s": INTERVAL_S, "points": points}


def _counts(stats: EngineStats, num_generated: int) -> Mapping[str, int]:
    cache = stats.cache
    return {
        "prompt": cache.num_prompt_tokens, "resumed": cache.num_resumed_tokens, "generated": num_generated,
        **{str(reason): number for reason, number in cache.computed_by_reason.items()},
    }  # fmt: skip


_SHOWN = (
    "id", "tenant", "arrived_s", "prompt_tokens", "resumed_tokens", "spans", "generated_tokens",
    "finish_reason", "ttft_s", "inter_token_s", "why",
)  # fmt: skip
"""What `Monitor.snapshot` shows of a request."""


@dataclass
class RequestRecord:
    """One request that has not ended, and what is noted of it: numbers only, no tokens and no text."""

    request: DynamicInferenceRequest
    tenant: str
    arrived_s: float
    grid: int
    spans: list[list[Any]] = field(default_factory=list)  # [start, stop, reason] of computed tokens
    resume_point: int = 0  # the length of the prefix that it last resumed
    queued_s: float | None = None  # until its first step
    resumed_tokens: int = 0
    prompt_tokens_done: int = 0  # resumed or computed
    recomputed_tokens: int = 0
    ttft_s: float | None = None
    first_token_s: float = 0.0  # on the monitor's clock, as the last one
    last_token_s: float = 0.0
    generated_tokens: int = 0
    finish_reason: str | None = None

    def add_spans(self, scheduled: ScheduledRequest) -> None:
        end = self.spans[-1][1] if self.spans else 0
        for span in scheduled.spans:
            start = max(span.start, scheduled.start, end)
            stop = min(span.stop, scheduled.stop, self.prompt_tokens)
            if start >= stop:
                continue
            last_span = self.spans[-1] if self.spans else None
            if last_span is not None and last_span[1] == start and last_span[2] == span.reason:
                last_span[1] = stop
            else:
                self.spans.append([start, stop, span.reason])

    def update_counts(self, tenant: TenantFigures) -> None:
        """Read the request's counts, and add to its tenant's by how much they have grown."""
        ledger = self.request.ledger
        tenant.num_resumed_tokens += ledger.resumed - self.resumed_tokens
        tenant.num_prompt_tokens += ledger.num_prompt_tokens - self.prompt_tokens_done
        self.resumed_tokens = ledger.resumed
        self.prompt_tokens_done = ledger.num_prompt_tokens
        self.recomputed_tokens = ledger.recomputed

    def record_end(self, result: RequestResult) -> None:
        self.finish_reason = result.finish_reason
        self.generated_tokens = len(result.tokens)
        self.ttft_s = result.ttft_s

    @property
    def id(self) -> int:
        return self.request.request_id

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_tokens)

    @property
    def inter_token_s(self) -> float | None:
        """Mean seconds between two tokens; None before the second."""
        if self.generated_tokens < 2 or self.last_token_s <= self.first_token_s:
            return None
        return (self.last_token_s - self.first_token_s) / (self.generated_tokens - 1)

    @property
    def why(self) -> str:
        """Why it did not resume deeper."""
        return why_not_deeper(self.spans, self.resume_point, self.prompt_tokens, self.grid)

    def as_json(self) -> dict[str, Any]:
        """The record as `Monitor.snapshot` has it."""
        values = {name: getattr(self, name) for name in _SHOWN}
        return values | {"spans": [list(span) for span in self.spans]}
