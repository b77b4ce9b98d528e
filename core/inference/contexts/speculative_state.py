"""Align mode: which column of a request's slot table holds which state while drafts are unverified.

A request's row of the slot table has a column for each block of its sequence. Its *running column* begins a
window of 1 + K columns, K the draft tokens of a step:

    column        running         running + 1     ...  running + K
    SSM state     after token 1   after token 2        after token 1 + K   of the last decode step
    conv state    one stretch of kernel - 1 + K inputs; from offset j on, what token j + 1 left

A recurrence cannot be run backwards, so a whole SSM state is kept for each token; the conv state is raw
inputs, so rolling it back is reading at a smaller offset. A prefill chunk leaves only its last state, in the
running column. Columns before the running one hold states at block boundaries, each the state after exactly
(column + 1) * block_size_tokens tokens, and are not written any more.

The rules are functions of integer arrays, one entry a row of the batch (`kernels/align.py` applies them on
the device, where the accepted counts are); `SpeculativeState` keeps them for the rows of a context.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...validation import INT32_MAX, integer

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

FRESH = -1
"""A column of a request that has no state yet: its forward reads zeros, and does write."""
PADDING = -2
"""A column of a row that is no request's: nothing is read, nothing is written."""
NO_SLOT = -1
"""A pool index that is none: zeros where it is read, nowhere where it is written."""


@dataclass(frozen=True)
class Advance:
    """What comes before a forward, one entry a row of the batch."""

    columns: Integers
    """The running columns of this step."""
    sources: Integers
    """The running columns before; FRESH or PADDING where there was none."""
    biases: Integers
    """Accepted drafts of the last step: the state is in SSM column source + bias, at conv offset bias."""
    accepted: Integers
    """1 where the state moves, else as it was."""
    moves: Flags
    """Whether the state must be in another column than it is: by a copy, or by the forward reading there."""


@dataclass(frozen=True)
class Save:
    """What comes after sampling: a state on a block boundary is put where it can be cached."""

    boundaries: Integers
    """Tokens: the last boundary that the accepted tokens reached."""
    sources: Integers
    """The running columns."""
    biases: Integers
    """As in `Advance`, of the boundary's state."""
    destinations: Integers
    """boundary / block size - 1."""
    accepted: Integers
    """1 where the state after the last token is now the one in the running column at no offset."""
    reached: Flags
    """Whether this step reached the boundary: after it, the destination column holds the boundary's state."""
    moves: Flags
    """Whether bytes must move for that."""


@dataclass(frozen=True)
class Copies:
    """Pool indices of whole states to copy, one entry a row that has something to copy."""

    rows: Integers
    ssm_sources: Integers
    conv_sources: Integers
    conv_offsets: Integers
    """Inputs to leave out at the beginning of the conv source."""
    destinations: Integers


@dataclass(frozen=True)
class ForwardIndices:
    """Pool indices that a forward reads and writes, one entry a row of the batch.

    Fresh rows have sources -1 and destinations; padding rows have -1 everywhere.
    """

    ssm_sources: Integers
    conv_sources: Integers
    conv_offsets: Integers
    ssm_destinations: Integers
    """[rows, most tokens]: where the SSM state after each token goes, -1: nowhere."""
    conv_destinations: Integers


def start_columns(computed: Integers, block_size_tokens: int) -> Integers:
    """The column with the state after `computed` tokens, of a request that begins there; FRESH for 0."""
    return (computed - 1) // block_size_tokens


