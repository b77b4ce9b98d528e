"""Align mode's books for a host that keeps requests in persistent rows and knows the accepted counts."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..validation import INT32_MAX, integer
from .align_rule import (
    PADDING,
    Advance,
    BoundarySave,
    Flags,
    Integers,
    advance,
    save_boundary,
    start_columns,
)

NO_SLOT = -1
"""A pool index that names no slot: a read gives zeros, a write goes nowhere."""


@dataclass(frozen=True)
class Copies:
    """Whole states to copy, as pool indices; all fields [copies].

    Attributes:
        rows: the request rows.
        ssm_sources, conv_sources: where to read the SSM state and the conv window.
        conv_offsets: inputs of the conv window to leave out at its beginning.
        destinations: where to write both.
    """

    rows: Integers
    ssm_sources: Integers
    conv_sources: Integers
    conv_offsets: Integers
    destinations: Integers


@dataclass(frozen=True)
class ForwardIndices:
    """Pool indices that a forward reads and writes, one entry for each row of a batch.

    A fresh row has sources of NO_SLOT and real destinations; a padding row has NO_SLOT everywhere.

    Attributes:
        ssm_sources, conv_sources: [n] where the forward reads.
        conv_offsets: [n] inputs of the conv window that lie before the state's own.
        ssm_destinations: [n, max tokens] where the SSM state after each token goes, NO_SLOT for nowhere.
        conv_destinations: [n] where the conv window goes.
    """

    ssm_sources: Integers
    conv_sources: Integers
    conv_offsets: Integers
    ssm_destinations: Integers
    conv_destinations: Integers


class AlignRows:
    """The running columns, accepted counts and slots of a host's request rows, on the CPU.

    Every method takes a batch: `rows` [n] int64 names the persistent row of each request, -1 for padding,
    and no row twice. Other arrays [n] are ignored where `rows` is -1. A slot is an index of the state pool.
    The caller owns the slots; this class only names them.

    Attributes:
        slot_table: [rows, columns] int32 CPU tensor, NO_SLOT for none.
        columns: [rows] int64 running columns, PADDING for a row without a request.
        accepted: [rows] int64 accepted counts of each row's last step.
    """

    def __init__(
        self,
        max_requests: int,
        columns_per_row: int,
        block_size_tokens: int,
        num_speculative_tokens: int,
    ) -> None:
        """Books of `max_requests` free rows.

        Raises:
            ValueError: an argument is no integer or out of range.
        """
        num_rows = integer("max_requests", max_requests, 1, INT32_MAX)
        width = integer("columns_per_row", columns_per_row, 1, INT32_MAX)
        self.block_size_tokens = integer("block_size_tokens", block_size_tokens, 1, INT32_MAX)
        self.num_speculative_tokens = integer("num_speculative_tokens", num_speculative_tokens, 0, INT32_MAX)
        self.slot_table = torch.full((num_rows, width), NO_SLOT, dtype=torch.int32, device="cpu")
        self._table = self.slot_table.numpy()  # the same memory
        self.columns: Integers = np.full(num_rows, PADDING, dtype=np.int64)
        self.accepted: Integers = np.ones(num_rows, dtype=np.int64)

    def admit(self, rows: Integers, num_computed: Integers) -> None:
        """Start requests in free rows, from the state after `num_computed` tokens, 0 for none.

        Afterwards the caller puts the slot of that state into column `start_columns(num_computed)`.

        Raises:
            ValueError: a row is taken, out of range, or named twice.
        """
        is_request = self._check_rows(rows)
        named = rows[is_request]
        if (self.columns[named] != PADDING).any():
            raise ValueError(f"rows is {rows.tolist()}, of which some are taken; accepted: free rows")
        self.columns[named] = start_columns(num_computed, self.block_size_tokens)[is_request]
        self.accepted[named] = 1

    def release(self, rows: Integers) -> None:
        """Empty the rows of requests that finished or were preempted, and forget their slots.

        Raises:
            ValueError: a row is out of range or named twice.
        """
        named = rows[self._check_rows(rows)]
        self.columns[named] = PADDING
        self.accepted[named] = 1
        self._table[named] = NO_SLOT

    def put_slots(self, row: int, first_column: int, slots: list[int]) -> None:
        """Name the slots of a row's columns from `first_column` on; NO_SLOT takes a slot away.

        Raises:
            ValueError: `row` or a column is out of range.
        """
        width = self._table.shape[1]
        integer("row", row, 0, len(self._table) - 1)
        integer("first_column", first_column, 0, width - len(slots))
        self._table[row, first_column : first_column + len(slots)] = slots

    def before_forward(self, rows: Integers, num_computed: Integers, num_scheduled: Integers) -> Advance:
        """Advance the rows' columns and accepted counts to this step; see `align_rule.advance`.

        Raises:
            ValueError: a row is out of range or named twice.
        """
        is_request = self._check_rows(rows)
        columns = np.where(is_request, self.columns[rows], PADDING)
        step = advance(columns, self.accepted[rows], num_computed, num_scheduled, self.block_size_tokens)
        self.columns[rows[is_request]] = step.columns[is_request]
        self.accepted[rows[is_request]] = step.accepted[is_request]
        return step

    def after_sampling(
        self,
        rows: Integers,
        accepted: Integers,
        num_computed: Integers,
        num_scheduled: Integers,
        num_drafted: Integers,
    ) -> BoundarySave:
        """Take the accepted counts of this step; see `align_rule.save_boundary`.

        Args:
            accepted: [n] 1 for a row without drafts, 0 for a row that sampled nothing.

        Raises:
            ValueError: a row is out of range or named twice.
        """
        is_request = self._check_rows(rows)
        columns = np.where(is_request, self.columns[rows], PADDING)
        step = save_boundary(
            columns, accepted, num_computed, num_scheduled, num_drafted, self.block_size_tokens
        )
        self.accepted[rows[is_request]] = step.accepted[is_request]
        return step

    def copies(self, rows: Integers, step: Advance | BoundarySave) -> Copies:
        """The copies that `step` needs; a forward that reads the old columns needs none for an `Advance`.

        Leaves out a copy whose column is outside the table or has no slot.

        Args:
            step: what `before_forward` or `after_sampling` returned for the same rows.
        """
        targets = step.columns if isinstance(step, Advance) else step.destinations
        ssm_sources = self.slots(rows, step.sources + step.biases)
        conv_sources = self.slots(rows, step.sources)
        destinations = self.slots(rows, targets)
        possible = step.moves & (destinations >= 0) & ((ssm_sources >= 0) | (conv_sources >= 0))
        return Copies(
            rows=rows[possible],
            ssm_sources=ssm_sources[possible],
            conv_sources=conv_sources[possible],
            conv_offsets=step.biases[possible],
            destinations=destinations[possible],
        )

    def forward_indices(
        self, rows: Integers, step: Advance, num_tokens: Integers, copy_free: bool
    ) -> ForwardIndices:
        """Where the forward of this step reads and writes.

        Args:
            step: what `before_forward` returned for the same rows.
            num_tokens: [n] tokens whose states are kept: up to 1 + K of a decode or verify step; 1 for a
                prefill step, which keeps only its last state.
            copy_free: whether the forward reads the columns that hold the states now. False: the copies
                `copies(rows, step)` have been made, and the forward reads the running columns.

        Raises:
            ValueError: a column that the forward must read or write has no slot.
        """
        moved = step.moves & (not copy_free)
        sources = np.where(moved, step.columns, step.sources)
        offsets = np.where(moved, 0, step.biases)
        reads = sources >= 0
        writes = step.columns >= 0
        tokens = np.arange(max(int(num_tokens.max(initial=1)), 1))
        writes_token = writes[:, None] & (tokens < num_tokens[:, None])
        token_columns = step.columns[:, None] + tokens
        return ForwardIndices(
            ssm_sources=self._required_slots(rows, sources + offsets, reads),
            conv_sources=self._required_slots(rows, sources, reads),
            conv_offsets=np.where(reads, offsets, 0),
            ssm_destinations=self._required_slots(rows, token_columns, writes_token),
            conv_destinations=self._required_slots(rows, step.columns, writes),
        )

    def slots(self, rows: Integers, columns: Integers) -> Integers:
        """The slots in `columns` of `rows`; NO_SLOT where row or column is out of range."""
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

    def _required_slots(self, rows: Integers, columns: Integers, required: Flags) -> Integers:
        """The slots where `required`, NO_SLOT elsewhere; ValueError where a required column has none."""
        slots = self.slots(rows[:, None] if columns.ndim == 2 else rows, columns)
        lacking = required & (slots < 0)
        if lacking.any():
            at = rows[lacking.reshape(len(rows), -1).any(1)].tolist()
            raise ValueError(f"rows {at} have no slots in columns that a forward needs")
        return np.where(required, slots, NO_SLOT)

    def _check_rows(self, rows: Integers) -> Flags:
        """Which rows are requests and not padding; ValueError for a row out of range or named twice."""
        is_request: Flags = rows >= 0
        named = rows[is_request]
        if (rows < -1).any() or (rows >= len(self._table)).any() or len(np.unique(named)) != len(named):
            raise ValueError(
                f"rows is {rows.tolist()}; accepted: -1, or rows below {len(self._table)}, none twice"
            )
        return is_request
