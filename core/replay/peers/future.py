"""What a trace tells in advance: from which state each request would resume, if none were ever evicted."""

from bisect import bisect_right

import numpy as np
import numpy.typing as npt

from ..trace import Trace
from .blocks import BlockIndex


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