def advance(
    columns: Integers, accepted: Integers, computed: Integers, scheduled: Integers, block_size_tokens: int
) -> Advance:
    """Before the forward of `scheduled` tokens after `computed`; `accepted` of the last step, 1: no draft.

    PADDING stays PADDING.
    """
    padding = columns == PADDING
    running = np.where(padding, PADDING, -(-(computed + scheduled) // block_size_tokens) - 1)
    moves = (columns >= 0) & (columns != running)
    return Advance(
        columns=running,
        sources=columns,
        biases=np.maximum(accepted - 1, 0),
        accepted=np.where(moves, 1, accepted),
        moves=moves,
    )


def save(
    columns: Integers,
    accepted: Integers,
    computed: Integers,
    scheduled: Integers,
    drafted: Integers,
    block_size_tokens: int,
) -> Save:
    """After sampling: of `scheduled` tokens `drafted` were drafts, and accepted - 1 of these were right."""
    return save_at(columns, accepted, computed + scheduled - drafted + accepted - 1, block_size_tokens)


def save_at(columns: Integers, accepted: Integers, new_computed: Integers, block_size_tokens: int) -> Save:
    """`save`, given the tokens computed after this step. Decided by columns: slots may be shared."""
    without_drafts = new_computed - accepted + 1
    boundaries = new_computed // block_size_tokens * block_size_tokens
    biases = boundaries - without_drafts
    destinations = boundaries // block_size_tokens - 1
    reached = (columns >= 0) & (accepted > 0) & (destinations >= 0) & (biases >= 0)
    in_place = destinations == columns
    return Save(
        boundaries=boundaries,
        sources=columns,
        biases=biases,
        destinations=destinations,
        accepted=np.where(reached & in_place, 1, accepted),
        reached=reached,
        moves=reached & ~(in_place & (biases == 0)),
    )


class SpeculativeState:
    """The running columns, accepted counts and slots of a context's request rows; on the host.

    Every method takes batches: `rows` [n] int64 names each request's persistent row, -1 for padding, and no
    row twice; other arrays have one entry a row of the batch, ignored for padding. A slot is an index of the
    state pool, which this only names: the caller owns the slots.

    Attributes: `slot_table` [rows, columns] int32, -1 for none; `columns` [rows] int64, PADDING for rows
    without a request; `accepted` [rows] int64.
    """

    def __init__(
        self,
        max_requests: int,
        columns_per_row: int,
        block_size_tokens: int,
        num_speculative_tokens: int,
    ) -> None:
        rows = integer("max_requests", max_requests, 1, INT32_MAX)
        width = integer("columns_per_row", columns_per_row, 1, INT32_MAX)
        self.block_size_tokens = integer("block_size_tokens", block_size_tokens, 1, INT32_MAX)
        self.num_speculative_tokens = integer("num_speculative_tokens", num_speculative_tokens, 0, INT32_MAX)
        self.slot_table = torch.full((rows, width), NO_SLOT, dtype=torch.int32)
        self._table = self.slot_table.numpy()  # the same memory
        self.columns: Integers = np.full(rows, PADDING, dtype=np.int64)
        self.accepted: Integers = np.ones(rows, dtype=np.int64)

    def admit(self, rows: Integers, computed: Integers) -> None:
        """Requests begin, or resume, in free rows, from the state after `computed` tokens, 0 for none.

        The slot of that state is to be put into column `start_columns(computed)`. ValueError where a row is
        taken.
        """
        real = self._check_rows(rows)
        named = rows[real]
        if (self.columns[named] != PADDING).any():
            raise ValueError(f"rows is {rows.tolist()}, of which some are taken; accepted: free rows")
        self.columns[named] = start_columns(computed, self.block_size_tokens)[real]
        self.accepted[named] = 1

    def release(self, rows: Integers) -> None:
        """Requests leave: finished, preempted, or resumed elsewhere. Their slots are the caller's again."""
        named = rows[self._check_rows(rows)]
        self.columns[named] = PADDING
        self.accepted[named] = 1
        self._table[named] = NO_SLOT

    def put_slots(self, row: int, first_column: int, slots: list[int]) -> None:
        """Name the slots of a row's columns from `first_column` on; a slot of -1 takes one away."""
        width = self._table.shape[1]
        integer("row", row, 0, len(self._table) - 1)
        integer("first_column", first_column, 0, width - len(slots))
        self._table[row, first_column : first_column + len(slots)] = slots

    def before_forward(self, rows: Integers, computed: Integers, scheduled: Integers) -> Advance:
        """Advance the running columns to this step's; where states move, the accepted counts become 1."""
        real = self._check_rows(rows)
        columns = np.where(real, self.columns[rows], PADDING)
        step = advance(columns, self.accepted[rows], computed, scheduled, self.block_size_tokens)
        self.columns[rows[real]] = step.columns[real]
        self.accepted[rows[real]] = step.accepted[real]
        return step

    def after_sampling(
        self,
        rows: Integers,
        accepted: Integers,
        computed: Integers,
        scheduled: Integers,
        drafted: Integers,
    ) -> Save:
        """Take this step's accepted counts, 1 for rows without drafts; 0 for rows that sampled nothing."""
        real = self._check_rows(rows)
        columns = np.where(real, self.columns[rows], PADDING)
        step = save(columns, accepted, computed, scheduled, drafted, self.block_size_tokens)
        self.accepted[rows[real]] = step.accepted[real]
        return step

    def copies(self, rows: Integers, step: Advance | Save) -> Copies:
        """What must be copied for `step`, which was this batch's: for an `Advance`, only without copy-free.

        A pair with a column that the table has not, or that has no slot, is left out.
        """
        destinations = step.columns if isinstance(step, Advance) else step.destinations
        ssm, conv, to = (
            self.slots(rows, columns) for columns in (step.sources + step.biases, step.sources, destinations)
        )
        meant = step.moves & (to >= 0) & ((ssm >= 0) | (conv >= 0))
        return Copies(rows[meant], ssm[meant], conv[meant], step.biases[meant], to[meant])

    def forward_indices(
        self, rows: Integers, step: Advance, tokens: Integers, copy_free: bool
    ) -> ForwardIndices:
        """Where the forward of this step reads and writes.

        Args:
            step: what `before_forward` returned for the same rows.
            tokens: of a decode or verify step, up to 1 + K, each of whose states is kept; 1 for a prefill
                chunk, which leaves its last state only.
            copy_free: kernels read the column where the state is. Otherwise `copies(rows, step)` have been
                made, and it is in the window.

        ValueError where a column that must be read or written has no slot.
        """
        moved = step.moves & (not copy_free)
        sources = np.where(moved, step.columns, step.sources)
        offsets = np.where(moved, 0, step.biases)
        known = sources >= 0
        place = np.arange(max(int(tokens.max(initial=1)), 1))
        written = (step.columns >= 0)[:, None] & (place < tokens[:, None])
        places = (
            (known, sources + offsets),
            (known, sources),
            (written, step.columns[:, None] + place),
            (step.columns >= 0, step.columns),
        )
        found = []
        for wanted, columns in places:
            slots = self.slots(rows[:, None] if columns.ndim == 2 else rows, columns)
            if (wanted & (slots < 0)).any():
                row = rows[(wanted & (slots < 0)).reshape(len(rows), -1).any(1)].tolist()
                raise ValueError(f"rows {row} have no slots in columns that a forward needs")
            found.append(np.where(wanted, slots, NO_SLOT))
        return ForwardIndices(found[0], found[1], np.where(known, offsets, 0), found[2], found[3])

    def slots(self, rows: Integers, columns: Integers) -> Integers:
        """The slots in `columns` of `rows`; -1 where there is no such row or column, or no slot."""
        height, width = self._table.shape
        inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
        found: Any = self._table[np.where(inside, rows, 0), np.where(inside, columns, 0)]
        return np.where(inside, found, NO_SLOT).astype(np.int64)

    def check_integrity(self) -> None:
        """Raise AssertionError where columns, counts and slots contradict each other."""
        free = self.columns == PADDING
        assert (self.columns >= PADDING).all(), "a column is no column"
        assert (self._table[free] == NO_SLOT).all(), "a row without a request has slots"
        assert (self.accepted >= 0).all(), "an accepted count is negative"
        assert (self.accepted <= 1 + self.num_speculative_tokens).all(), "more accepted than were drafted"
        assert (self.accepted[self.columns < 0] == 1).all(), "tokens accepted without a state"

    def _check_rows(self, rows: Integers) -> Flags:
        """Which of the rows are no padding; ValueError for rows that are none, or named twice."""
        real: Flags = rows >= 0
        named = rows[real]
        if (rows < -1).any() or (rows >= len(self._table)).any() or len(np.unique(named)) != len(named):
            raise ValueError(
                f"rows is {rows.tolist()}; accepted: -1, or rows below {len(self._table)}, none twice"
            )
        return real
