"""Rows that know the trace in advance: what a cache could resume."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from block_cache import BlockCache, StateSlots, TakenStates
from block_rows import num_kv_blocks, num_state_slots
from blocks import ROOT, BlockIndex, block_index
from loop import RequestLoop
from mambaslots.replay.compared_caches import ComparedCache
from mambaslots.replay.setting import ReplayResult, ReplaySetting
from mambaslots.replay.trace import Trace


class KnownFuture:
    """The uses to come of each node, in the order of the trace.

    Attributes:
        resumable: of each request, blocks up to the deepest boundary of its prompt that another passed.
        in_hand: of each request, the last request before it that computed the state it would resume from, or
            resumed from it; -1 where there is none.
        uses: requests that would resume from a node, in order.
        kv_uses: requests that would read the KV of a node, in order.
    """

    def __init__(self, trace: Trace, index: BlockIndex) -> None:
        self.index = index
        self.resumable: list[int] = []
        self.in_hand: list[int] = []
        self.uses: dict[int, list[int]] = {}
        self.kv_uses: dict[int, list[int]] = {}
        last_in_hand: dict[int, int] = {}
        for number, (request, path) in enumerate(zip(trace.requests, index.paths, strict=True)):
            depth = min((len(request.prompt) - 1) // index.block_size, len(path))
            while depth and path[depth - 1] not in last_in_hand:
                depth -= 1
            self.resumable.append(depth)
            self.in_hand.append(last_in_hand[path[depth - 1]] if depth else -1)
            if depth:
                self.uses.setdefault(path[depth - 1], []).append(number)
            for node in path[:depth]:
                self.kv_uses.setdefault(node, []).append(number)
            for node in path[max(0, depth - 1) :]:
                last_in_hand[node] = number

    def next_use(self, node: int, now: int) -> int:
        """The first request after `now` that would resume from a node; -1 for none."""
        return _following(self.uses.get(node), now)

    def next_kv_use(self, node: int, now: int) -> int:
        """The first request after `now` that would read the KV of a node; -1 for none."""
        return _following(self.kv_uses.get(node), now)


def _following(requests: list[int] | None, now: int) -> int:
    if requests is None:
        return -1
    place = bisect_right(requests, now)
    return requests[place] if place < len(requests) else -1


def planned_uses(future: KnownFuture, num_slots: int) -> set[int]:
    """Requests for which a state is kept, so that many tokens are resumed in `num_slots` slots.

    Keeping a state for a request takes a slot from the request that has it in hand to the use. These spans
    are packed greedily by tokens per time, in several weights and rounds; a later round counts only
    tokens beyond the next shallower state that the round before kept. The best packing is returned.
    """
    best: tuple[int, set[int]] = (-1, set())
    for power in (1.0, 0.5, 0.0):
        gains = [float(depth) for depth in future.resumable]
        for _ in range(3):
            kept = _pack(future, num_slots, gains, power)
            fallbacks = _fallbacks(future, kept)
            total = sum(
                depth if number in kept else fallback
                for number, (depth, fallback) in enumerate(zip(future.resumable, fallbacks, strict=True))
            )
            if total > best[0]:
                best = (total, kept)
            gains = [
                float(depth - fallback) for depth, fallback in zip(future.resumable, fallbacks, strict=True)
            ]
    return best[1]


def _pack(future: KnownFuture, num_slots: int, gains: list[float], power: float) -> set[int]:
    """Requests whose span fits, the largest gain / span ** power first."""
    in_use: npt.NDArray[np.int32] = np.zeros(len(gains), dtype=np.int32)
    wanted = [number for number, gain in enumerate(gains) if gain > 0]
    wanted.sort(key=lambda number: (-gains[number] / (number - future.in_hand[number]) ** power, number))
    kept = set()
    for number in wanted:
        span = in_use[future.in_hand[number] : number]
        if span.max() < num_slots:
            span += 1
            kept.add(number)
    return kept


def _fallbacks(future: KnownFuture, kept: set[int]) -> list[int]:
    """Of each request, the depth of the deepest kept state above the one that it would resume from."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for number in sorted(kept):
        node = future.index.paths[number][future.resumable[number] - 1]
        spans.setdefault(node, []).append((future.in_hand[number], number))
    found = []
    for number, depth in enumerate(future.resumable):
        path = future.index.paths[number]
        fallback = 0
        for above in range(depth - 1, 0, -1):
            of_node = spans.get(path[above - 1])
            if of_node is not None:
                place = bisect_right(of_node, (number, -1)) - 1
                if place >= 0 and of_node[place][0] < number <= of_node[place][1]:
                    fallback = above
                    break
        found.append(fallback)
    return found


