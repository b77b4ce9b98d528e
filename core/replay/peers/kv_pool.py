"""KV blocks of a replayed cache: a tree of cached blocks, and what running requests hold."""

from collections.abc import Callable
from typing import Any

from .blocks import ROOT, BlockIndex
from .lazy_heap import LazyHeap


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
        """Forget a leaf that nobody holds."""
        self.cached[node] = 0
        self.num_cached -= 1
        parent = self._parent[node]
        self.children[parent] -= 1
        if self._on_evict is not None:
            self._on_evict(node)
        if parent != ROOT:
            self._leaves.push(parent)
