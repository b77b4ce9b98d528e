"""What a cache could resume that knew the trace: rows to measure others by."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from .peers.block_cache import BlockCache
from .peers.blocks import block_index
from .peers.clairvoyant import ClairvoyantSlots, Worth, densest, largest, soonest
from .peers.future import KnownFuture, planned_uses
from .peers.loop import RequestLoop
from .peers.plans import TakenStates
from .peers.rows import num_kv_blocks, num_state_slots
from .setting import Progress, ReplayResult, ReplayRow, ReplaySetting
from .trace import Trace

MOST_EXACT_REQUESTS = 10
MOST_EXACT_SLOTS = 3


@dataclass(frozen=True)
class ClairvoyantRow:
    """A cache that knows the trace, in the order in which it came.

    It takes a state only at a boundary from which a later request would resume if nothing were ever
    evicted, of prompts and answers alike, and refuses a new state that is worth less than all others. KV
    goes in the order of its next use. Rows that are idle lend their live slots to cached states, unless these
    are encoded. Each such row is a lower bound of the best, because a state that is dropped leaves a later
    request at a shallower one.

    Attributes:
        name, source: see `ReplayRow`.
        worth: of a state.
        plans: the states to keep are chosen before, for the whole trace at once.
    """

    name: str
    source: str
    worth: Worth
    plans: bool = False

    def replay(self, trace: Trace, setting: ReplaySetting, progress: Progress) -> ReplayResult:
        """See `ReplayRow.replay`."""
        index = block_index(trace, setting.block_size_tokens)
        future = KnownFuture(trace, index)
        num_slots = num_state_slots(setting)
        num_lent = 0 if setting.shape.encodes else setting.max_requests
        kept = planned_uses(future, num_slots + num_lent // 2) if self.plans else None
        slots = ClairvoyantSlots(future, num_slots + num_lent, self.worth, kept)
        kv_blocks = num_kv_blocks(setting, index.block_size)
        cache = BlockCache(
            index, kv_blocks, slots, TakenStates(every=True),
            kv_rank=slots.next_kv_use, shares_live=num_lent > 0,
        )  # fmt: skip
        return RequestLoop(trace, index.paths, cache, setting, progress).run()


CEILING: tuple[ReplayRow, ...] = (
    ClairvoyantRow("belady", "knows the trace: the state goes whose next use comes last", soonest),
    ClairvoyantRow("belady-tokens", "knows the trace: fewest tokens saved at the next use go first", largest),
    ClairvoyantRow(
        "belady-density", "knows the trace: fewest tokens saved per waiting time go first", densest
    ),
    ClairvoyantRow(
        "planned", "knows the trace: states to keep are packed into the slots before", densest, True
    ),
)
"""The best of them is what other rows are measured by."""


def best_of(
    rows: Sequence[ReplayRow], trace: Trace, setting: ReplaySetting, progress: Progress
) -> tuple[ReplayRow, ReplayResult]:
    """The row that resumes most, the first of equal ones, and its result.

    Args:
        rows: one or more.
        progress: told of the requests of all rows together.
    """
    if not rows:
        raise ValueError("rows is empty; accepted: one row or more")
    results = []
    for place, row in enumerate(rows):

        def report(served: int, total: int, place: int = place) -> None:
            progress(place * total + served, len(rows) * total)

        results.append((row, row.replay(trace, setting, report)))
    return max(results, key=lambda pair: pair[1].resumed_tokens)


def exact_optimum(trace: Trace, block_size: int, num_slots: int) -> int:
    """The most tokens that any choice of states resumes, one request after another, with KV for all.

    Every choice is tried: where to resume, and which states to keep of those that are cached or computed.

    Raises:
        ValueError: the trace or the slots are too many to try all choices.
    """
    if len(trace.requests) > MOST_EXACT_REQUESTS or num_slots > MOST_EXACT_SLOTS:
        raise ValueError(
            f"{len(trace.requests)} requests and num_slots={num_slots} are too many; accepted: at most "
            f"{MOST_EXACT_REQUESTS} and {MOST_EXACT_SLOTS}"
        )
    index = block_index(replace(trace, requests=list(trace.requests)), block_size)
    useful: list[set[int]] = [set() for _ in range(len(trace.requests) + 1)]
    for number in range(len(trace.requests) - 1, -1, -1):
        reach = (len(trace.requests[number].prompt) - 1) // block_size
        useful[number] = useful[number + 1] | set(index.paths[number][:reach])
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for number, (request, path) in enumerate(zip(trace.requests, index.paths, strict=True)):
        following: dict[frozenset[int], int] = {}
        reach = (len(request.prompt) - 1) // block_size
        for cached, resumed in best.items():
            starts = [depth for depth in range(1, min(reach, len(path)) + 1) if path[depth - 1] in cached]
            for start in (0, *starts):
                there = (cached | set(path[start:])) & useful[number + 1]
                for kept in combinations(sorted(there), min(num_slots, len(there))):
                    key, total = frozenset(kept), resumed + start * block_size
                    if total > following.get(key, -1):
                        following[key] = total
        best = following
    return max(best.values())
