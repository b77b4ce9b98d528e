"""What one sequence holds in a prefix cache."""

from typing import Any

import numpy as np
import numpy.typing as npt

from .checkpoint_plan import CheckpointPlan
from .prefix_hash import PrefixHashChain

TableRow = npt.NDArray[np.integer[Any]]


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
        visit: the number that the book of durable slots knows the sequence's request by, or -1.
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
        self.visit = -1
        self._table_row = table_row

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
