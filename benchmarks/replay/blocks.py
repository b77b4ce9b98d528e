"""Names for the blocks of a trace, so that caches compare integers instead of tokens."""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mambaslots.replay.trace import Trace, TraceRequest

ROOT = 0
_KEPT = 4
_recent: "OrderedDict[tuple[int, int], tuple[Sequence[TraceRequest], BlockIndex]]"


class BlockIndex:
    """The tree of all whole blocks of a trace's sequences.

    A node stands for a prefix that ends a block. Node 0 is the empty prefix. Two sequences meet the same node
    exactly where all their tokens up to its end are equal.

    Attributes:
        block_size: tokens of a block.
        parent: of each node; the root's is the root.
        depth: blocks from the root to each node's end.
        paths: of each request, the nodes of its prompt and answer, in order. The last token of an answer is
            never computed, so it ends no block.
    """

    def __init__(self, requests: Sequence[TraceRequest], block_size: int) -> None:
        self.block_size = block_size
        self.parent = [ROOT]
        self.depth = [0]
        self.paths: list[list[int]] = []
        known: dict[tuple[int, bytes], int] = {}
        stride = 8 * block_size
        for request in requests:
            tokens = np.concatenate((request.prompt, request.answer[:-1]))
            data = np.ascontiguousarray(tokens, dtype=np.int64).tobytes()
            path = []
            node = ROOT
            for depth in range(1, len(tokens) // block_size + 1):
                key = (node, data[(depth - 1) * stride : depth * stride])
                child = known.get(key)
                if child is None:
                    child = known[key] = len(self.parent)
                    self.parent.append(node)
                    self.depth.append(depth)
                path.append(child)
                node = child
            self.paths.append(path)

    @property
    def num_nodes(self) -> int:
        return len(self.parent)


_recent = OrderedDict()


def block_index(trace: Trace, block_size: int) -> BlockIndex:
    """The index of a trace; the last few are remembered, because all rows of a table share them."""
    key = (id(trace.requests), block_size)
    found = _recent.get(key)
    if found is not None and found[0] is trace.requests:
        _recent.move_to_end(key)
        return found[1]
    index = BlockIndex(trace.requests, block_size)
    _recent[key] = (trace.requests, index)
    while len(_recent) > _KEPT:
        _recent.popitem(last=False)
    return index


class LazyHeap:
    """Gives the entry of the least key. A key that has risen since its push is noticed when its turn comes.

    Args:
        key: of a node, as it is now; None for a node that may not be given.
    """

    def __init__(self, key: Callable[[int], Any]) -> None:
        self._key = key
        self._heap: list[tuple[Any, int]] = []

    def push(self, node: int) -> None:
        """Offer a node; needed again whenever its key falls, or becomes other than None."""
        key = self._key(node)
        if key is not None:
            heapq.heappush(self._heap, (key, node))

    def least(self) -> int | None:
        """The node of the least key, which stays in the heap."""
        heap = self._heap
        while heap:
            pushed, node = heap[0]
            key = self._key(node)
            if key is not None and key <= pushed:
                return node
            heapq.heappop(heap)
            if key is not None:
                heapq.heappush(heap, (key, node))
        return None
