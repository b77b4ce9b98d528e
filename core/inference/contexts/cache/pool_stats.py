"""How full the pools are, what entered them, and why and at what age it was removed."""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

StateRemovalCause = Literal[
    "new_state", "live_state", "kv_evicted", "rolled", "discarded", "by_host", "reset"
]
"""Why a state was removed from the cache:

new_state: its slot was needed for another state to cache.
live_state: its slot was needed for the state of a running request.
kv_evicted: its KV block was evicted, because the block's memory was needed.
rolled: a later state of the same answer replaced it.
discarded: the model's results along its path were no numbers.
by_host: the host of the slot allocator dropped it.
reset: all prefixes were forgotten.
"""
KVRemovalCause = Literal["new_block", "discarded", "reset"]
"""Why a registered KV block was removed from the cache:

new_block: its memory was needed for another block.
discarded: the model's results in it were no numbers.
reset: all prefixes were forgotten.
"""
TierRemovalCause = Literal["new_state", "forgotten", "damaged", "not_written", "reset"]
"""Why a copy of a state was removed from host memory or the disk:

new_state: its slot was needed for another state.
forgotten: the KV of its prefix was evicted, or its content could not be trusted.
damaged: its bytes were not those that were stored, or a copy failed.
not_written: its file was not there when it was wanted, because states were evicted faster than the disk
    writes, or because the file could not be written or read.
reset: all prefixes were forgotten.
"""
STATE_REMOVAL_CAUSES: tuple[StateRemovalCause, ...] = get_args(StateRemovalCause)
KV_REMOVAL_CAUSES: tuple[KVRemovalCause, ...] = get_args(KVRemovalCause)
TIER_REMOVAL_CAUSES: tuple[TierRemovalCause, ...] = get_args(TierRemovalCause)
EVICTIONS = frozenset({"new_state", "live_state", "kv_evicted", "new_block"})
"""The causes that are want of memory: the prefix may still be asked for."""

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


class Turnover[Cause: str]:
    """Statistics of what entered one part of the cache and what was removed; `mend` repairs them.

    Attributes:
        by_cause: cause -> how many units were removed.
        num_entered: how many units entered; `num_entered` less the sum of `by_cause` are there.
        num_unused: evicted units that no request had used; only states are counted so.
        num_refused: units that found no room; only states are counted so.
    """

    def __init__(self, causes: Sequence[Cause], *, remembers: bool = False) -> None:
        """`remembers`: whether the last ages are kept one by one, too."""
        self._causes = causes
        self._remembers = remembers
        self.clear()

    def clear(self) -> None:
        """Set all counts to 0."""
        self.by_cause: dict[Cause, int] = dict.fromkeys(self._causes, 0)
        self.num_entered = self.num_unused = self.num_refused = 0
        self._ages = _Ages()  # replaced, never changed, so that any thread may read it
        self._num_unfolded = 0
        self._num_lost_ages = 0

    @property
    def num_removed(self) -> int:
        return sum(self.by_cause.values())

    @property
    def ages(self) -> AgeCounts:
        """The ages of all units that were evicted. Any thread may read it."""
        ages = self._ages.folded(self._remembers)
        recent = tuple(age / NANOSECONDS for age in ages.recent_ns)
        return AgeCounts(ages.counts, ages.sum_ns / NANOSECONDS, recent)

    def note_ages(self, now_ns: int, last_used_ns: list[int]) -> None:
        """Note the ages of evicted units; many are counted at once, so that most calls cost little."""
        self._ages.unfolded.append((now_ns, last_used_ns))
        self._num_unfolded += len(last_used_ns)
        if self._num_unfolded >= _MAX_UNFOLDED:
            self._ages = self._ages.folded(self._remembers)
            self._num_unfolded = 0

    @property
    def _num_evicted(self) -> int:
        return sum(number for cause, number in self.by_cause.items() if cause in EVICTIONS)

    def mend(self, num_present: int) -> None:
        """Repair the counts after an interrupted change: `num_present` units are there; no count falls."""
        surplus = self.num_entered - self.num_removed - num_present
        if surplus > 0:
            self.by_cause[self._causes[-1]] += surplus
        else:
            self.num_entered -= surplus
        self.num_unused = min(self.num_unused, self._num_evicted)
        self._num_lost_ages = self._num_evicted - sum(self.ages.counts)

    def check_integrity(self, num_present: int, what: str) -> None:
        """Raise AssertionError unless `num_present` units can be there; `what` names them."""
        assert self.num_entered - self.num_removed == num_present, f"the count of removed {what} is off"
        evicted = self._num_evicted
        assert sum(self.ages.counts) + self._num_lost_ages == evicted, f"the count of ages of {what} is off"
        assert 0 <= self.num_unused <= evicted, f"more {what} were evicted unused than evicted"


