"""Marconi's cache of hybrid models ("Marconi: Prefix Caching for the Era of Hybrid LLMs", MLSys 2025)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
from block_cache import BlockCache, StateSlots, TakenStates
from block_rows import num_kv_blocks, num_state_slots
from blocks import ROOT, BlockIndex, block_index
from loop import RequestLoop, RunningRequest
from mambaslots.replay.setting import ModelShape, ReplayResult, ReplaySetting
from mambaslots.replay.trace import Trace

WINDOW = 5
"""The weight is chosen on so many times the requests that came before the first eviction."""
WEIGHTS = tuple(step / 10 for step in range(21))
"""The weights that are tried."""


def flops_saved(shape: ModelShape, start: int, end: int) -> float:
    """Arithmetic that a state at token `end` saves over one at `start`, all layers, as the paper counts it.

    A span of E tokens takes 12 E D^2 + 16 E D N + 10 E D in a Mamba layer and 16 E D^2 in an MLP, and
    attention takes 8 T D^2 + 4 T^2 D for T tokens, with hidden size D and state size N.
    """
    hidden, span = float(shape.hidden_size), end - start
    mamba = 12 * span * hidden**2 + 16 * span * hidden * shape.state_size + 10 * span * hidden
    attention = 8 * span * hidden**2 + 4 * (float(end) ** 2 - float(start) ** 2) * hidden
    mlp = 16 * span * hidden**2
    return (
        mamba * shape.num_recurrent_layers
        + attention * shape.num_attention_layers
        + mlp * shape.num_mlp_layers
    )


class FirstEvictionError(Exception):
    """A slot is needed, and none is free."""


class MarconiSlots(StateSlots):
    """The state goes of least norm(1 / age) + weight x norm(FLOPs saved / bytes), with one child at most.

    A child is a state behind another with none between: the published tree has no nodes without states. Both
    terms are scaled to 0..1 over the states that may go. The age counts requests since the state was used.
    FLOPs and bytes are of the span behind the next shallower state: its KV, and the state.

    Args:
        index: the nodes.
        capacity: slots.
        shape: of the model.
        weights: (request, weight) in order of requests: the weight from that request on.
        stops: the first eviction raises FirstEvictionError.
    """

    def __init__(
        self,
        index: BlockIndex,
        capacity: int,
        shape: ModelShape,
        weights: Sequence[tuple[int, float]],
        stops: bool = False,
    ) -> None:
        super().__init__(index, capacity)
        self._stops = stops
        self.first_eviction = -1
        self._shape = shape
        self._weights = list(weights)
        self._weight = 0.0
        self._now = 0
        self._place: dict[int, int] = {}
        self._nodes: list[int] = []
        self._used: npt.NDArray[np.float64] = np.zeros(capacity)
        self._worth: npt.NDArray[np.float64] = np.zeros(capacity)
        self._above: dict[int, int] = {}
        self._below: dict[int, set[int]] = {ROOT: set()}

    def came(self, number: int) -> None:
        self._now += 1
        while self._weights and number >= self._weights[0][0]:
            self._weight = self._weights.pop(0)[1]

    def refresh(self, node: int) -> None:
        super().refresh(node)
        place = self._place.get(node)
        if place is not None:
            self._used[place] = self._now

    def stored(self, node: int) -> None:
        self._place[node] = len(self._nodes)
        self._nodes.append(node)
        self._used[self._place[node]] = self._now
        above = self._shallower(node)
        self._below[node] = {below for below in self._below[above] if self._lies_above(node, below)}
        self._link(node, above)
        for below in self._below[node]:
            self._below[above].discard(below)
            self._link(below, node)

    def drop(self, node: int) -> None:
        self._unlink(node)
        super().drop(node)

    def forget(self, node: int) -> None:
        if node in self.slots:
            self._unlink(node)
        super().forget(node)

    def _unlink(self, node: int) -> None:
        above = self._above.pop(node)
        self._below[above].discard(node)
        for below in self._below.pop(node):
            self._link(below, above)
        place, last = self._place.pop(node), self._nodes.pop()
        if last != node:
            self._nodes[place] = last
            self._place[last] = place
            self._used[place] = self._used[len(self._nodes)]
            self._worth[place] = self._worth[len(self._nodes)]

    def _link(self, node: int, above: int) -> None:
        self._above[node] = above
        self._below[above].add(node)
        block, depth = self.index.block_size, self.index.depth
        start, end = depth[above] * block, depth[node] * block
        num_bytes = self._shape.durable_state_bytes + (end - start) * self._shape.kv_bytes_per_token
        self._worth[self._place[node]] = flops_saved(self._shape, start, end) / num_bytes

    def _shallower(self, node: int) -> int:
        parent = self.index.parent
        above = parent[node]
        while above != ROOT and above not in self._place:
            above = parent[above]
        return above

    def _lies_above(self, node: int, below: int) -> bool:
        parent, depth = self.index.parent, self.index.depth
        while depth[below] > depth[node]:
            below = parent[below]
        return below == node

    def victim(self, newcomer: int) -> int | None:
        if self.first_eviction < 0:
            self.first_eviction = self._now
            if self._stops:
                raise FirstEvictionError
        children = map(len, map(self._below.__getitem__, self._nodes))
        may_go = np.fromiter(children, dtype=np.int64, count=len(self._nodes)) < 2
        may_go[[self._place[node] for node in self._pins]] = False
        places = np.flatnonzero(may_go)
        if not len(places):
            return None
        score = _scaled(1.0 / (self._now - self._used[places] + 1.0))
        if self._weight:
            score = score + self._weight * _scaled(self._worth[places])
        return self._nodes[int(places[int(np.argmin(score))])]


def _scaled(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    least, most = values.min(), values.max()
    return (values - least) / (most - least) if most > least else np.zeros_like(values)


class MarconiCache(BlockCache):
    """Takes a state where a prompt parts from cached KV that goes on, and one at the end of each answer."""

    def advance(self, request: RunningRequest, end: int) -> None:
        start, matched = request.computed, request.matched
        branches = bool(matched) and self.kv.children[request.path[matched - 1]] > 0
        super().advance(request, end)
        if branches and start < matched * self._block <= end:
            self.states.store(request.path[matched - 1])

    def release(self, request: RunningRequest, finished: bool) -> None:
        depth = request.computed // self._block
        if finished and depth and depth <= request.held:
            self.states.store(request.path[depth - 1])
        super().release(request, finished)


@dataclass(frozen=True)
class MarconiRow:
    """Marconi as published, on whole blocks.

    The weight is 0 up to the first eviction and for a window of five times as many requests; then the weight
    of 0, 0.1, ... 2 that resumes most tokens of that window is taken for good. The window is replayed one
    request after another. Left out: states inside blocks, and one budget for KV and states together (each has
    its own, so that the eviction of a state leaves its KV).
    """

    name: str = "marconi"

    def replay(self, trace: Trace, setting: ReplaySetting) -> ReplayResult:
        """See `ComparedCache.replay`."""
        index = block_index(trace, setting.block_size_tokens)
        states = partial(MarconiSlots, index, num_state_slots(setting), setting.shape)
        kv_blocks = num_kv_blocks(setting, index.block_size)

        def serve(part: Trace, slots: MarconiSlots, limits: ReplaySetting) -> ReplayResult:
            cache = MarconiCache(index, kv_blocks, slots, TakenStates())
            return RequestLoop(part, index.paths, cache, limits).run()

        one_by_one, weights = replace(setting, max_requests=1), []
        first = states((), True)
        try:
            serve(trace, first, one_by_one)
        except FirstEvictionError:
            seen = first.first_eviction
            window_end = min((1 + WINDOW) * seen, len(trace.requests))
            window = replace(trace, requests=trace.requests[:window_end])
            tried = [
                serve(window, states(((seen, weight),)), one_by_one).resumed_tokens for weight in WEIGHTS
            ]
            weights.append((window_end, WEIGHTS[tried.index(max(tried))]))
        return serve(trace, states(weights), setting)
