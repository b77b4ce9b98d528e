"""Why states and KV blocks leave a prefix cache, and how long after their last use."""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Literal, get_args

StateLeaveCause = Literal[
    "new_state", "kv_evicted", "kv_released", "path_limit", "rolled", "discarded", "by_host", "reset"
]
"""Why a state left the cache:

new_state: its slot was needed for another state.
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
STATE_LEAVE_CAUSES: tuple[StateLeaveCause, ...] = get_args(StateLeaveCause)
KV_LEAVE_CAUSES: tuple[KVLeaveCause, ...] = get_args(KVLeaveCause)
EVICTIONS = frozenset({"new_state", "kv_evicted", "new_block"})
"""The causes that are want of memory."""

AGE_BOUNDS_S = (0.1, 1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)
"""Upper bounds of the classes in which ages are counted; a last class has none."""
NANOSECONDS = 1_000_000_000
Clock = Callable[[], int]
"""Nanoseconds since some moment; never goes back. `time.monotonic_ns` is one."""
_BOUNDS_NS = [int(bound * NANOSECONDS) for bound in AGE_BOUNDS_S]
_NUM_RECENT = 256
_MAX_UNREAD = 1024


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


class Departures[Cause: str]:
    """Counts what enters one part of the cache, and what leaves it.

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
        self._folding = Lock()
        self.clear()

    def clear(self) -> None:
        """Set all counts to 0."""
        self.by_cause: dict[Cause, int] = dict.fromkeys(self._causes, 0)
        self.num_entered = 0
        self.num_unused = 0
        self.num_refused = 0
        self._unread: deque[tuple[int, list[int]]] = deque()
        self._age_counts = [0] * (len(_BOUNDS_NS) + 1)
        self._sum_ns = 0
        self._recent_ns: deque[int] = deque(maxlen=_NUM_RECENT)

    @property
    def num_left(self) -> int:
        return sum(self.by_cause.values())

    @property
    def ages(self) -> AgeCounts:
        """The ages of all units that were evicted. Any thread may read it."""
        self._fold()
        recent = tuple(age / NANOSECONDS for age in self._recent_ns.copy())
        return AgeCounts(tuple(self._age_counts), self._sum_ns / NANOSECONDS, recent)

    def note_ages(self, now_ns: int, last_used_ns: list[int]) -> None:
        """Note the ages of evicted units; they are counted when somebody asks, so that the call costs little.

        Args:
            now_ns, last_used_ns: the time now, and when each unit was last used.
        """
        self._unread.append((now_ns, last_used_ns))
        if len(self._unread) >= _MAX_UNREAD:
            self._fold()

    def _fold(self) -> None:
        """Count the ages that were noted."""
        with self._folding:
            counts, unread = self._age_counts, self._unread
            while unread:
                now_ns, last_used_ns = unread.popleft()
                self._sum_ns += len(last_used_ns) * now_ns - sum(last_used_ns)
                for used in last_used_ns:
                    counts[bisect_left(_BOUNDS_NS, now_ns - used)] += 1
                if self._remembers:
                    self._recent_ns.extend([now_ns - used for used in last_used_ns])

    def check_integrity(self, num_present: int, what: str) -> None:
        """Raise AssertionError unless `num_present` units can be there; `what` names them."""
        assert self.num_entered - self.num_left == num_present, f"the count of {what} that left is off"
        self._fold()
        evicted = sum(number for cause, number in self.by_cause.items() if cause in EVICTIONS)
        assert sum(self._age_counts) == evicted, f"the count of ages of {what} is off"
        assert 0 <= self.num_unused <= evicted, f"more {what} were evicted unused than evicted"
