"""A cache of KV blocks with states at some of their ends."""

from collections.abc import Callable
from typing import Any

from .blocks import BlockIndex
from .kv_pool import KVPool
from .loop import RunningRequest
from .plans import StatePlan
from .states import StateSlots
from .two_pools import TwoPools


class BlockCache(TwoPools):
    """KV in a tree of blocks, states in slots beside it. A state whose KV goes, goes with it.

    Args:
        index: the blocks of the trace.
        num_kv_blocks: KV blocks in all.
        states: the slots.
        plan: which states are taken.
        answers: generated tokens are cached, and the end of a request counts as a use of its KV.
        stateless_first: leaves of KV without a state go before those that hold one.
        kv_rank: of a leaf of KV, in place of `stateless_first`; the least goes first.
        shares_live: a running request takes its live state out of `states`; else live states lie beside them.
    """

    def __init__(
        self,
        index: BlockIndex,
        num_kv_blocks: int,
        states: StateSlots,
        plan: StatePlan,
        *,
        answers: bool = True,
        stateless_first: bool = True,
        kv_rank: Callable[[int], Any] | None = None,
        shares_live: bool = False,
    ) -> None:
        rank = kv_rank or (states.__contains__ if stateless_first else None)
        super().__init__(index, KVPool(index, num_kv_blocks, rank, states.forget), states)
        self._plan = plan
        self._answers = answers
        self._live_slots = int(shares_live)

    def admit(self, request: RunningRequest) -> None:
        block, path = self._block, request.path
        self.states.came(request.index)
        request.matched = request.held = self.kv.match(path, request.target // block)
        depth = self.states.deepest(path, min(request.matched, (request.target - 1) // block))
        request.computed = depth * block
        self.kv.touch(path, request.held)
        self.kv.hold(path, request.held)
        request.private = 0
        request.state = 0
        if depth:
            request.state = path[depth - 1]
            self.states.use(request.state)
        self.states.shrink(self._live_slots)

    def advance(self, request: RunningRequest, end: int) -> None:
        start, block = request.computed, self._block
        request.computed = end
        if request.state:
            self.states.unpin(request.state)
            request.state = 0
        cached_end = end if self._answers else min(end, request.target)
        while request.held < cached_end // block:
            self.kv.register(request.path[request.held])
            request.held += 1
            request.private -= 1
        if start < request.target:
            for depth in self._plan.of_prefill(request, start, end, block):
                self.states.store(request.path[depth - 1])
        elif self._plan.every and self._answers:
            self.states.store(request.path[end // block - 1])

    def release(self, request: RunningRequest, finished: bool) -> None:
        if request.state:
            self.states.unpin(request.state)
            request.state = 0
        depth = request.computed // self._block
        if finished and self._plan.decode and depth > request.target // self._block:
            self.states.store(request.path[depth - 1])
        if self._answers:
            self.kv.touch(request.path, request.held)
        self.kv.release(request.path, request.held, request.private)
        request.held = request.private = 0
        self.states.capacity += self._live_slots
