"""Align mode's rule: which column of a request's slot table holds which state while drafts are unverified.

A request's row of the slot table has one column for each block of its sequence. The *running column* is the
column of the step's last token. It begins a window of 1 + K columns; K is the number of draft tokens of a
step:

    column        running         running + 1     ...  running + K
    SSM state     after token 1   after token 2        after token 1 + K   of the last decode step
    conv state    one window of kernel - 1 + K inputs; the window after token j + 1 begins at offset j

A recurrence cannot run backwards, so the window keeps a whole SSM state for each token. A conv state is raw
inputs, so one longer window serves all tokens: rolling back means reading at a smaller offset. A prefill
step leaves only its last state, in the running column. Every column before the running column holds the
state at its block's end, after exactly (column + 1) * block_size_tokens tokens; no step writes there again.

The functions take and return integer arrays [n], one entry for each row of a batch.
`kernels.align_reference` applies them on the CPU, and `kernels.align` states them again for the GPU, which
alone knows the accepted counts. An accepted count includes the bonus token: 1 means that no draft was
right, 0 that nothing was sampled.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

FRESH = -1
"""The column of a request that has no state yet: its forward reads zeros, and writes a state."""
PADDING = -2
"""The column of a row without a request: its forward reads nothing and writes nothing."""


@dataclass(frozen=True)
class Advance:
    """How a batch's running columns change before a forward; all fields [n].

    Attributes:
        columns: the running columns of this step.
        sources: the running columns of the step before; FRESH or PADDING where there was none.
        biases: accepted drafts of the step before. The state of the accepted tokens is in SSM column
            source + bias, and in the conv window of the source at offset bias.
        accepted: the counts of this step's forward; 1 where the state moves.
        moves: whether the forward must find the state in another column than the one that holds the state
            now. Either a copy moves the state, or the forward reads the old column.
    """

    columns: Integers
    sources: Integers
    biases: Integers
    accepted: Integers
    moves: Flags


@dataclass(frozen=True)
class BoundarySave:
    """Where the state at a reached block boundary goes after sampling; all fields [n].

    Attributes:
        boundaries: tokens before the last boundary that the accepted tokens reached.
        sources: the running columns.
        biases: accepted drafts up to the boundary; they locate its state as in `Advance`.
        destinations: the column of the boundary's block, boundary / block_size_tokens - 1.
        accepted: the counts for the next step; 1 where the boundary's state now begins the running column.
        reached: whether this step reached the boundary. After the copy the destination holds its state.
        moves: whether the boundary's state must be copied to the destination.
    """

    boundaries: Integers
    sources: Integers
    biases: Integers
    destinations: Integers
    accepted: Integers
    reached: Flags
    moves: Flags


def start_columns(num_computed: Integers, block_size_tokens: int) -> Integers:
    """The running columns of requests that start from the state after `num_computed` tokens; FRESH for 0."""
    return (num_computed - 1) // block_size_tokens


def advance(
    columns: Integers,
    accepted: Integers,
    num_computed: Integers,
    num_scheduled: Integers,
    block_size_tokens: int,
) -> Advance:
    """The rule before a forward of `num_scheduled` tokens that follow `num_computed` tokens.

    Args:
        columns: [n] running columns of the step before; an entry below FRESH stays.
        accepted: [n] accepted counts of the step before.
        num_computed, num_scheduled: [n] tokens before this step, and of this step.
    """
    last_columns = -(-(num_computed + num_scheduled) // block_size_tokens) - 1
    running = np.where(columns < FRESH, columns, last_columns)
    moves = (columns >= 0) & (columns != running)
    return Advance(
        columns=running,
        sources=columns,
        biases=np.maximum(accepted - 1, 0),
        accepted=np.where(moves, 1, accepted),
        moves=moves,
    )


def save_boundary(
    columns: Integers,
    accepted: Integers,
    num_computed: Integers,
    num_scheduled: Integers,
    num_drafted: Integers,
    block_size_tokens: int,
) -> BoundarySave:
    """The rule after sampling, given the step's own counts.

    Args:
        columns: [n] running columns of this step.
        accepted: [n] accepted counts of this step.
        num_computed, num_scheduled: [n] tokens before this step, and of this step.
        num_drafted: [n] drafts among the scheduled tokens.
    """
    new_num_computed = num_computed + num_scheduled - num_drafted + accepted - 1
    return save_boundary_at(columns, accepted, new_num_computed, block_size_tokens)


def save_boundary_at(
    columns: Integers, accepted: Integers, new_num_computed: Integers, block_size_tokens: int
) -> BoundarySave:
    """`save_boundary`, given the tokens computed after this step.

    The rule compares columns and never slots, because two columns may share a slot.
    """
    first_counts = new_num_computed - accepted + 1
    boundaries = new_num_computed // block_size_tokens * block_size_tokens
    biases = boundaries - first_counts
    destinations = boundaries // block_size_tokens - 1
    reached = (columns >= 0) & (accepted > 0) & (destinations >= 0) & (biases >= 0)
    in_place = destinations == columns
    return BoundarySave(
        boundaries=boundaries,
        sources=columns,
        biases=biases,
        destinations=destinations,
        accepted=np.where(reached & in_place, 1, accepted),
        reached=reached,
        moves=reached & ~(in_place & (biases == 0)),
    )
