"""Guesses at a request's next tokens, for the model to verify."""

from array import array
from collections.abc import Sequence
from random import getrandbits
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from ...validation import INT32_MAX, integer
from ..contexts.request import TokenView
from ..contexts.step_inputs import power_of_two


class Drafter(Protocol):
    """Guesses a request's next tokens: an n-gram table, a small model. Wrong guesses cost only time."""

    def draft(self, tokens: Sequence[int], max_drafts: int) -> Sequence[int]:
        """Guess what follows; called once a step for each decoding request.

        Args:
            tokens: a prompt and its answer so far. The engine passes a view of the request's tokens, which
                cannot be changed. Slices of the view are lists. The request passes the same view at every
                call, and earlier tokens of a view never change: a drafter may keep what it knows of a request
                in a `weakref.WeakKeyDictionary` by its view, and read only the new tokens.
            max_drafts: maximum number of drafts, >= 1; the engine ignores further ones.

        Returns:
            Token ids that may follow, in order; may be empty.
        """


class NgramDrafter:
    """Prompt lookup: drafts what followed an earlier occurrence of the sequence's last tokens.

    The drafter looks for the longest suffix of `shortest` to `longest` tokens that also occurs earlier among
    the last `window` tokens, and takes the most recent earlier occurrence. An occurrence that overlaps the
    suffix shows a period, which the drafts repeat.
    """

    def __init__(self, longest: int = 4, shortest: int = 2, window: int = 65_536) -> None:
        """
        Args:
            longest, shortest: bounds of the suffix's length.
            window: how many of a request's last tokens are searched. The index of a request takes 8 bytes for
                each of them and each length of suffix that is looked up: by default at most 1.5 MiB.
        """
        self.shortest = integer("shortest", shortest, 1, INT32_MAX)
        self.longest = integer("longest", longest, self.shortest, INT32_MAX)
        self.window = integer("window", window, 1, INT32_MAX)
        self._indexes: WeakKeyDictionary[TokenView, NgramIndex] = WeakKeyDictionary()

    def draft(self, tokens: Sequence[int], max_drafts: int) -> list[int]:
        """See `Drafter`.

        The index of a view goes with the view. A call reads the tokens that are new since the last call, and
        costs the same however many tokens came before. The first call for a view indexes the window, at some
        2 ms for 40,000 tokens; so does the first lookup of each longer suffix. For a sequence that is not a
        view, every call is a first call.
        """
        if isinstance(tokens, TokenView):
            view, index = tokens, self._indexes.get(tokens)
        else:
            view, index = TokenView(list(array("I", tokens[-self.window :]))), None
        if index is None:
            index = self._indexes[view] = NgramIndex(self.shortest, self.longest, self.window)
        follows = index.end_of_occurrence(view)
        if follows < 0:
            return []
        continuation = view[follows : follows + max_drafts]
        num_repeats = -(-max_drafts // len(continuation))
        return (continuation * num_repeats)[:max_drafts]


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
        self._seed = getrandbits(32)  # no user can choose ids whose n-grams share a bucket

    def end_of_occurrence(self, tokens: TokenView) -> int:
        """The end of the most recent earlier occurrence of the longest suffix that has one, or -1."""
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
    the last `capacity` tokens, and a search stops at the first older end.
    """

    def __init__(self, length: int, capacity: int, seed: int) -> None:
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
        """Add the n-gram that ends at `end`, a position after all others."""
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
