"""The align kernels in plain torch: what runs on the CPU, and what `align` is compared with.

Names and signatures are those of `align`. The rule comes from `align_rule`; `align` states it a second
time. In every function `state_idx` [rows] holds the running column of each request row, and `num_accepted`
[rows] the tokens that the row accepted in its last step, the bonus token included. Integer tensors are
int32 or int64.

The functions read numbers on the host, so they synchronise on a GPU.
"""

import numpy as np
import torch
from torch import Tensor

from ..align_rule import Flags, Integers, advance, save_boundary_at
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
    """Before a forward: record where each state is, and advance the columns to this step.

    Rows that are not in the batch stay. A row whose column is below -1 holds no request: its column stays.

    Args:
        idx_mapping: [>= num_reqs] the request row of each batch row, -1 for padding; no row twice.
        state_idx: [rows], written: the column of this step's last token. -1 before: no state yet.
        num_computed: [rows] tokens before this step.
        query_start_loc: [>= num_reqs + 1] first token of each batch row in the step, with a trailing total.
        num_accepted: [rows], written: 1 where a state changes its column.
        src_col: [rows], written: `state_idx` as it was before the call.
        src_off: [rows], written: `num_accepted` as it was before the call, minus 1, at least 0.
        num_reqs: batch rows.
        block_size_tokens: tokens of one column.
    """
    batch, rows = _request_rows(idx_mapping, num_reqs)
    starts = _numbers(query_start_loc)
    step = advance(
        _numbers(state_idx)[rows],
        _numbers(num_accepted)[rows],
        _numbers(num_computed)[rows],
        starts[batch + 1] - starts[batch],
        block_size_tokens,
    )
    _write(state_idx, rows, step.columns)
    _write(num_accepted, rows, step.accepted)
    _write(src_col, rows, step.sources)
    _write(src_off, rows, step.biases)


def precopy_align(
    layout: AlignLayout,
    state_idx: Tensor,
    src_col: Tensor,
    token_bias: Tensor,
    idx_mapping: Tensor | None,
    num_reqs: int,
) -> None:
    """Before a forward: copy states from column `src_col` to column `state_idx` where the two differ.

    Writes the layout's states. An SSM state comes from column src_col + token_bias; a conv window comes from
    column src_col and leaves out its first token_bias inputs. A state whose column or slot is out of range
    stays, and so does every state of a row with a negative `src_col`.

    Args:
        layout: the states and the tables of their slots.
        state_idx, src_col, token_bias: [rows] as `preprocess_align` leaves them.
        idx_mapping: [>= num_reqs] the request row of each batch row, -1 for padding; None: batch row i is
            request row i.
        num_reqs: batch rows.
    """
    _, rows = _request_rows(idx_mapping, num_reqs)
    sources, destinations = _numbers(src_col)[rows], _numbers(state_idx)[rows]
    moves = (sources >= 0) & (sources != destinations)
    _copy_rows(layout, moves, rows, sources, destinations, _numbers(token_bias)[rows])


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
    """After sampling: copy the state at the last boundary that a row reached to the boundary's column.

    Writes the layout's states, as `precopy_align` does.

    Args:
        layout: the states and the tables of their slots.
        num_accepted: [rows] accepted counts of this step.
        state_idx: [rows] the running columns.
        num_computed: [rows] tokens before this step; tokens after this step where `num_scheduled` is None.
        num_accepted_out: [rows], filled with `num_accepted` by the caller, written: 1 where the running
            column itself became the boundary's. Must be other memory than `num_accepted`, which several
            programs of the kernel read.
        idx_mapping, num_reqs: as in `precopy_align`.
        block_size_tokens: tokens of one column.
        num_scheduled, num_drafted: [rows] tokens of this step, and the drafts among them; or both None.
    """
    _, rows = _request_rows(idx_mapping, num_reqs)
    columns, accepted = _numbers(state_idx)[rows], _numbers(num_accepted)[rows]
    new_num_computed = _numbers(num_computed)[rows]
    if num_scheduled is not None and num_drafted is not None:
        new_num_computed += _numbers(num_scheduled)[rows] - _numbers(num_drafted)[rows] + accepted - 1
    step = save_boundary_at(columns, accepted, new_num_computed, block_size_tokens)
    in_place = step.reached & (step.destinations == columns)
    _write(num_accepted_out, rows[in_place], step.accepted[in_place])
    _copy_rows(layout, step.moves, rows, columns, step.destinations, step.biases)


def _request_rows(idx_mapping: Tensor | None, num_reqs: int) -> tuple[Integers, Integers]:
    """(batch rows, their request rows) without padding."""
    batch = np.arange(num_reqs, dtype=np.int64)
    if idx_mapping is None:
        return batch, batch
    rows = _numbers(idx_mapping)[:num_reqs]
    return batch[rows >= 0], rows[rows >= 0]


def _numbers(tensor: Tensor) -> Integers:
    """A copy of a tensor's numbers on the CPU."""
    return tensor.cpu().numpy().astype(np.int64)


def _write(tensor: Tensor, rows: Integers, values: Integers) -> None:
    tensor[torch.from_numpy(rows).to(tensor.device)] = torch.from_numpy(values).to(tensor)


def _copy_rows(
    layout: AlignLayout,
    moves: Flags,
    rows: Integers,
    sources: Integers,
    destinations: Integers,
    biases: Integers,
) -> None:
    """Copy the states of the rows that move; all arrays [n]."""
    numbers = np.stack([rows, sources, destinations, biases], axis=1)
    for row, source, destination, bias in numbers[moves].tolist():
        for state in layout.states:
            table = layout.block_tables[state.group]
            columns = (source if state.conv_width else source + bias, destination)
            if bias < 0 or not all(0 <= column < table.shape[1] for column in columns):
                continue
            slots = [int(table[row, column]) for column in columns]
            if all(0 <= slot < len(state.states) for slot in slots):
                _copy_state(state, slots[0], slots[1], bias, layout.conv_dim_first)


def _copy_state(state: AlignState, source: int, destination: int, bias: int, conv_dim_first: bool) -> None:
    """Copy a state as integers: a copied float that is NaN might change its bits."""
    read, written = (state.states[slot].view(_BITS[state.states.itemsize]) for slot in (source, destination))
    if state.conv_width:
        window_dim = 1 if conv_dim_first else 0
        num_inputs = max(state.conv_width - bias, 0)
        read = read.narrow(window_dim, state.conv_width - num_inputs, num_inputs)
        written = written.narrow(window_dim, 0, num_inputs)
    written.copy_(read.clone())
