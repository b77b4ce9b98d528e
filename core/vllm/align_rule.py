"""Align mode's rule: which column of a request's slot table holds which state while drafts are unverified.

A request's row of the slot table has one column for each block of its sequence. The *running column* is the
column of the step's last token. It begins a window of 1 + K columns; K is the number of drafts of a step:

    column        running         running + 1     ...  running + K
    SSM state     after token 1   after token 2        after token 1 + K   of the last decode step
    conv state    one window of kernel - 1 + K inputs; the window after token j + 1 begins at offset j

A prefill step stores only its last state, in the running column: the columns of blocks that it passed hold no
state. A column before the running one is written again only if drafts are rejected back into its block. An
accepted count includes the bonus token: 1 means that no draft was right, 0 that nothing was sampled.

Example, blocks of 560 tokens, K = 3: 557 computed tokens, running column 0, 2 accepted. The next step of 4
tokens ends at 561, so the running column becomes 1: the SSM state moves from column 0 + 1 to column 1.

Either a copy moves the state before the forward, or the forward reads the old column and writes the new ones
(copy-free), from slots `table[row, sources + biases]` (SSM) and `table[row, sources]` (conv, offset biases).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

FRESH = -1  # the column of a request that has no state yet: its forward reads zeros, and writes a state
PADDING = -2  # the column of a row without a request: its forward reads nothing and writes nothing


@dataclass(frozen=True)
class StateMoves:
    """Where a batch's states go before a forward, or after sampling; all fields [n].

    The state after the accepted drafts is in SSM column source + bias, and in the source's conv window at
    offset bias.
    """

    columns: Integers  # running columns of this step; after sampling columns of the reached boundaries
    sources: Integers  # running columns of the last step; FRESH or PADDING where there was none
    biases: Integers  # accepted drafts of the last step; after sampling those up to the boundary
    accepted: Integers  # counts for the next forward; 1 where its running column begins with the state
    moves: Flags  # whether the state is copied to the column, or read from the source


def start_columns(num_computed: Integers, block_size_tokens: int) -> Integers:
    """The running columns of requests that start from the state after `num_computed` tokens; FRESH for 0."""
    return (num_computed - 1) // block_size_tokens


def advance(
    columns: Integers,
    accepted: Integers,
    num_computed: Integers,
    num_scheduled: Integers,
    block_size_tokens: int,
) -> StateMoves:
    """The rule before a forward; `columns` and `accepted` are those of the step before."""
    last_columns = (num_computed + num_scheduled - 1) // block_size_tokens
    running = np.where(columns < FRESH, columns, last_columns)
    moves = (columns >= 0) & (columns != running)
    return StateMoves(running, columns, np.maximum(accepted - 1, 0), np.where(moves, 1, accepted), moves)


def save_boundary(
    columns: Integers, accepted: Integers, new_num_computed: Integers, block_size_tokens: int
) -> StateMoves:
    """The rule after sampling. It compares columns and never slots, because two columns may share a slot."""
    boundaries = new_num_computed // block_size_tokens * block_size_tokens
    biases = boundaries - (new_num_computed - accepted + 1)
    destinations = boundaries // block_size_tokens - 1
    reached = (columns >= 0) & (accepted > 0) & (destinations >= 0) & (biases >= 0)
    in_place = destinations == columns
    accepted = np.where(reached & in_place, 1, accepted)
    return StateMoves(destinations, columns, biases, accepted, reached & ~(in_place & (biases == 0)))
