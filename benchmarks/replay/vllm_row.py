"""Prefix caching of vLLM for hybrid models in align mode: one pool of equal blocks for KV and states."""

from collections import OrderedDict
from dataclasses import dataclass, replace

from block_rows import missing_memory
from blocks import BlockIndex, block_index
from loop import RequestLoop, RunningRequest
from mambaslots.devices import GIGABYTE
from mambaslots.replay.setting import ModelShape, ReplayResult, ReplaySetting
from mambaslots.replay.trace import Trace

KERNEL_TOKENS = 16
"""The attention block size is a multiple of it."""


def page_tokens(shape: ModelShape) -> int:
    """Tokens of a block: the least multiple of 16 whose KV in one layer is as large as a layer's state.

    As `HybridAttentionMambaModelConfig.verify_and_update_config` raises the attention block size.
    """
    state_page = -(-shape.state_bytes // shape.num_recurrent_layers)
    token_bytes = shape.kv_bytes_per_token // shape.num_attention_layers
    return KERNEL_TOKENS * -(-state_page // (KERNEL_TOKENS * token_bytes))


def group_layers(shape: ModelShape) -> int:
    """Layers that share a block table: as many as the rarer kind has, or as the other where they are near."""
    few, many = sorted((shape.num_attention_layers, shape.num_recurrent_layers))
    return many if many < 1.5 * few else few


class VLLMCache:
    """Blocks of equal bytes. A block of KV takes one for each group of attention layers, a state one for each
    group of recurrent layers. What no request holds waits in one queue, and is overwritten in order of
    release.

    Args:
        index: blocks of a page's tokens.
        num_blocks: of the pool.
        kv_blocks, state_blocks: pool blocks of one block of KV, and of one state.
    """

    def __init__(self, index: BlockIndex, num_blocks: int, kv_blocks: int, state_blocks: int) -> None:
        self._block = index.block_size
        self._cost = (kv_blocks, state_blocks)
        self._num_free = num_blocks
        self._num_waiting = 0
        self._queue: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._held: tuple[dict[int, int], dict[int, int]] = ({}, {})
        self._has_live: set[int] = set()
        self.num_states_taken = 0
        self.state_capacity = 0

    def _cached(self, kind: int, node: int) -> bool:
        return node in self._held[kind] or (kind, node) in self._queue

    def _hold(self, kind: int, node: int) -> None:
        held = self._held[kind]
        held[node] = held.get(node, 0) + 1
        if (kind, node) in self._queue:
            del self._queue[kind, node]
            self._num_waiting -= self._cost[kind]

    def _drop(self, kind: int, node: int) -> None:
        """A request ends its hold; the last one puts the block at the end of the queue."""
        held = self._held[kind]
        held[node] -= 1
        if not held[node]:
            del held[node]
            self._queue[kind, node] = None
            self._num_waiting += self._cost[kind]

    def _take(self, num_blocks: int) -> bool:
        if num_blocks > self._num_free + self._num_waiting:
            return False
        while self._num_free < num_blocks:
            (kind, _), _ = self._queue.popitem(last=False)
            self._num_free += self._cost[kind]
            self._num_waiting -= self._cost[kind]
        self._num_free -= num_blocks
        return True

    def check_integrity(self) -> None:
        """Raise AssertionError where blocks of the pool are counted wrongly."""
        waiting = sum(self._cost[kind] for kind, _ in self._queue)
        assert waiting == self._num_waiting
        assert self._num_free >= 0
        assert all(node not in self._held[kind] for kind, node in self._queue)

    @property
    def num_blocks(self) -> int:
        """Blocks that are free, wait, or lie in what requests hold and others may find."""
        held = sum(len(held) * cost for held, cost in zip(self._held, self._cost, strict=True))
        return self._num_free + self._num_waiting + held + len(self._has_live) * self._cost[1]

    def admit(self, request: RunningRequest) -> None:
        path, depth = request.path, 0
        limit = (request.target - 1) // self._block
        while depth < limit and self._cached(0, path[depth]):
            depth += 1
        request.matched = depth
        while depth and not self._cached(1, path[depth - 1]):
            depth -= 1
        request.held = depth
        request.private = 0
        request.computed = depth * self._block
        for node in path[:depth]:
            self._hold(0, node)
        request.state = path[depth - 1] if depth else 0
        if depth:
            self._hold(1, request.state)

    def stop(self, request: RunningRequest, budget: int) -> int:
        block, start = self._block, request.computed
        end = min(start + budget, request.target)
        last = request.target // block * block
        if end < last:
            return start + (end - start) // block * block
        return last if start < last < end else end

    def reserve(self, request: RunningRequest, end: int) -> bool:
        missing = max(0, -(-end // self._block) - request.held - request.private)
        needs_live = request.index not in self._has_live
        if not self._take(missing * self._cost[0] + needs_live * self._cost[1]):
            return False
        request.private += missing
        self._has_live.add(request.index)
        return True

    def boundary(self, request: RunningRequest) -> int:
        return (request.computed // self._block + 1) * self._block

    def advance(self, request: RunningRequest, end: int) -> None:
        request.computed = end
        self._drop_state(request)
        while request.held < end // self._block:
            node = request.path[request.held]
            request.held += 1
            request.private -= 1
            if self._cached(0, node):
                self._num_free += self._cost[0]
            self._hold(0, node)
        if end % self._block == 0:
            self._has_live.remove(request.index)
            request.state = request.path[end // self._block - 1]
            if self._cached(1, request.state):
                self._num_free += self._cost[1]
            else:
                self.num_states_taken += 1
            self._hold(1, request.state)

    def _drop_state(self, request: RunningRequest) -> None:
        if request.state:
            self._drop(1, request.state)
            request.state = 0

    def release(self, request: RunningRequest, finished: bool) -> None:
        self._drop_state(request)
        for node in reversed(request.path[: request.held]):
            self._drop(0, node)
        self._num_free += request.private * self._cost[0]
        if request.index in self._has_live:
            self._has_live.remove(request.index)
            self._num_free += self._cost[1]
        request.held = request.private = 0


@dataclass(frozen=True)
class VLLMRow:
    """vLLM with `mamba_cache_mode="align"`, the default where prefix caching is on.

    The attention block is raised until its bytes equal a state's page; layers are divided into groups of
    equal size, and a state takes a block of each of its groups. Prefill steps end on boundaries, and each
    such end, and each boundary that a decode passes, leaves a cached state. A request resumes at the
    deepest boundary where both are cached. What is free longest is overwritten, KV or state.
    `state_gb` and `kv_gb` are one pool of their sum, live states included. A step budget below a block,
    which vLLM refuses, counts as a block. Left out: second copies of a block that was computed again
    (here there is one, freshly used), and speculation.
    """

    name: str = "vllm"

    def replay(self, trace: Trace, setting: ReplaySetting) -> ReplayResult:
        """See `ComparedCache.replay`."""
        shape = setting.shape
        if not shape.kv_bytes_per_token:
            raise ValueError(f"{shape.name} has no attention; accepted: a model with KV")
        block, layers = page_tokens(shape), group_layers(shape)
        token_bytes = shape.kv_bytes_per_token // shape.num_attention_layers
        total_gb = setting.total_gb
        if total_gb is None:
            if setting.state_gb is None or setting.kv_gb is None:
                raise missing_memory(setting)
            total_gb = setting.state_gb + setting.kv_gb
        num_blocks = int(total_gb * GIGABYTE) // (block * token_bytes * layers)
        index = block_index(trace, block)
        cache = VLLMCache(
            index,
            num_blocks,
            -(-shape.num_attention_layers // layers),
            -(-shape.num_recurrent_layers // layers),
        )
        least = block + setting.max_requests
        setting = replace(setting, max_tokens_per_step=max(setting.max_tokens_per_step, least))
        return RequestLoop(trace, index.paths, cache, setting).run()