def _no_copies() -> Mapping[TierRemovalCause, int]:
    return dict.fromkeys(TIER_REMOVAL_CAUSES, 0)


@dataclass(frozen=True)
class TierStats:
    """How full host memory and the disk are, and how many states went there and came back.

    Attributes:
        num_host_slots, num_host_states: states that host memory can hold, and holds.
        num_states_spilled: states that were copied to host memory, or read from the disk, since the beginning
            or `reset`; as are the counts that follow.
        num_states_fetched: states that came back to the device, those from the disk included.
        num_failed_stores: copies from the device, or to the disk, that raised an error.
        host_copies_removed_by_cause: copies removed from host memory; see `TierRemovalCause`.
        num_disk_slots, num_disk_states, num_states_fetched_from_disk, disk_copies_removed_by_cause: the same
            of the disk.
    """

    num_host_slots: int = 0
    num_host_states: int = 0
    num_states_spilled: int = 0
    num_states_fetched: int = 0
    num_failed_stores: int = 0
    host_copies_removed_by_cause: Mapping[TierRemovalCause, int] = field(default_factory=_no_copies)
    num_disk_slots: int = 0
    num_disk_states: int = 0
    num_states_fetched_from_disk: int = 0
    disk_copies_removed_by_cause: Mapping[TierRemovalCause, int] = field(default_factory=_no_copies)


@dataclass(frozen=True, kw_only=True)
class PoolStats:
    """How full the two pools of a `PrefixCache` are, and how many states came and went.

    Attributes:
        num_free_slots, num_reserved_slots, num_committed_slots, num_live_slots: state slots by what they are
            for now; together all there are. Live slots hold states of running requests; where these have a
            pool of their own, they are not counted.
        num_pinned_slots: of the committed ones, those that pins and running requests keep from eviction, and
            slots that are read while their block was evicted.
        num_states_committed: states, since the beginning or `reset`; as are the counts of states that follow.
        num_states_evicted: states evicted for a new state, or for the state of a running request.
        num_states_refused: states that were not taken for want of a slot.
        num_states_evicted_unused: states evicted before any request resumed from them.
        states_removed_by_cause: all states that were removed; `StateRemovalCause` explains each cause.
        state_ages: of states evicted for want of memory; times, in which equal snapshots may differ.
        num_free_kv_blocks: blocks that store nothing.
        num_cached_kv_blocks: registered blocks that are not held.
        num_held_kv_blocks: blocks that requests or pins hold.
        num_kv_blocks_registered: blocks, since the beginning or `reset`.
        kv_blocks_removed_by_cause: registered blocks that were removed; `KVRemovalCause` explains each cause.
        kv_block_ages: of blocks evicted for want of memory; times as well.
        tiers: copies of states in host memory and on the disk.
    """

    num_free_slots: int
    num_reserved_slots: int
    num_committed_slots: int
    num_live_slots: int
    num_pinned_slots: int
    num_states_committed: int
    num_states_evicted: int
    num_states_refused: int
    num_states_evicted_unused: int
    states_removed_by_cause: Mapping[StateRemovalCause, int]
    state_ages: AgeCounts = field(compare=False)
    num_free_kv_blocks: int
    num_cached_kv_blocks: int
    num_held_kv_blocks: int
    num_kv_blocks_registered: int
    kv_blocks_removed_by_cause: Mapping[KVRemovalCause, int]
    kv_block_ages: AgeCounts = field(compare=False)
    tiers: TierStats = field(default_factory=TierStats)

    def __str__(self) -> str:
        """How full the pools are, as a part of a line."""
        slots = (self.num_free_slots, self.num_reserved_slots, self.num_committed_slots, self.num_live_slots)
        live = f" and {self.num_live_slots} are live" if self.num_live_slots else ""
        num_blocks = self.num_free_kv_blocks + self.num_cached_kv_blocks + self.num_held_kv_blocks
        return (
            f"{self.num_committed_slots} of {sum(slots)} slots hold a state{live}, of {num_blocks} KV blocks "
            f"{self.num_held_kv_blocks} held and {self.num_cached_kv_blocks} cached"
        )
