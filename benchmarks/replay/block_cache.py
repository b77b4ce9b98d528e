"""A cache of KV blocks with states at some of their ends."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from blocks import ROOT, BlockIndex, LazyHeap
from loop import RunningRequest


class KVPool:
    """Blocks that are cached stay until memory is needed; then leaves go that no request holds.

    Args:
        index: the nodes.
        capacity: blocks.
        rank: of a leaf; the least (rank, last use) goes first. None goes by last use alone.
        on_evict: called with each node that loses its KV.
    """

    def __init__(
        self,
        index: BlockIndex,
        capacity: int,
        rank: Callable[[int], Any] | None = None,
        on_evict: Callable[[int], None] | None = None,
    ) -> None:
        self.capacity = capacity
        self.num_cached = 0
        self.num_private = 0
        self.num_held = 0
        self.children = [0] * index.num_nodes
        self.stamp = [0] * index.num_nodes
        self.refs = [0] * index.num_nodes
        self.cached = bytearray(index.num_nodes)
        self._parent = index.parent
        self._rank = rank
        self._on_evict = on_evict
        self._leaves = LazyHeap(self._leaf_key)
        self._clock = 0

    def _leaf_key(self, node: int) -> Any:
        if not self.evictable(node):
            return None
        if self._rank is None:
            return self.stamp[node]
        return self._rank(node), self.stamp[node]

    def evictable(self, node: int) -> bool:
        """It is a cached leaf that no request holds."""
        return bool(self.cached[node]) and not self.refs[node] and not self.children[node]

    def match(self, path: list[int], limit: int) -> int:
        """Leading blocks of a path that are cached, at most `limit`."""
        cached = self.cached
        low, high = 0, min(limit, len(path))
        while low < high:
            middle = (low + high + 1) // 2
            if cached[path[middle - 1]]:
                low = middle
            else:
                high = middle - 1
        return low

    def touch(self, path: list[int], num_blocks: int) -> None:
        """Count the leading blocks as used now."""
        self._clock += 1
        stamp, clock = self.stamp, self._clock
        for node in path[:num_blocks]:
            stamp[node] = clock

    def hold(self, path: list[int], num_blocks: int) -> None:
        """Keep the leading blocks from eviction until `release`."""
        refs = self.refs
        for node in path[:num_blocks]:
            if not refs[node]:
                self.num_held += 1
            refs[node] += 1

    def release(self, path: list[int], num_blocks: int, num_private: int) -> None:
        """End what a request holds; its private blocks are free."""
        refs = self.refs
        for node in path[:num_blocks]:
            refs[node] -= 1
            if not refs[node]:
                self.num_held -= 1
        self.num_private -= num_private
        if num_blocks:
            self._leaves.push(path[num_blocks - 1])

    def take(self, num_blocks: int) -> bool:
        """Give a request private blocks, evicting leaves; False where too few can go, and then none went.

        The count is checked first: a held node's ancestors are held, so every node that is not held can go.
        """
        short = self.num_cached + self.num_private + num_blocks - self.capacity
        if short > 0 and short > self.num_cached - self.num_held:
            return False
        for _ in range(short):
            node = self._leaves.least()
            assert node is not None
            self.drop(node)
        self.num_private += num_blocks
        return True

    def register(self, node: int) -> None:
        """Make a private block findable; its request holds the node. A second copy is given up."""
        self.num_private -= 1
        if not self.refs[node]:
            self.num_held += 1
        self.refs[node] += 1
        if not self.cached[node]:
            self.cached[node] = 1
            self.num_cached += 1
            self.children[self._parent[node]] += 1
        self.stamp[node] = self._clock

    def check_integrity(self) -> None:
        """Raise AssertionError where counts are wrong, or a cached block's parent is not cached."""
        cached = [node for node, there in enumerate(self.cached) if there]
        assert len(cached) == self.num_cached
        assert self.num_cached + self.num_private <= self.capacity
        assert self.num_held == sum(refs > 0 for refs in self.refs)
        children = [0] * len(self.children)
        for node in cached:
            parent = self._parent[node]
            assert parent == ROOT or self.cached[parent]
            children[parent] += 1
        assert children == self.children
        assert all(self.cached[node] for node, refs in enumerate(self.refs) if refs)

    def offer(self, node: int) -> None:
        """Its rank fell."""
        self._leaves.push(node)

    def drop(self, node: int) -> None:
        """Forget a leaf that is not held."""
        self.cached[node] = 0
        self.num_cached -= 1
        parent = self._parent[node]
        self.children[parent] -= 1
        if self._on_evict is not None:
            self._on_evict(node)
        if parent != ROOT:
            self._leaves.push(parent)


