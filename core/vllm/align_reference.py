"""The align kernels in plain torch, and the layout of states that both kinds of kernels read.

Names and signatures are those of `align_kernels`. In every function `state_idx` [rows] holds the running
column of each request row, and `num_accepted` [rows] the tokens that the row accepted in its last step, the
bonus token included. Integer tensors are int32 or int64. The functions read numbers on the host, so they
synchronise on a GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .align_rule import Flags, Integers, save_boundary

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class AlignState(NamedTuple):
    """One state tensor [slots, ...] of one layer, and the index of the block table that names its slots.

    `conv_width`: inputs in the window of a conv state, kernel - 1 + drafts; 0 for an SSM state.
    """

    states: Tensor
    conv_width: int
    group: int = 0


class StateRecord(NamedTuple):
    """One state tensor as a kernel sees it: int64 numbers in this order; sizes and strides in bytes.

    A conv state is a matrix of `num_rows` rows of `inner_size` elements; an SSM state is one row.
    """

    base_address: int
    slot_stride: int
    element_size: int
    inner_size: int
    conv_width: int
    group: int
    num_rows: int
    row_stride: int
    num_slots: int


@dataclass(frozen=True)
class AlignLayout:
    """State tensors and the tables of their slots, bound to the memory where both lay at the call."""

    states: tuple[AlignState, ...]  # written by the kernels
    block_tables: tuple[Tensor, ...]  # [rows, columns] int32 slots, -1 for none; of one shape and row stride
    conv_dim_first: bool  # conv states are [slots, dim, window], not [slots, window, dim]
    table_addresses: Tensor  # [tables] int64 on the device
    state_records: Tensor  # [states, fields of StateRecord] int64 on the device
    max_state_bytes: int
    max_window_bytes: int  # of the longest conv window of one channel

    @classmethod
    def from_tensors(
        cls, states: Sequence[AlignState], block_tables: Sequence[Tensor], conv_dim_first: bool
    ) -> "AlignLayout":
        """Measure the tensors, which may have gaps between slots and conv rows; synchronises."""
        if not states or not block_tables:
            raise ValueError(
                f"there are {len(states)} state tensors and {len(block_tables)} block tables; "
                "accepted: at least one of each"
            )
        first = block_tables[0]
        for table in block_tables:
            like = (table.dtype, table.shape, table.stride(), table.device)
            if like != (torch.int32, first.shape, first.stride(), first.device) or table.dim() != 2:
                raise ValueError(f"block_tables have {like}; accepted: int32, 2-D, all alike")
            if table.shape[1] > 1 and table.stride(1) != 1:
                raise ValueError(
                    f"block_tables have strides {table.stride()}; accepted: columns side by side"
                )
        records = [_record(state, conv_dim_first, first.device, len(block_tables)) for state in states]
        addresses = [table.data_ptr() for table in block_tables]
        return cls(
            states=tuple(states),
            block_tables=tuple(block_tables),
            conv_dim_first=conv_dim_first,
            table_addresses=torch.tensor(addresses, dtype=torch.int64, device=first.device),
            state_records=torch.tensor(records, dtype=torch.int64, device=first.device),
            max_state_bytes=max(state.states[0].numel() * state.states.itemsize for state in states),
            max_window_bytes=max(state.conv_width * state.states.itemsize for state in states),
        )

    def lies_in(self, states: Sequence[AlignState], block_tables: Sequence[Tensor]) -> bool:
        """Whether the layout describes the memory of these tensors, whatever that memory holds now."""
        tensors = [state.states for state in states] + list(block_tables)
        bound = [state.states for state in self.states] + list(self.block_tables)
        return (
            [_place(tensor) for tensor in tensors] == [_place(tensor) for tensor in bound]
            and [state[1:] for state in states] == [state[1:] for state in self.states]
        )  # fmt: skip


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _record(state: AlignState, conv_dim_first: bool, device: torch.device, num_tables: int) -> StateRecord:
    states, width, group = state
    if states.device != device or not 0 <= group < num_tables or states.itemsize not in (1, 2, 4, 8):
        raise ValueError(
            f"a state is {states.dtype} on {states.device}, of group {group}; accepted: elements of up to 8 "
            f"bytes on {device}, of a group below {num_tables}"
        )
    shape, strides, size = states.shape[1:], states.stride()[1:], states.itemsize
    inner_size, num_rows, row_stride = states[0].numel(), 1, 0
    if width:
        window_dim = 1 if conv_dim_first else 0
        if len(shape) != 2 or shape[window_dim] != width:
            order = "dim, window" if conv_dim_first else "window, dim"
            raise ValueError(
                f"a conv state of window {width} has shape {list(states.shape)}; accepted: [slots, {order}]"
            )
        num_rows, inner_size, row_stride = shape[0], shape[1], strides[0] * size
        contiguous = strides[1] == 1 or inner_size == 1
    else:
        contiguous = states[0].is_contiguous()
    if not contiguous:
        raise ValueError(f"a state has shape {list(shape)} and strides {strides}; accepted: one without gaps")
    return StateRecord(
        base_address=states.data_ptr(),
        slot_stride=states.stride(0) * size,
        element_size=size,
        inner_size=inner_size,
        conv_width=width,
        group=group,
        num_rows=num_rows,
        row_stride=row_stride,
        num_slots=len(states),
    )


def precopy_align(
    layout: AlignLayout,
    state_idx: Tensor,
    src_col: Tensor,
    token_bias: Tensor,
    idx_mapping: Tensor | None,
    num_reqs: int,
) -> None:
    """Before a forward: copy states from column `src_col` to column `state_idx` where the two differ.

    An SSM state comes from column src_col + token_bias, a conv window from column src_col without its first
    token_bias inputs. A state whose column or slot is out of range stays. `idx_mapping` None: batch row i is
    request row i.
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

    `num_computed` [rows] are the tokens before this step, or after it where `num_scheduled` is None.
    `num_accepted_out`, which the caller filled with `num_accepted`, becomes 1 where the running column itself
    became the boundary's. It is other memory, because several programs of the kernel read `num_accepted`.
    """
    _, rows = _request_rows(idx_mapping, num_reqs)
    columns, accepted = _numbers(state_idx)[rows], _numbers(num_accepted)[rows]
    new_num_computed = _numbers(num_computed)[rows]
    if num_scheduled is not None and num_drafted is not None:
        new_num_computed += _numbers(num_scheduled)[rows] - _numbers(num_drafted)[rows] + accepted - 1
    step = save_boundary(columns, accepted, new_num_computed, block_size_tokens)
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
