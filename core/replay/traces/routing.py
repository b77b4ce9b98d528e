"""A router that keeps equal prefixes together: which of several replicas a request goes to."""

from collections import Counter
from collections.abc import Sequence

_MIN_BRANCHES = 8
_MULTIPLIER = 2654435761
"""Knuth's multiplicative hash: 2**32 divided by the golden ratio, as a prime."""


def shared_head(paths: Sequence[Sequence[int]]) -> int:
    """How many leading blocks show nothing of a path, because most paths have them.

    These are blocks that more than half of all paths begin with, up to where at least eight different blocks
    follow. So a common system prompt is a head, and the only conversation of a file is none.
    """
    head, depth, left = 0, 0, list(paths)
    while left := [path for path in left if len(path) > depth]:
        counts = Counter(path[depth] for path in left)
        if len(counts) >= _MIN_BRANCHES:
            head = depth
        block, count = counts.most_common(1)[0]
        if 2 * count <= len(paths):
            break
        left = [path for path in left if path[depth] == block]
        depth += 1
    return head


def shard_of(route: int, num_shards: int) -> int:
    """The shard of an integer, by the leading bits of its multiplicative hash."""
    return (route * _MULTIPLIER % (1 << 32)) * num_shards >> 32
