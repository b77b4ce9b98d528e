"""Why states and KV blocks leave a prefix cache, and how long after their last use."""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

StateLeaveCause = Literal[
    "new_state", "live_state", "kv_evicted", "kv_released", "path_limit", "rolled", "discarded", "by_host",
    "reset",
]  # fmt: skip
"""Why a state left the cache:

new_state: its slot was needed for another state to cache.
live_state: its slot was needed for the state of a running request.
kv_evicted: its KV block was evicted, because the block's memory was needed.
kv_released: the last holder of its KV block left, under the policy "ref_zero".
path_limit: its path held more than `CheckpointPlan.max_states_per_path` states.
rolled: a later state of the same answer replaced it.
discarded: the model's results along its path were no numbers.
by_host: the host of the slot allocator dropped it.
reset: all prefixes were forgotten.
"""
KVLeaveCause = Literal["new_block", "released", "discarded", "reset"]
"""Why a registered KV block left the cache:

new_block: its memory was needed for another block.
released: its last holder left, under the policy "ref_zero".
discarded: the model's results in it were no numbers.
reset: all prefixes were forgotten.
"""
TierLeaveCause = Literal["new_state", "forgotten", "damaged", "not_written", "reset"]
"""Why a copy of a state left host memory or the disk:

new_state: its slot was needed for another state.
forgotten: the KV of its prefix left the cache, or its content could not be trusted.
damaged: its bytes were not those that were stored, or a copy failed.
not_written: its file was not there when it was wanted, because states left faster than the disk takes them,
    or because the file could not be written or read.
reset: all prefixes were forgotten.
"""
STATE_LEAVE_CAUSES: tuple[StateLeaveCause, ...] = get_args(StateLeaveCause)
KV_LEAVE_CAUSES: tuple[KVLeaveCause, ...] = get_args(KVLeaveCause)
TIER_LEAVE_CAUSES: tuple[TierLeaveCause, ...] = get_args(TierLeaveCause)
EVICTIONS = frozenset({"new_state", "live_state", "kv_evicted", "new_block"})
"""The causes that are want of memory."""

AGE_BOUNDS_S = (0.1, 1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)
"""Upper bounds of the classes in which ages are counted; a last class has none."""
NANOSECONDS = 1_000_000_000
Clock = Callable[[], int]
"""Nanoseconds since some moment; never goes back. `time.monotonic_ns` is one."""
_BOUNDS_NS = [int(bound * NANOSECONDS) for bound in AGE_BOUNDS_S]
_NUM_RECENT = 256
_MAX_UNFOLDED = 1024


@dataclass(frozen=True)
class AgeCounts:
    """How long before their eviction units were last used.

    Attributes:
        counts: how many were at most as old as each bound of `AGE_BOUNDS_S` and older than the bound before
            it; the last count is of those older than all bounds.
        sum_s: the sum of all ages in seconds.
        recent_s: the ages of the last 256 evicted states, oldest eviction first; empty for KV blocks.
    """

    counts: tuple[int, ...] = (0,) * (len(AGE_BOUNDS_S) + 1)
    sum_s: float = 0.0
    recent_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class _Ages:
    """Ages that are counted, and those that were noted since: (time of eviction, times of last use)."""

    counts: tuple[int, ...] = (0,) * (len(_BOUNDS_NS) + 1)
    sum_ns: int = 0
    recent_ns: tuple[int, ...] = ()
    unfolded: deque[tuple[int, list[int]]] = field(default_factory=deque)

    def folded(self, remembers: bool) -> "_Ages":
        """The same ages, all counted. Changes nothing."""
        unfolded = self.unfolded.copy()
        if not unfolded:
            return self
        counts, sum_ns = list(self.counts), self.sum_ns
        recent_ns = deque(self.recent_ns, _NUM_RECENT)
        for now_ns, last_used_ns in unfolded:
            sum_ns += len(last_used_ns) * now_ns - sum(last_used_ns)
            for used in last_used_ns:
                counts[bisect_left(_BOUNDS_NS, now_ns - used)] += 1
            if remembers:
                recent_ns.extend([now_ns - used for used in last_used_ns])
        return _Ages(tuple(counts), sum_ns, tuple(recent_ns))


class Departures[Cause: str]:
    """Counts what enters one part of the cache, and what leaves it.

    The counts are statistics: an interrupted change may leave them off, and `mend` puts them in order.

    Attributes:
        by_cause: cause -> how many units have left.
        num_entered: how many units have come. Those that are there are `num_entered` less the sum of
            `by_cause`.
        num_unused: of the evicted units, those that nobody had used; only states are counted so.
        num_refused: how many units found no room; only states are counted so.
    """

    def __init__(self, causes: Sequence[Cause], *, remembers: bool = False) -> None:
        """`remembers`: whether the last ages are kept one by one, too."""
        self._causes = causes
        self._remembers = remembers
        self.clear()

    def clear(self) -> None:
        """Set all counts to 0."""
        self.by_cause: dict[Cause, int] = dict.fromkeys(self._causes, 0)
        self.num_entered = 0
        self.num_unused = 0
        self.num_refused = 0
        self._ages = _Ages()  # another one takes its place, so that any thread may read it
        self._num_unfolded = 0
        self._num_lost_ages = 0

    @property
    def num_left(self) -> int:
        return sum(self.by_cause.values())

    @property
    def ages(self) -> AgeCounts:
        """The ages of all units that were evicted. Any thread may read it."""
        ages = self._ages.folded(self._remembers)
        recent = tuple(age / NANOSECONDS for age in ages.recent_ns)
        return AgeCounts(ages.counts, ages.sum_ns / NANOSECONDS, recent)

    def note_ages(self, now_ns: int, last_used_ns: list[int]) -> None:
        """Note the ages of evicted units; many are counted at once, so that most calls cost little.

        Args:
            now_ns, last_used_ns: the time now, and when each unit was last used.
        """
        self._ages.unfolded.append((now_ns, last_used_ns))
        self._num_unfolded += len(last_used_ns)
        if self._num_unfolded >= _MAX_UNFOLDED:
            self._ages = self._ages.folded(self._remembers)
            self._num_unfolded = 0

    @property
    def _num_evicted(self) -> int:
        return sum(number for cause, number in self.by_cause.items() if cause in EVICTIONS)

    def mend(self, num_present: int) -> None:
        """Put the counts in order behind an interrupted change, after which `num_present` units are there.

        No count falls. Units that left without a cause count as "reset".
        """
        surplus = self.num_entered - self.num_left - num_present
        if surplus > 0:
            self.by_cause[self._causes[-1]] += surplus
        else:
            self.num_entered -= surplus
        self.num_unused = min(self.num_unused, self._num_evicted)
        self._num_lost_ages = self._num_evicted - sum(self.ages.counts)

    def check_integrity(self, num_present: int, what: str) -> None:
        """Raise AssertionError unless `num_present` units can be there; `what` names them."""
        assert self.num_entered - self.num_left == num_present, f"the count of {what} that left is off"
        evicted = self._num_evicted
        assert sum(self.ages.counts) + self._num_lost_ages == evicted, f"the count of ages of {what} is off"
        assert 0 <= self.num_unused <= evicted, f"more {what} were evicted unused than evicted"
