"""Prefix caching of SGLang for hybrid models, as its sources of September 2026 (0.5.2x) have it."""

import math
from dataclasses import dataclass, replace

from block_cache import CoverageSlots, KVPool, PathCapSlots, StateSlots, TwoPools
from block_rows import num_kv_blocks, num_state_slots
from blocks import ROOT, BlockIndex, block_index
from loop import RequestLoop, RunningRequest
from mambaslots.devices import GIGABYTE
from mambaslots.replay.setting import ReplayResult, ReplaySetting
from mambaslots.replay.trace import Trace

MAMBA_FULL_MEMORY_RATIO = 0.9
"""Default of `--mamba-full-memory-ratio`: memory for states / memory for KV."""
TRACK_INTERVAL = 256
"""Default of `--mamba-track-interval`: decodes keep a state at multiples of it."""
SLOTS_PER_REQUEST = 3
"""Slots of a running request with `extra_buffer` and overlapped steps: its live state, and two to track."""
SLOTS_PER_ROW = 5
"""`max_running_requests` is at most the slots / 5 (`_calculate_mamba_ratio`)."""


class SGLangCache(TwoPools):
    """A radix tree whose every leaf holds a state, at the grid of the scan's chunks.

    Args:
        index: blocks of one chunk.
        num_kv_blocks: chunks of KV.
        states: the slots; live ones come out of them where `slots_per_request` is not 0.
        slots_per_request: slots that a running request takes.
    """

    def __init__(
        self, index: BlockIndex, num_kv_blocks: int, states: StateSlots, slots_per_request: int
    ) -> None:
        super().__init__(index, KVPool(index, num_kv_blocks, None, self._forget), states)
        self._parent = index.parent
        self._interval = math.lcm(TRACK_INTERVAL, index.block_size)
        self._slots_per_request = slots_per_request
        self._num_live = 0

    def admit(self, request: RunningRequest) -> None:
        block, path = self._block, request.path
        limit = (request.target - 1) // block
        request.matched = self.kv.match(path, limit)
        request.held = self.states.deepest(path, request.matched)
        request.computed = request.held * block
        request.private = 0
        self.kv.touch(path, request.matched)
        self.kv.hold(path, request.held)
        self._lock(request, path[request.held - 1] if request.held else ROOT)
        if request.state:
            self.states.refresh(request.state)
        self._num_live += 1
        self._fit(0)

    def _lock(self, request: RunningRequest, node: int) -> None:
        if request.state:
            self.states.unpin(request.state)
        request.state = node
        if node:
            self.states.pin(node)

    def _fit(self, num_more: int) -> bool:
        """Evict states until the running requests have theirs and `num_more` are free."""
        self.states.capacity = self._num_slots - self._num_live * self._slots_per_request
        while len(self.states.slots) + num_more > self.states.capacity:
            victim = self.states.victim(ROOT)
            if victim is None:
                return False
            self._evict_state(victim)
        return True

    def _evict_state(self, node: int) -> None:
        self.states.drop(node)
        self._prune(node)

    def _prune(self, node: int) -> None:
        """Drop KV that ends in no state: a leaf goes with its state, and so do stateless leaves above it."""
        kv = self.kv
        while node != ROOT and kv.evictable(node) and node not in self.states:
            kv.drop(node)
            node = self._parent[node]

    def _forget(self, node: int) -> None:
        if node in self.states:
            self.states.forget(node)

    def stop(self, request: RunningRequest, budget: int) -> int:
        if len(self.states.slots) > self.states.capacity:
            return request.computed
        return super().stop(request, budget)

    def advance(self, request: RunningRequest, end: int) -> None:
        start, block = request.computed, self._block
        request.computed = end
        if start >= request.target:
            return
        tracked = start // block + (end - start) // block
        if start // block < request.matched and request.matched * block < end:
            tracked = request.matched
        if tracked * block > start:
            self._insert(request, tracked)

    def _insert(self, request: RunningRequest, depth: int) -> None:
        """Make KV findable up to a state, and store the state there."""
        path = request.path
        if depth <= request.held:
            return
        while request.held < depth:
            self.kv.register(path[request.held])
            request.held += 1
            request.private -= 1
        node = path[depth - 1]
        self.kv.touch(path, depth)
        if node in self.states:
            self.states.refresh(node)
        elif not (self._fit(1) and self.states.store(node)):
            return
        self._lock(request, node)

    def release(self, request: RunningRequest, finished: bool) -> None:
        tracked = request.computed // self._interval * self._interval
        if finished and tracked > request.target:
            self._insert(request, tracked // self._block)
        self._lock(request, ROOT)
        self.kv.release(request.path, request.held, request.private)
        if request.held:
            self._prune(request.path[request.held - 1])
        request.held = request.private = 0
        self._num_live -= 1
        self.states.capacity = self._num_slots - self._num_live * self._slots_per_request


@dataclass(frozen=True)
class SGLangRow:
    """SGLang's unified radix cache with the strategy `extra_buffer`, its default.

    A prefill step stores one state: where KV matched further than the state, if that lies in the step,
    else the step's last chunk boundary. An answer's last multiple of 256 is stored when the request ends.
    KV is cached up to a stored state only. The state used longest ago goes first, where storing and
    resuming are uses; a leaf goes with its KV and the stateless KV above it, an inner state alone. KV
    leaves go by last use. A total is divided by `--mamba-full-memory-ratio`; live states, three a running
    request, come out of the states' part, and at most a fifth of the slots run. Given apart, one live state
    a row comes beside the states, all rows run, and what they leave idle holds cached states. Left out:
    pages of one token (KV counts in whole chunks), and locks of states while their request decodes.

    Attributes:
        max_states_per_path: `--mamba-max-states-per-path`; -1 for no cap.
        thins: `CoverageSlots` decides which state goes.
    """

    name: str = "sglang"
    max_states_per_path: int = -1
    thins: bool = False

    def replay(self, trace: Trace, setting: ReplaySetting) -> ReplayResult:
        """See `ComparedCache.replay`."""
        index = block_index(trace, setting.shape.grid_tokens)
        per_request = 0
        if setting.total_gb is None:
            num_slots = num_state_slots(setting)
            if setting.shape.durable_state_bytes == setting.shape.state_bytes:
                num_slots, per_request = num_slots + setting.max_requests, 1
            kv_blocks = num_kv_blocks(setting, index.block_size)
        else:
            states_gb = setting.total_gb * MAMBA_FULL_MEMORY_RATIO / (1 + MAMBA_FULL_MEMORY_RATIO)
            num_slots = int(states_gb * GIGABYTE) // setting.shape.state_bytes
            apart = replace(setting, state_gb=states_gb, kv_gb=setting.total_gb - states_gb)
            kv_blocks = num_kv_blocks(apart, index.block_size)
            per_request = SLOTS_PER_REQUEST
            setting = replace(
                setting, max_requests=max(1, min(setting.max_requests, num_slots // SLOTS_PER_ROW))
            )
        if self.thins:
            states: StateSlots = CoverageSlots(index, num_slots)
        elif self.max_states_per_path > 0:
            states = PathCapSlots(index, num_slots, self.max_states_per_path)
        else:
            states = StateSlots(index, num_slots)
        cache = SGLangCache(index, kv_blocks, states, per_request)
        return RequestLoop(trace, index.paths, cache, setting).run()
