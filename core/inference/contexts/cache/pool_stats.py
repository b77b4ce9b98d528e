"""How full the pools are, what entered them, and why and at what age it was removed."""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

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
reset: the cache was cleared.
"""
KVRemovalCause = Literal["new_block", "discarded", "reset"]
"""Why a registered KV block was removed from the cache:

new_block: its memory was needed for another block.
discarded: the model's results in it were no numbers.
reset: the cache was cleared.
"""
ComputeReason = Literal[
    "never_seen", "kv_evicted", "state_not_taken", "branch_first_seen", "state_evicted", "last_token",
    "partial_block", "capacity", "disabled",
]  # fmt: skip
"""Why a prompt token was computed and not resumed:

never_seen: no earlier request had this prefix.
kv_evicted: an earlier request had this prefix, and its KV is evicted.
state_not_taken: the KV is there, but the plan stored no state that deep.
branch_first_seen: the KV is there up to where this prompt and a cached one differ first. No state was stored
    at that point, because this request is the first that differs there.
state_evicted: a state was there and was evicted.
last_token: the whole prompt is known, but its last block must be computed for the last token's logits.
partial_block: tokens after the last whole block of a prompt whose whole blocks, if it has any, are known.
    A prompt shorter than a block has no whole block: this is the reason of all its tokens, also of new ones.
capacity: a state was planned there, and no slot was available.
disabled: no prefix caching, or the log-probs of these tokens are wanted.
"""
COMPUTE_REASONS: tuple[ComputeReason, ...] = get_args(ComputeReason)
"""All values of `ComputeReason`, whose documentation explains each."""
STATE_REMOVAL_CAUSES: tuple[StateRemovalCause, ...] = get_args(StateRemovalCause)
KV_REMOVAL_CAUSES: tuple[KVRemovalCause, ...] = get_args(KVRemovalCause)
STATE_EVICTIONS: frozenset[StateRemovalCause] = frozenset({"new_state", "live_state"})
"""Another state needed the slot."""
EVICTIONS = STATE_EVICTIONS | {"kv_evicted", "new_block"}
"""The causes that are want of memory, of states or KV: the prefix may still be asked for."""

AGE_BOUNDS_S = (0.1, 1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)
"""Upper bounds of the classes in which ages are counted; a last class has none."""
NANOSECONDS = 1_000_000_000
Clock = Callable[[], int]  # nanoseconds since some moment; never goes back. `time.monotonic_ns` is one
_BOUNDS_NS = [int(bound * NANOSECONDS) for bound in AGE_BOUNDS_S]
_NUM_RECENT = 256


@dataclass(frozen=True)
class AgeCounts:
    """How long before their eviction states were last used.

    Attributes:
        counts: how many were at most as old as each bound of `AGE_BOUNDS_S` and older than the bound before
            it; the last count is of those older than all bounds.
        sum_s: the sum of all ages in seconds.
        recent_s: the ages of the last 256 evicted states, oldest eviction first.
    """

    counts: tuple[int, ...] = (0,) * (len(AGE_BOUNDS_S) + 1)
    sum_s: float = 0.0
    recent_s: tuple[float, ...] = ()


class Turnover[Cause: str]:
    """Statistics of what entered one part of the cache and what was removed."""

    def __init__(self, causes: Sequence[Cause]) -> None:
        self._causes = causes
        self._recent_ns = deque[int](maxlen=_NUM_RECENT)
        self.clear()

    def clear(self) -> None:
        """Set all counts to 0."""
        self.by_cause: dict[Cause, int] = dict.fromkeys(self._causes, 0)
        self.num_entered = self.num_unused = self.num_refused = 0  # the last two count states only
        self._num_by_age = [0] * (len(_BOUNDS_NS) + 1)
        self._age_sum_ns = 0
        self._recent_ns.clear()

    @property
    def num_removed(self) -> int:
        return sum(self.by_cause.values())

    @property
    def ages(self) -> AgeCounts:
        """The ages of the evicted states. Any thread may read it."""
        recent = tuple(age / NANOSECONDS for age in self._recent_ns.copy())
        return AgeCounts(tuple(self._num_by_age), self._age_sum_ns / NANOSECONDS, recent)

    def count_ages(self, now_ns: int, last_used_ns: list[int]) -> None:
        """Count the ages of evicted states."""
        for used_ns, count in Counter(last_used_ns).items():  # most were used together
            age = now_ns - used_ns
            self._num_by_age[bisect_left(_BOUNDS_NS, age)] += count
            self._age_sum_ns += age * count
            self._recent_ns.extend([age] * count)

    def repair(self, num_present: int) -> None:
        """Repair the counts after an interrupted change: `num_present` entries are there; no count falls."""
        surplus = self.num_entered - self.num_removed - num_present
        if surplus > 0:
            self.by_cause[self._causes[-1]] += surplus
        else:
            self.num_entered -= surplus

    def check_integrity(self, num_present: int, what: str) -> None:
        """Raise AssertionError unless `num_present` entries can be there; `what` names them."""
        assert self.num_entered - self.num_removed == num_present, f"the count of removed {what} is off"
        evicted = sum(count for cause, count in self.by_cause.items() if cause in EVICTIONS)
        assert sum(self._num_by_age) <= evicted, f"the count of ages of {what} is off"
        assert 0 <= self.num_unused <= evicted, f"more {what} were evicted unused than evicted"


class SlotCounts(NamedTuple):
    """Numbers of slots now, and of states that were ever committed, or evicted for another state."""

    free: int
    reserved: int
    committed: int
    committed_total: int
    evicted_total: int
    live: int = 0


@dataclass(frozen=True)
class TierStats:
    """How full host memory and the disk are, and how many states came back.

    Attributes:
        num_host_states, num_disk_states: copies in host memory, and on the disk.
        num_states_fetched: states that came back to the device since the beginning or `reset`, those from the
            disk included; as are the counts that follow.
        num_states_fetched_from_disk: of these, those from the disk.
        num_copies_damaged: copies whose bytes were not those that were stored, or whose copy failed.
        num_copies_not_written: files that were not there when they were wanted, because states were evicted
            faster than the disk writes, or because they could not be written or read.
    """

    num_host_states: int = 0
    num_disk_states: int = 0
    num_states_fetched: int = 0
    num_states_fetched_from_disk: int = 0
    num_copies_damaged: int = 0
    num_copies_not_written: int = 0


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