class StateSlots:
    """States by node, least recently used first. A state counts as used when it is stored, and when a request
    resumes from it.

    Args:
        index: the nodes.
        capacity: slots.
    """

    def __init__(self, index: BlockIndex, capacity: int) -> None:
        self.index = index
        self.capacity = capacity
        self.num_taken = 0
        self.slots: OrderedDict[int, None] = OrderedDict()
        self.last_use: dict[int, int] = {}
        self._clock = 0
        self._pins: dict[int, int] = {}

    def __contains__(self, node: int) -> bool:
        return node in self.slots

    def bind(self, kv: KVPool) -> None:
        """Called once with the KV that the states lie beside."""
        self.kv = kv

    def came(self, number: int) -> None:
        """Called with the place in the trace of each request, before it is matched."""

    def deepest(self, path: list[int], limit: int) -> int:
        """Blocks up to the deepest state on a path, at most `limit`; 0 for none."""
        slots = self.slots
        for depth in range(min(limit, len(path)), 0, -1):
            if path[depth - 1] in slots:
                return depth
        return 0

    def use(self, node: int) -> None:
        """A request resumes from the state, and keeps it from eviction until `unpin`."""
        self.pin(node)
        self.refresh(node)

    def pin(self, node: int) -> None:
        """Keep the state from eviction until `unpin`."""
        self._pins[node] = self._pins.get(node, 0) + 1

    def refresh(self, node: int) -> None:
        """Count the state as used now."""
        self.slots.move_to_end(node)
        self._clock += 1
        self.last_use[node] = self._clock

    def unpin(self, node: int) -> None:
        left = self._pins.pop(node) - 1
        if left:
            self._pins[node] = left

    def pinned(self, node: int) -> bool:
        return node in self._pins

    def store(self, node: int) -> bool:
        """Take a slot for a state, evicting where none is free.

        Returns:
            False where the state is refused, or every other one is pinned.
        """
        if node in self.slots:
            self.stored_again(node)
            return True
        while len(self.slots) >= self.capacity:
            victim = self.victim(node)
            if victim is None:
                return False
            self.drop(victim)
        self.slots[node] = None
        self.refresh(node)
        self.num_taken += 1
        self.stored(node)
        return True

    def shrink(self, num_slots: int) -> None:
        """Give up slots, evicting states; states that are pinned stay."""
        self.capacity -= num_slots
        while len(self.slots) > self.capacity:
            victim = self.victim(ROOT)
            if victim is None:
                return
            self.drop(victim)

    def drop(self, node: int) -> None:
        """Free the slot of a state."""
        del self.slots[node], self.last_use[node]
        self.kv.offer(node)

    def forget(self, node: int) -> None:
        """Free the slot of a node that loses its KV, if it has one."""
        if node in self.slots:
            del self.slots[node], self.last_use[node]

    def check_integrity(self) -> None:
        """Raise AssertionError where there are too many states, or one without KV."""
        assert len(self.slots) <= max(0, self.capacity)
        assert self.last_use.keys() == self.slots.keys()
        assert self._pins.keys() <= self.slots.keys()
        assert all(self.kv.cached[node] for node in self.slots)

    def stored(self, node: int) -> None:
        """Called after a new state."""

    def stored_again(self, node: int) -> None:
        """Called where the state to store is there already."""

    def victim(self, newcomer: int) -> int | None:
        """The state that goes next; None where none may."""
        for node in self.slots:
            if node not in self._pins:
                return node
        return None


class PathCapSlots(StateSlots):
    """Least recently used first, and at most `cap` states on the path of a new one.

    As `mamba_max_states_per_path` of SGLang: beyond the cap the shallowest state goes that is not the new
    one, has exactly one registered child, and is not in use.
    """

    def __init__(self, index: BlockIndex, capacity: int, cap: int) -> None:
        super().__init__(index, capacity)
        self._cap = cap

    def stored(self, node: int) -> None:
        holders = []
        parent = self.index.parent
        at = node
        while at != ROOT:
            if at in self.slots:
                holders.append(at)
            at = parent[at]
        excess = len(holders) - self._cap
        for holder in reversed(holders):
            if excess <= 0 or holder == node:
                break
            if holder not in self._pins and self.kv.children[holder] == 1:
                self.drop(holder)
                excess -= 1


class KVRecencySlots(StateSlots):
    """The state goes whose KV block was used longest ago, and that no request holds.

    As megatron-core evicts states. All blocks of a matched path are used at once, so their states are equally
    recent; the shallower of two goes first.
    """

    def __init__(self, index: BlockIndex, capacity: int) -> None:
        super().__init__(index, capacity)
        self._heap = LazyHeap(self._key)

    def _key(self, node: int) -> tuple[int, int] | None:
        if node not in self.slots:
            return None
        held = self.kv.refs[node] > 0
        return (self.kv.stamp[node] + (1 << 60 if held else 0), self.index.depth[node])

    def stored(self, node: int) -> None:
        self._heap.push(node)

    def victim(self, newcomer: int) -> int | None:
        node = self._heap.least()
        if node is None or self.kv.refs[node]:
            return None
        return node


