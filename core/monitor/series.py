"""Figures over time: one point for each interval of the last quarter of an hour."""

from collections import deque
from collections.abc import Mapping
from typing import Any

from ..cache_stats import EngineStats
from .figures import differences

EVERY_S = 2
NUM_POINTS = 450


class Series:
    """What each interval of `EVERY_S` seconds computed, and how full the pools were at its end.

    Tokens count for the interval in which `note` tells of them.
    """

    def __init__(self, now_s: float, stats: EngineStats) -> None:
        """`now_s`: on the clock of all calls."""
        self._points: deque[tuple[float, dict[str, Any]]] = deque(maxlen=NUM_POINTS)
        self._ends_s = now_s + EVERY_S
        self._stats = stats
        self._counts = self._at_start = _counts(stats, 0)

    def note(self, now_s: float, stats: EngineStats, num_generated: int) -> None:
        """Take the newest figures."""
        if self.is_due(now_s):
            self._end_intervals(now_s)
        self._stats = stats
        self._counts = _counts(stats, num_generated)

    def is_due(self, now_s: float) -> bool:
        """Whether an interval has ended since the last `note`."""
        return now_s >= self._ends_s

    def _end_intervals(self, now_s: float) -> None:
        num_ended = int((now_s - self._ends_s) // EVERY_S) + 1
        skipped = max(0, num_ended - NUM_POINTS)
        self._ends_s += skipped * EVERY_S
        for _ in range(num_ended - skipped):
            self._points.append((self._ends_s, self._point()))
            self._at_start = self._counts
            self._ends_s += EVERY_S

    def _point(self) -> dict[str, Any]:
        grown, stats, cache = differences(self._counts, self._at_start), self._stats, self._stats.cache
        return {
            "prompt": grown.pop("prompt"),
            "resumed": grown.pop("resumed"),
            "generated": grown.pop("generated"),
            "by_reason": grown,
            "states_committed": cache.num_committed_slots,
            "states_pinned": cache.num_pinned_slots,
            "kv_cached": cache.num_cached_kv_blocks,
            "kv_held": cache.num_held_kv_blocks,
            "running": stats.num_running,
            "waiting": stats.num_waiting,
        }

    def as_json(self, unix_offset_s: float) -> dict[str, Any]:
        """The series as `Monitor.snapshot` has it. `unix_offset_s`: from the clock's time to Unix time."""
        points = [{"time_s": end + unix_offset_s, **point} for end, point in self._points]
        return {"every_s": EVERY_S, "points": points}


def _counts(stats: EngineStats, num_generated: int) -> Mapping[str, int]:
    cache = stats.cache
    return {
        "prompt": cache.num_prompt_tokens,
        "resumed": cache.num_resumed_tokens,
        "generated": num_generated,
        **{str(reason): number for reason, number in cache.computed_by_reason.items()},
    }
