"""Where the last tokens of a growing sequence occurred before."""

from array import array
from collections.abc import Sequence
from random import getrandbits

import numpy as np
import numpy.typing as npt

from ..contexts.request import TokenView
from ..contexts.row_ladder import power_of_two

_MIN_CAPACITY = 64
_MAX_ADDED = 1024  # building tables anew costs less than adding more n-grams than these to them
_FACTOR = 0x9E3779B1
_MASK = 0xFFFFFFFF


class NgramIndex:
    """Finds the longest suffix of a view's tokens that also occurs earlier among the last `window` tokens.

    There is one table for each length of n-grams. A table is built when its length is first looked up, so
    text that repeats nothing has one table. A table takes 8 bytes a token of the window, or of the sequence
    where the sequence is shorter, rounded up to a power of two.
    """

    def __init__(self, shortest: int, longest: int, window: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._window = window
        self._capacity = 0
        self._num_ends = 0  # every n-gram that ends before this position is in the tables
        self._tables: dict[int, _NgramTable] = {}  # by length
        self._seed = getrandbits(32)  # nobody can choose ids whose n-grams share a bucket

    def end_of_occurrence(self, tokens: TokenView) -> int:
        """The position behind the most recent earlier occurrence of the longest suffix that has one, or -1.

        `tokens`: the same view at every call.
        """
        self._add_new(tokens)
        oldest, last = max(0, len(tokens) - self._window), len(tokens) - 1
        suffix = tokens[max(oldest + 1, len(tokens) - self._longest) :]
        end, digest = -1, self._seed
        for length, token in enumerate(reversed(suffix), 1):
            digest = _extended(digest, token)
            start = end - length + 1
            if length < self._shortest or (start >= oldest and tokens[start] == token):
                continue  # the occurrence of the shorter suffix is one of this suffix, too
            if length not in self._tables:
                table = _NgramTable(length, self._capacity, self._seed)
                table.fill(tokens[oldest:last], oldest)
                self._tables[length] = table
            found = self._tables[length].find(tokens, suffix[-length:], digest, oldest + length - 1)
            if found < 0:
                break
            end = found
        return end + 1 if end >= 0 else -1

    def _add_new(self, tokens: TokenView) -> None:
        """Add the n-grams that end before the last token, or drop tables that it is cheaper to build anew."""
        first, self._num_ends = self._num_ends, len(tokens) - 1
        if len(tokens) - first > _MAX_ADDED or self._capacity < min(len(tokens), self._window):
            self._tables.clear()
            self._capacity = power_of_two(max(_MIN_CAPACITY, min(len(tokens), self._window)))
        tables, self._tables = self._tables, {}  # an interrupted call leaves none, to be built anew
        longest = max(tables, default=0)
        for end in range(first, self._num_ends if longest else first):
            digest = self._seed
            for length, token in enumerate(reversed(tokens[max(0, end - longest + 1) : end + 1]), 1):
                digest = _extended(digest, token)
                if length in tables:
                    tables[length].add(end, digest)
        self._tables = tables


class _NgramTable:
    """Positions where n-grams of one length end: a hash table with a chain for each bucket, newest first.

    The chains are a ring: a new end takes the place of the end `capacity` tokens before. So a chain holds for
    the last `capacity` tokens, and whoever follows it stops at the first older end.
    """

    def __init__(self, length: int, capacity: int, seed: int) -> None:
        """
        Args:
            length: tokens of an n-gram.
            capacity: a power of two; buckets, and ends that the table holds.
            seed: where digests start.
        """
        self._length = length
        self._seed = seed
        self._mask = capacity - 1
        self._newest = array("i", [-1]) * capacity  # bucket -> the last end, or -1
        self._previous = array("i", [-1]) * capacity  # end % capacity -> the end before it in its bucket

    def fill(self, tokens: Sequence[int], first: int) -> None:
        """Add all n-grams of `tokens`, the first of which has position `first`, to an empty table."""
        ids = np.asarray(array("I", tokens))
        num_ends = len(ids) - self._length + 1
        if num_ends <= 0:
            return
        digests = np.full(num_ends, self._seed, np.uint32)
        for back in range(self._length):
            digests ^= ids[self._length - 1 - back : len(ids) - back]
            digests *= np.uint32(_FACTOR)
            digests ^= digests >> np.uint32(15)
        buckets = (digests & np.uint32(self._mask)).astype(np.uint64)
        positions = np.arange(num_ends, dtype=np.uint64) + np.uint64(first + self._length - 1)
        ordered = np.sort(buckets << np.uint64(32) | positions)
        buckets, ends = ordered >> np.uint64(32), (ordered & np.uint64(_MASK)).astype(np.int64)
        newest = np.append(np.flatnonzero(buckets[1:] != buckets[:-1]), num_ends - 1)
        places = ends & self._mask
        previous: npt.NDArray[np.int32] = np.asarray(self._previous)
        previous[places[1:]] = ends[:-1]
        previous[places[np.append(0, newest[:-1] + 1)]] = -1
        np.asarray(self._newest)[buckets[newest]] = ends[newest]

    def add(self, end: int, digest: int) -> None:
        """Add the n-gram that ends at `end`, a position behind all others."""
        bucket = digest & self._mask
        self._previous[end & self._mask] = self._newest[bucket]
        self._newest[bucket] = end

    def find(self, tokens: TokenView, ngram: list[int], digest: int, oldest: int) -> int:
        """The last end, from `oldest` on, of an n-gram with this digest, or -1."""
        end = self._newest[digest & self._mask]
        while end >= oldest:
            if tokens[end - self._length + 1 : end + 1] == ngram:
                return end
            end = self._previous[end & self._mask]
        return -1


def _extended(digest: int, token: int) -> int:
    """The digest of an n-gram with one more token in front of it."""
    digest = (digest ^ token) * _FACTOR & _MASK
    return digest ^ digest >> 15