class CoverageSlots(StateSlots):
    """The state used longest ago names a path; of the path's states the one goes that leaves the least gap.

    As pull request 38000 of SGLang ("Thin cached states by coverage instead of evicting the LRU tail",
    open in September 2026) describes it. A path reaches from the root through the oldest state down to
    the next fork. The gap of a state lies between its neighbours on the path; of the deepest one, between
    its neighbour and itself. Equal gaps go in order of last use. Left out: what the pull request says
    beyond its description.
    """

    def __init__(self, index: BlockIndex, capacity: int) -> None:
        super().__init__(index, capacity)
        self._children: list[list[int]] = [[] for _ in range(index.num_nodes)]
        for node in range(1, index.num_nodes):
            self._children[index.parent[node]].append(node)

    def victim(self, newcomer: int) -> int | None:
        oldest = super().victim(newcomer)
        if oldest is None:
            return None
        holders = self._holders(oldest)
        depth = self.index.depth
        best, least = oldest, 1 << 60
        recency = self.last_use
        for place, node in enumerate(holders):
            if self.pinned(node):
                continue
            above = depth[holders[place - 1]] if place else 0
            below = depth[holders[place + 1]] if place + 1 < len(holders) else depth[node]
            gap = below - above
            if gap < least or (gap == least and recency[node] < recency[best]):
                best, least = node, gap
        return best

    def _holders(self, node: int) -> list[int]:
        """States on the path of a node, shallow first, down to the next fork."""
        found = []
        at = node
        while at != ROOT:
            if at in self.slots:
                found.append(at)
            at = self.index.parent[at]
        found.reverse()
        at = node
        while self.kv.children[at] == 1:
            at = next(child for child in self._children[at] if self.kv.cached[child])
            if at in self.slots:
                found.append(at)
        return found


class StatePlan(Protocol):
    """Decides which states are stored."""

    @property
    def decode(self) -> bool:
        """The last boundary that an answer passed is stored when the request ends."""

    @property
    def every(self) -> bool:
        """All boundaries of an answer are stored."""

    def of_prefill(self, request: RunningRequest, start: int, end: int, block: int) -> list[int]:
        """Blocks up to each boundary that a step from token `start` to `end` stores, shallow first."""


@dataclass(frozen=True)
class TakenStates:
    """The boundaries whose states are stored.

    Attributes:
        tail: the last boundary of a prompt.
        branch: the boundary to which KV was cached when the request came, where the state was not.
        step_ends: where a prefill step ends on a boundary.
        decode: the last boundary that the answer passed, stored when the request ends.
        every: all boundaries, of prompt and answer.
    """

    tail: bool = False
    branch: bool = False
    step_ends: bool = False
    decode: bool = False
    every: bool = False

    def of_prefill(self, request: RunningRequest, start: int, end: int, block: int) -> list[int]:
        """See `StatePlan.of_prefill`."""
        first, last = start // block + 1, end // block
        if self.every:
            return list(range(first, last + 1))
        wanted = set()
        if self.tail:
            wanted.add(request.target // block)
        if self.branch:
            wanted.add(request.matched)
        if self.step_ends and end % block == 0:
            wanted.add(last)
        return sorted(depth for depth in wanted if first <= depth <= last)


class TwoPools:
    """KV in a tree of blocks, and states in slots beside it. Who takes what is for the class below to say.

    Attributes:
        kv: the KV blocks.
        states: the slots.
    """

    def __init__(self, index: BlockIndex, kv: KVPool, states: StateSlots) -> None:
        """Let states leave with their KV; `index`: the blocks of the trace."""
        self._block = index.block_size
        self._num_slots = states.capacity
        self.kv = kv
        self.states = states
        states.bind(kv)

    def check_integrity(self) -> None:
        """Raise AssertionError where the indices of KV or states are wrong."""
        self.kv.check_integrity()
        self.states.check_integrity()

    @property
    def num_states_taken(self) -> int:
        return self.states.num_taken

    @property
    def state_capacity(self) -> int:
        return self._num_slots

    def stop(self, request: RunningRequest, budget: int) -> int:
        end = min(request.computed + budget, request.target)
        if end < request.target:
            aligned = end // self._block * self._block
            if aligned > request.computed:
                return aligned
        return end

    def reserve(self, request: RunningRequest, end: int) -> bool:
        missing = (end + self._block - 1) // self._block - request.held - request.private
        if missing <= 0:
            return True
        if not self.kv.take(missing):
            return False
        request.private += missing
        return True

    def boundary(self, request: RunningRequest) -> int:
        return (request.computed // self._block + 1) * self._block


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
