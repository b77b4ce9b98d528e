"""One sequence in the cache: what it holds, and what its next step computes and stores."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from .checkpoint_plan import Boundary, CheckpointPlan
from .hashing import PrefixHashChain

TableRow = npt.NDArray[np.integer[Any]]


UNKNOWN_TOKEN = 2**32 - 1
"""In place of a token that only the device knows; no vocabulary has it."""


class CachedPath:
    """The KV blocks of one sequence, and the durable slot of its state; only `PrefixCache` changes it."""

    def __init__(
        self, chain: PrefixHashChain, plan: CheckpointPlan, table_row: TableRow, caches: bool
    ) -> None:
        """`table_row`: [blocks of the longest sequence], all -1. The path writes its `blocks` there."""
        self.chain = chain
        self.plan = plan
        self.caches = caches  # False without caching, and once the cache was reset
        self.blocks: list[int] = []  # each with a reference of this path, as in the block table's row
        self.num_registered = 0  # leading blocks that are complete and never written again
        self.state_slot = -1  # whose state the sequence continues from, pinned; -1: none
        self.rolling_block = -1  # of the newest decode state that rolls, or -1
        self.policy_ticket = -1  # the eviction policy's number, or -1
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


@dataclass(frozen=True)
class PathStep:
    """Tokens [start, stop) of one sequence, which the next step computes.

    The last tokens may be drafts: guesses at the sequence's next tokens, which the step verifies.

    Attributes:
        path: the sequence's path in the cache.
        sequence: the known tokens of the sequence; drafts are not among them.
        start, stop: token positions.
        decoding: whether the step is a decode; else it is (a part of) a prefill.
        boundaries: where states are to be stored.
        destinations: boundary position -> the slot reserved for its state; `PrefixCache.reserve` fills it.
        drafts: the drafts of a decode.
    """

    path: CachedPath
    sequence: Sequence[int] = field(repr=False, compare=False)
    start: int
    stop: int
    decoding: bool = False
    boundaries: tuple[Boundary, ...] = ()
    destinations: dict[int, int] = field(default_factory=dict)
    drafts: tuple[int, ...] = ()

    def key_at(self, position: int) -> int:
        """The hash of the prefix that ends at `position`; where a token is not known, one of no prefix."""
        chain = self.path.chain
        chain.extend_to(self.sequence, position)
        if position > len(self.sequence):  # a fork, so that guesses do not enter the sequence's chain
            chain = chain.fork()
            chain.extend_to([*self.sequence, *(self.drafts or (UNKNOWN_TOKEN,))], position)
        return chain.keys[position // chain.block_size_tokens - 1]

    def knows(self, boundary: Boundary) -> bool:
        """Whether all tokens before the boundary are known."""
        return boundary.position <= len(self.sequence)

    def block_at(self, position: int) -> int:
        return self.path.blocks[position // self.path.chain.block_size_tokens - 1]

    def accepted(self, num_tokens: int) -> Self:
        """This decode cut to its first `num_tokens` tokens; the others are wrong drafts."""
        stop = self.start + num_tokens
        return replace(
            self,
            stop=stop,
            drafts=self.drafts[: num_tokens - 1],
            boundaries=tuple(boundary for boundary in self.boundaries if boundary.position <= stop),
            destinations={p: slot for p, slot in self.destinations.items() if p <= stop},
        )
