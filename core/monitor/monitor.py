"""Figures of a running engine, for its operator."""

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

from ..inference.contexts.cache.hashing import salt_bytes
from ..inference.contexts.dynamic_request import Batch, DynamicInferenceRequest, ScheduledRequest
from ..inference.engines.dynamic_engine import DynamicInferenceEngine
from ..inference.engines.engine_observer import NewTokens
from ..params_and_results import RequestResult
from ..validation import instance, refused
from ..version import VERSION
from .advice import MissWatch
from .figures import MonitorFigures, RequestRecord, Series, Tenants
from .metrics import FIGURES

logger = logging.getLogger(__name__)

NUM_REQUESTS = 100
_JUDGE_INTERVAL_S = 30.0
_REFRESH_INTERVAL_S = 0.25


class Monitor:
    """Watches an engine: what was resumed and why not more, how full the pools are, how long things take.

    A monitor is an `EngineObserver` that attaches itself. Its memory is bounded. Any thread may read it. It
    keeps no token and no text.

    Requests are those of users: `add_request`, `generate` and `stream`. What `score` and `warm` compute
    counts in the engine's own figures (prompt tokens, evictions, pools, steps), and nowhere else.

    Attributes:
        engine, model_name: what it watches, and under which name.
    """

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        *,
        model_name: str,
        trace: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """
        Args:
            engine: the engine, which has no other monitor under the same name.
            model_name: how the model is called.
            trace: called with a line of JSON for each request that has ended: what `snapshot` says of it, and
                `queued_s` and `recomputed_tokens`. A call that raises is the last one.
            clock: seconds, on the clock of `DynamicInferenceRequest.arrival_s`.

        Raises:
            ValueError: an argument is of another kind.
        """
        self.engine = instance("engine", engine, DynamicInferenceEngine)
        self.model_name = instance("model_name", model_name, str)
        if trace is not None and not callable(trace):
            raise refused("trace", trace, "a callable of one str, or None")
        self._trace = trace
        self._clock = clock
        self._lock = threading.Lock()
        self._begun_s = now = clock()
        self._unix_offset_s = time.time() - now
        stats = engine.stats()
        self._misses = MissWatch(engine, stats)
        self._series = Series(now, stats)
        self._tenants = Tenants()
        self._running: dict[int, RequestRecord] = {}
        self._ended: deque[dict[str, Any]] = deque(maxlen=NUM_REQUESTS)
        self._counts = MonitorFigures(stats, engine.config.max_requests)
        self._description = engine.describe().splitlines()
        self._judged_s = now
        self._next_refresh_s = now
        engine.observe(self)

    def close(self) -> None:
        """Stop watching; what was counted stays readable. ValueError where it does not watch."""
        self.engine.unobserve(self)

    def name_salt(self, cache_salt: bytes | str | None, tenant: str) -> None:
        """Let requests with this salt count for `tenant`; those that are under way keep their tenant.

        Requests without a salt count for "default", those whose salt has no name for "other". So do tenants
        beyond the first 64, "default" included. The salt itself is not kept.

        Raises:
            ValueError: the salt is refused by `add_request`, too, or `tenant` is no str.
        """
        root = self.engine.salt_key.root(salt_bytes("cache_salt", cache_salt))
        name = instance("tenant", tenant, str)
        with self._lock:
            self._tenants.assign(root, name)

    def request_added(self, request: DynamicInferenceRequest) -> None:
        with self._lock:
            self._record_of(request)
            self._refresh(self._clock())

    def request_resumed(self, scheduled: ScheduledRequest) -> None:
        with self._lock:
            record = self._record_of(scheduled.request)
            if record is not None:
                record.resume_point = scheduled.start if scheduled.num_resumed else 0

    def step_made(self, batch: Batch, tokens: NewTokens, duration_s: float) -> None:
        """Count what the step computed and generated, and its time."""
        with self._lock:
            now = self._clock()
            self._counts.step.add(duration_s)
            num_tokens = sum(scheduled.length for scheduled in batch)
            num_prefilled = sum(scheduled.length for scheduled in batch if not scheduled.decoding)
            if num_prefilled:
                self._counts.prefill_tokens += num_prefilled
                self._counts.prefill_s += duration_s * num_prefilled / num_tokens
            for scheduled in batch:
                record = None if scheduled.decoding else self._record_of(scheduled.request)
                if record is not None:
                    if record.queued_s is None:
                        record.queued_s = max(0.0, now - duration_s - scheduled.request.arrival_s)
                        self._counts.queue.add(record.queued_s)
                    record.add_spans(scheduled)
                    record.update_counts(self._tenants.figures_of(record.tenant))
            for request_id, new_tokens in tokens.items():
                record = self._running.get(request_id)
                if record is not None:
                    self._count_tokens(record, len(new_tokens), now)
            self._refresh(now)

    def request_ended(self, request: DynamicInferenceRequest, result: RequestResult) -> None:
        """Count the end of a request that has a record, and trace it."""
        with self._lock:
            trace = self._trace
            record = self._running.get(request.request_id)
            if record is not None:
                record.update_counts(self._tenants.figures_of(record.tenant))
                record.record_end(result)
                content = record.as_json()
                self._ended.appendleft(content)
                self._counts.num_ended[result.finish_reason] += 1
                del self._running[request.request_id]  # last: an interrupted call is repeated
            if not self._running:  # there may be no step for long
                self._next_refresh_s = 0.0
            self._refresh(self._clock())
        if trace is not None and record is not None:
            trace_only = {"queued_s": record.queued_s, "recomputed_tokens": record.recomputed_tokens}
            try:
                trace(json.dumps(content | trace_only))
            except Exception:
                self._trace = None
                logger.exception("the trace of requests failed; it ends")

    def _record_of(self, request: DynamicInferenceRequest) -> RequestRecord | None:
        """The record of a user's request, perhaps a new one; None for one that has ended and is unknown."""
        record = self._running.get(request.request_id)
        if record is None and request.request_id >= 0 and request.result is None:
            tenant = self._tenants.name_of(request.chain.root)
            arrived_s = request.arrival_s + self._unix_offset_s
            record = RequestRecord(request, tenant, arrived_s, self.engine.context.spec.grid)
            self._running[request.request_id] = record
            self._tenants.figures_of(tenant).num_requests += 1
            self._counts.num_added += 1
        return record

    def _count_tokens(self, record: RequestRecord, number: int, now: float) -> None:
        self._counts.num_generated += number
        if not record.generated_tokens:
            record.first_token_s = now
            record.ttft_s = record.request.ttft_s
            if record.ttft_s is not None:
                self._counts.first_token.add(record.ttft_s)
        else:
            self._counts.inter_token.add((now - record.last_token_s) / number, number)
        record.generated_tokens += number
        record.last_token_s = now

    def _refresh(self, now: float) -> None:
        """Record the engine's figures every 0.25 s, and judge and describe the engine every 30 s."""
        if now < self._next_refresh_s:
            return
        self._next_refresh_s = now + _REFRESH_INTERVAL_S
        stats = self.engine.stats(settle=False)
        self._series.record(now, stats, self._counts.num_generated)
        if now - self._judged_s >= _JUDGE_INTERVAL_S:
            self._judged_s = now
            self._misses.check(stats)
            self._description = self.engine.describe().splitlines()

    def figures(self) -> MonitorFigures:
        """All counts since the start of the monitor, and the engine's figures now. Any thread may call it."""
        with self._lock:
            return deepcopy(self._figures())

    def _figures(self) -> MonitorFigures:
        stats = self.engine.stats(settle=False)
        tenants = self._tenants.copies()
        return replace(self._counts, stats=stats, tenants=tenants, num_warnings=len(self._misses.warnings))

    def snapshot(self) -> dict[str, Any]:
        """What an operator's page shows, as JSON has it. Any thread may call it.

        Returns:
            A dict with the engine's description, the pools, tokens by reason, evictions, latencies, tenants,
                a series of the last 15 minutes and the last 100 requests, newest first. docs/operations.md
                explains each.
        """
        with self._lock:
            now = self._clock()
            figures = self._figures()
            self._series.record(now, figures.stats, figures.num_generated)
            slots = figures.slots_by_use
            spec = self.engine.context.spec
            block_size = self.engine.config.block_size_tokens
            snapshot = {
                "time_s": now + self._unix_offset_s,
                "uptime_s": now - self._begun_s,
                "model": self.model_name,
                "version": VERSION,
                "warnings": list(self._misses.warnings.values()),
                "engine": {"description": list(self._description)},
                "pools": {
                    "states": {"total": sum(slots.values()) - slots["live"], "bytes_each": spec.slot_bytes},
                    "kv": {
                        "total": sum(figures.kv_blocks_by_use.values()),
                        "bytes_each": spec.kv_block_bytes(block_size),
                        "block_size_tokens": block_size,
                    },
                },
                "tokens": {"saved_s": figures.saved_s},
                "tenants": [
                    {name.removeprefix("num_"): value for name, value in vars(tenant).items()}
                    for tenant in figures.tenants
                ],
                "series": self._series.as_json(self._unix_offset_s),
                "requests": self._requests(),
            }
            for figure in FIGURES:
                if figure.key:
                    figure.show(figures, snapshot)
            return snapshot

    def _requests(self) -> list[dict[str, Any]]:
        """The last requests to arrive, of those that run and those that ended last."""
        records = [record.as_json() for record in list(self._running.values())[-NUM_REQUESTS:]]
        newest = sorted([*records, *self._ended], key=lambda record: record["arrived_s"], reverse=True)
        return newest[:NUM_REQUESTS]