Worth = Callable[[int, int, int], float]
"""Of (blocks that a state saves, requests until its next use, block depth): the least worth goes first."""


def soonest(saved: int, wait: int, depth: int) -> float:
    """Belady: the state goes whose next use comes last."""
    return 1.0 / wait


def densest(saved: int, wait: int, depth: int) -> float:
    """The state goes that saves fewest tokens for the time that it waits."""
    return saved / wait


def largest(saved: int, wait: int, depth: int) -> float:
    """The state goes that saves fewest tokens at its next use."""
    return saved + 1.0 / wait


class ClairvoyantSlots(StateSlots):
    """Keeps only states that a request to come would resume from.

    The state of least worth goes, the new one included.

    Args:
        future: of the trace.
        capacity: slots.
        worth: of a state.
        kept: requests for which a state may be kept; None for all.
    """

    def __init__(
        self, future: KnownFuture, capacity: int, worth: Worth, kept: set[int] | None = None
    ) -> None:
        super().__init__(future.index, capacity)
        self._future = future
        self._worth = worth
        self._kept = kept
        self._next: dict[int, tuple[int, int]] = {}
        self._now = -1

    def came(self, number: int) -> None:
        self._now = max(self._now, number)

    def next_kv_use(self, node: int) -> int:
        """The negative of the next use of its KV: KV that is never used again goes first."""
        following = self._future.next_kv_use(node, self._now)
        return -following if following >= 0 else -(1 << 60)

    def store(self, node: int) -> bool:
        if node in self.slots:
            return True
        if not self._note(node):
            return False
        if super().store(node):
            return True
        del self._next[node]
        return False

    def unpin(self, node: int) -> None:
        super().unpin(node)
        if not self.pinned(node) and not self._note(node):
            self.drop(node)

    def drop(self, node: int) -> None:
        self._next.pop(node, None)
        super().drop(node)

    def forget(self, node: int) -> None:
        self._next.pop(node, None)
        super().forget(node)

    def victim(self, newcomer: int) -> int | None:
        now, worth, depths = self._now, self._worth, self.index.depth
        least, found = None, None
        for node, (following, saved) in self._next.items():
            if self.pinned(node):
                continue
            value = worth(saved, max(1, following - now), depths[node])
            if least is None or value < least:
                least, found = value, node
        return None if found == newcomer else found

    def _note(self, node: int) -> bool:
        """Look up the next use of a state, and what it saves; False where there is none."""
        following = self._future.next_use(node, self._now)
        if following < 0 or (self._kept is not None and following not in self._kept):
            return False
        parent, depth = self.index.parent, self.index.depth
        above = parent[node]
        while above != ROOT and above not in self.slots:
            above = parent[above]
        self._next[node] = (following, depth[node] - depth[above])
        return True


@dataclass(frozen=True)
class ClairvoyantRow:
    """A cache that knows the trace, in the order in which it came.

    It takes a state only at a boundary from which a later request would resume if nothing were ever
    evicted, of prompts and answers alike, and refuses a new state that is worth less than all others. KV
    goes in the order of its next use. Rows that are idle lend their live slots to cached states, unless these
    are encoded. Each such row is a lower bound of the best, because a state that is dropped leaves a later
    request at a shallower one.

    `plans`: the states to keep are chosen before, for the whole trace at once.
    """

    name: str
    worth: Worth
    plans: bool = False

    def replay(self, trace: Trace, setting: ReplaySetting) -> ReplayResult:
        """See `ComparedCache.replay`."""
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
        return RequestLoop(trace, index.paths, cache, setting).run()


CEILING: tuple[ComparedCache, ...] = (
    ClairvoyantRow("belady", soonest),
    ClairvoyantRow("belady-tokens", largest),
    ClairvoyantRow("belady-density", densest),
    ClairvoyantRow("planned", densest, plans=True),  # packs the states of the whole trace into the slots
)
"""The best of them is the ceiling that other rows are measured by."""
