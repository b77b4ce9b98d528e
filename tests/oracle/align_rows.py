"""Align mode by rows on the CPU: columns, accepted counts and slots of a host that knows the counts."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from mambaslots.vllm.align_rule import (
    PADDING,
    Flags,
    Integers,
    StateMoves,
    advance,
    save_boundary,
    start_columns,
)

NO_SLOT = -1
"""A pool index that names no slot: a read gives zeros, a write goes nowhere."""


@dataclass(frozen=True)
class Copies:
    """Whole states to copy, as pool indices; all fields [copies]. The first `conv_offsets` inputs stay."""

    rows: Integers
    ssm_sources: Integers
    conv_sources: Integers
    conv_offsets: Integers
    destinations: Integers


@dataclass(frozen=True)
class ForwardIndices:
    """Pool indices that a forward reads and writes; NO_SLOT for nothing.

    Attributes:
        ssm_sources, conv_sources: [n] where the forward reads; NO_SLOT for a fresh row.
        conv_offsets: [n] inputs of the conv window before the state's own.
        ssm_destinations: [n, max tokens] where the SSM state after each token goes.
        conv_destinations: [n] where the conv window goes.
    """

    ssm_sources: Integers
    conv_sources: Integers
    conv_offsets: Integers
    ssm_destinations: Integers
    conv_destinations: Integers


class AlignRows:
    """The running columns, accepted counts and slots of request rows, for a host that knows the counts.

    A forward may read the old columns and write the new ones (`copy_free`), instead of a copy before it.
    Every method takes a batch: `rows` [n] int64 are persistent rows, -1 for padding, and no row twice. Other
    arrays [n] are ignored where `rows` is -1. The caller owns the slots.

    Example, blocks of 4: `admit([0], [4])` resumes after 4 tokens; its state is in column 0. A step of 3
    tokens reads column 0 and writes column 1.

    Attributes:
        slot_table: [rows, columns] int32 CPU tensor, NO_SLOT for none.
        columns: [rows] int64 running columns, PADDING for a row without a request.
        accepted: [rows] int64 accepted counts of each row's last step.
    """

    def __init__(
        self, max_requests: int, columns_per_row: int, block_size_tokens: int, num_speculative_tokens: int
    ) -> None:
        """`max_requests` free rows."""
        self.block_size_tokens = block_size_tokens
        self.num_speculative_tokens = num_speculative_tokens
        self.slot_table = torch.full(
            (max_requests, columns_per_row), NO_SLOT, dtype=torch.int32, device="cpu"
        )
        self._table = self.slot_table.numpy()  # the same memory
        self.columns: Integers = np.full(max_requests, PADDING, dtype=np.int64)
        self.accepted: Integers = np.ones(max_requests, dtype=np.int64)

    def admit(self, rows: Integers, num_computed: Integers) -> None:
        """Start requests in free rows, from the state in column `start_columns(num_computed)`.

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
        """Empty the rows of requests that finished or were preempted; their slots are the caller's again."""
        named = rows[self._check_rows(rows)]
        self.columns[named] = PADDING
        self.accepted[named] = 1
        self._table[named] = NO_SLOT

    def put_slots(self, row: int, first_column: int, slots: list[int]) -> None:
        """Name the slots of a row's columns from `first_column` on."""
        width = self._table.shape[1]
        assert 0 <= row < len(self._table)
        assert 0 <= first_column <= width - len(slots)
        self._table[row, first_column : first_column + len(slots)] = slots

    def before_forward(self, rows: Integers, num_computed: Integers, num_scheduled: Integers) -> StateMoves:
        """Advance the rows' columns and accepted counts to this step; see `advance`."""
        is_request = self._check_rows(rows)
        columns = np.where(is_request, self.columns[rows], PADDING)
        step = advance(columns, self.accepted[rows], num_computed, num_scheduled, self.block_size_tokens)
        self.columns[rows[is_request]] = step.columns[is_request]
        self.accepted[rows[is_request]] = step.accepted[is_request]
        return step

    def after_sampling(self, rows: Integers, accepted: Integers, new_num_computed: Integers) -> StateMoves:
        """Take the accepted counts of this step, 1 without drafts; see `save_boundary`."""
        is_request = self._check_rows(rows)
        columns = np.where(is_request, self.columns[rows], PADDING)
        step = save_boundary(columns, accepted, new_num_computed, self.block_size_tokens)
        self.accepted[rows[is_request]] = step.accepted[is_request]
        return step

    def copies(self, rows: Integers, step: StateMoves) -> Copies:
        """The copies that `step` needs, without those to or from a column that has no slot."""
        ssm_sources = self.slots(rows, step.sources + step.biases)
        conv_sources = self.slots(rows, step.sources)
        destinations = self.slots(rows, step.columns)
        possible = step.moves & (destinations >= 0) & ((ssm_sources >= 0) | (conv_sources >= 0))
        fields = (rows, ssm_sources, conv_sources, step.biases, destinations)
        return Copies(*(field[possible] for field in fields))

    def forward_indices(
        self, rows: Integers, step: StateMoves, num_tokens: Integers, copy_free: bool
    ) -> ForwardIndices:
        """Where the forward of this step reads and writes.

        Args:
            rows, step: a batch, and what `before_forward` returned for it.
            num_tokens: [n] tokens whose states are kept: up to 1 + K of a decode step, 1 of a prefill.
            copy_free: whether the forward reads the old columns. False: `copies(rows, step)` were made.

        Raises:
            ValueError: a column that the forward must read or write has no slot.
        """
        moved = step.moves & (not copy_free)
        sources = np.where(moved, step.columns, step.sources)
        offsets = np.where(moved, 0, step.biases)
        reads, writes = sources >= 0, step.columns >= 0
        tokens = np.arange(max(int(num_tokens.max(initial=1)), 1))
        writes_token = writes[:, None] & (tokens < num_tokens[:, None])
        return ForwardIndices(
            ssm_sources=self._required_slots(rows, sources + offsets, reads),
            conv_sources=self._required_slots(rows, sources, reads),
            conv_offsets=np.where(reads, offsets, 0),
            ssm_destinations=self._required_slots(rows, step.columns[:, None] + tokens, writes_token),
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
        assert (self.columns >= PADDING).all(), "a column is no column"
        assert (self._table[self.columns == PADDING] == NO_SLOT).all(), "a row without a request has slots"
        in_range = (self.accepted >= 0) & (self.accepted <= 1 + self.num_speculative_tokens)
        assert in_range.all(), "more accepted than were drafted"
        assert (self.accepted[self.columns < 0] == 1).all(), "tokens accepted without a state"

    def _required_slots(self, rows: Integers, columns: Integers, required: Flags) -> Integers:
        slots = self.slots(rows[:, None] if columns.ndim == 2 else rows, columns)
        lacking = required & (slots < 0)
        if lacking.any():
            at = rows[lacking.reshape(len(rows), -1).any(1)].tolist()
            raise ValueError(f"rows {at} have no slots in columns that a forward needs")
        return np.where(required, slots, NO_SLOT)

    def _check_rows(self, rows: Integers) -> Flags:
        """Which rows are requests and not padding."""
        is_request: Flags = rows >= 0
        named = rows[is_request]
        if (rows < -1).any() or (rows >= len(self._table)).any() or len(np.unique(named)) != len(named):
            raise ValueError(
                f"rows is {rows.tolist()}; accepted: -1, or rows below {len(self._table)}, none twice"
            )
        return is_request
