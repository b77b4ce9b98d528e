"""What is cached of one sequence, how that is found, and the blocks that the sequence holds."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .checkpoint_plan import CheckpointPlan
from .hashing import PrefixHashChain
from .prefix_tree import PrefixTree
from .reasons import Span, compute_spans

TableRow = npt.NDArray[np.integer[Any]]
WINDOW = 512
"""How many blocks are looked up at once, so that a long prompt that matches little is not read whole."""


class CachedPath:
    """The KV blocks of one sequence, in order, and the durable slot that its state is in.

    Only `PrefixCache` changes a path; its part `RollingStates` writes `rolling_block`.

    Attributes:
        chain: the hashes of the sequence's whole blocks.
        plan: which states of the sequence are taken.
        blocks: the KV blocks, each with a reference of this path. The path's row of the block table shows
            them.
        num_registered: leading blocks whose KV is complete and registered. They are never written again.
        shares: whether the sequence registers blocks and commits states. False without prefix caching, and
            for a sequence that began before the cache was reset.
        state_slot: the durable slot whose state the sequence continues from, pinned; -1 for none.
        rolling_block: the block of the newest state that was taken while decoding, or -1.
        request: the eviction policy's number for the sequence's request, or -1.
    """

    def __init__(
        self, chain: PrefixHashChain, plan: CheckpointPlan, table_row: TableRow, shares: bool
    ) -> None:
        """`table_row`: [blocks of the longest sequence], all -1. The path writes its `blocks` there."""
        self.chain = chain
        self.plan = plan
        self.shares = shares
        self.blocks: list[int] = []
        self.num_registered = 0
        self.state_slot = -1
        self.rolling_block = -1
        self.request = -1
        self._table_row = table_row

    def check_fits(self, num_blocks: int) -> None:
        """ValueError where the row of the block table cannot show so many blocks."""
        if num_blocks > len(self._table_row):
            raise ValueError(
                f"table_row has {len(self._table_row)} entries; accepted: at least {num_blocks}, one for "
                "each block that the path will hold"
            )

    def append(self, blocks: list[int]) -> None:
        first = len(self.blocks)
        self.blocks += blocks
        self._table_row[first : first + len(blocks)] = blocks

    def replace(self, first: int, blocks: list[int]) -> None:
        """Put `blocks` in the place of block `first` and all later blocks; O(these blocks)."""
        self._table_row[first : len(self.blocks)] = -1
        del self.blocks[first:]
        self.append(blocks)

    def check_integrity(self) -> None:
        """Raise AssertionError where the row of the block table shows other blocks."""
        assert 0 <= self.num_registered <= len(self.blocks), "more blocks are registered than held"
        assert self._table_row[: len(self.blocks)].tolist() == self.blocks, "the block table is off"
        assert (self._table_row[len(self.blocks) :] == -1).all(), "the block table has stale entries"


@dataclass(slots=True)
class MatchBasis:
    """What a match was asked for, and when it was right; `PrefixMatcher` writes it, and judges by it.

    `last_key` is the hash of the last whole block; `num_held` counts the path's registered blocks, -1 where
    nothing was looked up; `clock` is the tree's clock at that time.
    """

    num_tokens: int = -1
    last_key: int = 0
    num_held: int = -1
    max_resume_tokens: int | None = None
    clock: int = -1


@dataclass(frozen=True)
class PrefixMatch:
    """The result of `PrefixCache.match`. A match holds and pins nothing.

    A match is right until the cache changes. `PrefixCache.match(..., known=match)` then costs only what the
    changes cost, and returns the same object where the result is the same.

    Attributes:
        blocks: the registered KV blocks of the sequence's longest known prefix.
        resume_tokens: the deepest boundary <= N-1, and within the limit that was asked for, that has a state
            within `blocks`; 0 = start from zeros.
        resume_slot: the durable slot of that state, or -1.
        seen_tokens: how far the sequence follows a known path, evicted blocks included.
        spans: why each token from `resume_tokens` to N is computed, in order and without gaps.
        basis: what was asked for, and when the match was right. No part of what the match says.
    """

    blocks: tuple[int, ...]
    resume_tokens: int
    resume_slot: int
    seen_tokens: int
    spans: tuple[Span, ...]
    basis: MatchBasis = field(default_factory=MatchBasis, compare=False, repr=False)


class PrefixMatcher:
    """Matches hash chains with the tree, which they do not change.

    An earlier match of the same sequence is right as long as the tree's clock stands still: O(1). Afterwards
    its blocks are not looked up again as far as they stand. Only leaves are removed: all matched blocks stand
    if the last one is registered, and was before the match. A block that was evicted and came back was
    registered later. Tokens are compared wherever blocks are matched; ghosts are known by their 63-bit hashes
    alone.
    """

    def __init__(self, tree: PrefixTree, block_size_tokens: int) -> None:
        self._tree = tree
        self._size = block_size_tokens

    def match(
        self,
        chain: PrefixHashChain,
        num_tokens: int,
        path_blocks: Sequence[int],
        num_held: int,
        max_resume_tokens: int | None,
        known: PrefixMatch | None,
    ) -> PrefixMatch:
        """See `PrefixCache.match`; `num_held` of `path_blocks` are registered, states within do not count."""
        tree, ghosts, keys, size = self._tree, self._tree.ghosts, chain.keys, self._size
        blocks = tuple(path_blocks[:num_held])
        if known is not None and self._fits(known.basis, chain, num_tokens, num_held, max_resume_tokens):
            if known.basis.clock == tree.clock and known.basis.num_tokens == num_tokens:
                return known
            blocks = self._standing(known.blocks, known.basis.clock)
        whole = num_tokens // size
        blocks = self._extended(blocks, chain, whole)
        num_seen = len(blocks)
        while num_seen < whole and ghosts.has(keys[num_seen], "block"):
            num_seen += 1
        limit = num_tokens - 1 if max_resume_tokens is None else max_resume_tokens
        limited = limit < num_tokens - 1
        asked = limit // size if limited else whole
        reachable = min(len(blocks), min(limit, num_tokens - 1) // size)
        depth = self._deepest_state(blocks, num_held, reachable)
        spans = compute_spans(
            keys if len(keys) == asked else keys[:asked],
            num_resumed=depth,
            num_reachable=reachable,
            num_matched=min(len(blocks), asked),
            num_seen=min(num_seen, asked),
            num_tokens=asked * size if limited else num_tokens,
            block_size_tokens=size,
            ghosts=ghosts,
        )
        if limited:
            spans = (*spans, Span(asked * size, num_tokens, "disabled"))
        slot = tree.slot_of(blocks[depth - 1]) if depth else -1
        last_key = keys[whole - 1] if whole else 0
        basis = MatchBasis(num_tokens, last_key, num_held, max_resume_tokens, tree.clock)
        match = PrefixMatch(blocks, depth * size, slot, num_seen * size, spans, basis)
        if known == match and known.basis.num_tokens == num_tokens:
            known.basis.clock = tree.clock
            return known
        return match

    def _fits(
        self, basis: MatchBasis, chain: PrefixHashChain, num_tokens: int, num_held: int, limit: int | None
    ) -> bool:
        """Whether a match on this basis is one of the same sequence, or of its beginning."""
        if basis.num_held != num_held or basis.max_resume_tokens != limit or basis.num_tokens > num_tokens:
            return False
        whole = basis.num_tokens // self._size
        return basis.last_key == (chain.keys[whole - 1] if whole else 0)

    def _standing(self, blocks: tuple[int, ...], clock: int) -> tuple[int, ...]:
        """The leading blocks that were registered at `clock` and still are."""
        tree = self._tree
        if not blocks or tree.stands(blocks[-1], clock):
            return blocks
        low, high = 0, len(blocks) - 1
        while low < high:
            middle = (low + high) // 2
            if tree.stands(blocks[middle], clock):
                low = middle + 1
            else:
                high = middle
        return blocks[:low]

    def _extended(self, blocks: tuple[int, ...], chain: PrefixHashChain, whole: int) -> tuple[int, ...]:
        """These blocks, and the registered ones that continue them."""
        keys, tokens, first = chain.keys, chain.tokens, len(blocks)
        parent = blocks[-1] if blocks else chain.root
        found: list[int] = []
        while first < whole and keys[first] in self._tree.block_of_hash:
            stop = min(first + WINDOW, whole)
            window = self._tree.match(parent, keys[first:stop], tokens[first:stop])
            found += window
            if len(window) < stop - first:
                break
            parent, first = window[-1], stop
        return (*blocks, *found) if found else blocks

    def _deepest_state(self, blocks: tuple[int, ...], start: int, stop: int) -> int:
        """The largest d in (start, stop] where `blocks[d - 1]` has a state, or 0."""
        slot_by_block = self._tree.slot_by_block
        if start >= stop or slot_by_block.keys().isdisjoint(blocks[start:stop][::-1]):
            return 0
        return next(d for d in range(stop, start, -1) if blocks[d - 1] in slot_by_block)
