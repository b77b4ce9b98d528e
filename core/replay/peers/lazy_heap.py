"""A heap whose keys may rise while entries wait in it."""

import heapq
from collections.abc import Callable
from typing import Any


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
