"""The align kernels in plain torch, row after row: the oracle, and what the CPU runs.

Names and signatures are those of `align`. Per request row, `state_idx` is the running column, `num_accepted`
the tokens accepted in the last step, the bonus token counted; `contexts.speculative_state` states the rule.
Reads numbers on the host: synchronises on a GPU.
"""

import torch
from torch import Tensor

from .align_layout import AlignLayout, AlignState

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def preprocess_align(
    idx_mapping: Tensor,
    state_idx: Tensor,
    num_computed: Tensor,
    query_start_loc: Tensor,
    num_accepted: Tensor,
    src_col: Tensor,
    src_off: Tensor,
    num_reqs: int,
    block_size_tokens: int,
) -> None:
    """Before a forward: where each state is, and the columns of this step.

    Args:
        idx_mapping: [>= num_reqs] the request row of each batch row, -1 for padding. No row twice.
        state_idx: [rows], written: becomes the column of the last token of this step. -1 for no state yet.
        num_computed: [rows] tokens before this step. query_start_loc: [>= num_reqs + 1] by batch row.
        num_accepted: [rows], written: becomes 1 where a state changes its column.
        src_col, src_off: [rows], written: state_idx and num_accepted - 1, at least 0, as they were.
        num_reqs: batch rows.

    All int32 or int64. Rows that are not in the batch, and a state_idx below -1, which is no request's, stay.
    """
    for batch in range(num_reqs):
        row = int(idx_mapping[batch])
        if row < 0:
            continue
        column, accepted = int(state_idx[row]), int(num_accepted[row])
        src_col[row] = column
        src_off[row] = max(accepted - 1, 0)
        if column < -1:
            continue
        after = int(num_computed[row] + query_start_loc[batch + 1] - query_start_loc[batch])
        state_idx[row] = -(-after // block_size_tokens) - 1
        if column >= 0 and column != int(state_idx[row]):
            num_accepted[row] = 1


def precopy_align(
    layout: AlignLayout,
    state_idx: Tensor,
    src_col: Tensor,
    token_bias: Tensor,
    idx_mapping: Tensor | None,
    num_reqs: int,
) -> None:
    """Copy states from column `src_col`, biased, to column `state_idx`, where these differ.

    Args:
        state_idx, src_col, token_bias: [rows] int32 or int64, as `preprocess_align` leaves them.
        idx_mapping: [>= num_reqs] the request row of each batch row, -1 for padding; None: they are the same.

    Writes the layout's states: SSM states from column src_col + token_bias, conv states without their first
    token_bias inputs. A state whose column or slot is out of range is left out; a source of -1 is none.
    """
    for batch in range(num_reqs):
        row = batch if idx_mapping is None else int(idx_mapping[batch])
        if row < 0:
            continue
        source, destination = int(src_col[row]), int(state_idx[row])
        if source >= 0 and source != destination:
            _copy_row(layout, row, source, destination, int(token_bias[row]))


def postprocess_align(
    layout: AlignLayout,
    num_accepted: Tensor,
    state_idx: Tensor,
    num_computed: Tensor,
    num_accepted_out: Tensor,
    idx_mapping: Tensor | None,
    num_reqs: int,
    block_size_tokens: int,
    num_scheduled: Tensor | None = None,
    num_drafted: Tensor | None = None,
) -> None:
    """After sampling: put the state at the last boundary that was reached where it can be cached.

    Args:
        num_accepted: [rows] of this step; only read.
        state_idx: [rows] the running columns.
        num_computed: [rows] tokens before this step; after it where `num_scheduled` is None.
        num_accepted_out: [rows], filled with num_accepted before; written: 1 where the running column itself
            became the boundary's. Other memory than num_accepted: several programs read that.
        idx_mapping, num_reqs: as in `precopy_align`.
        num_scheduled, num_drafted: [rows] tokens of this step, and the drafts among them; or both None.

    Writes the layout's states too, as `precopy_align`.
    """
    for batch in range(num_reqs):
        row = batch if idx_mapping is None else int(idx_mapping[batch])
        if row < 0:
            continue
        column, accepted, computed = int(state_idx[row]), int(num_accepted[row]), int(num_computed[row])
        if num_scheduled is not None and num_drafted is not None:
            computed += int(num_scheduled[row]) - int(num_drafted[row]) + accepted - 1
        boundary = computed // block_size_tokens * block_size_tokens
        bias = boundary - (computed - accepted + 1)
        if column < 0 or accepted <= 0 or boundary <= 0 or bias < 0:
            continue
        destination = boundary // block_size_tokens - 1
        if destination == column:
            num_accepted_out[row] = 1
        if destination != column or bias:
            _copy_row(layout, row, column, destination, bias)


def _copy_row(layout: AlignLayout, row: int, source: int, destination: int, bias: int) -> None:
    for state in layout.states:
        table = layout.block_tables[state.group]
        from_column = source if state.conv_width else source + bias
        columns = (from_column, destination)
        if not all(0 <= column < table.shape[1] for column in columns):
            continue
        of, to = (int(table[row, column]) for column in columns)
        if 0 <= of < len(state.states) and 0 <= to < len(state.states) and bias >= 0:
            _copy_state(state, of, to, bias, layout.conv_dim_first)


def _copy_state(state: AlignState, of: int, to: int, bias: int, conv_dim_first: bool) -> None:
    """As integers: a float that is no number would keep its kind, but perhaps not its bits."""
    source, destination = (state.states[slot].view(_BITS[state.states.itemsize]) for slot in (of, to))
    if state.conv_width:
        window = 1 if conv_dim_first else 0
        kept = max(state.conv_width - bias, 0)
        source = source.narrow(window, state.conv_width - kept, kept)
        destination = destination.narrow(window, 0, kept)
    destination.copy_(source.clone())
