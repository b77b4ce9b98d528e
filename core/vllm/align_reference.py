"""Where a model's states lie for the align kernels, and these kernels in plain torch.

Names and signatures are those of `align_kernels`. Every tensor of a batch, [n] int32 or int64, is in the
order of the rows of the block tables. Counts of accepted tokens include the bonus token. On a GPU the torch
functions synchronise.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .align_rule import save_boundary

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class AlignState(NamedTuple):
    """One state tensor [slots, ...] of one layer, and the index of the block table that names its slots.

    `conv_width`: inputs in the window of a conv state, kernel - 1 + drafts; 0 for an SSM state.
    """

    tensor: Tensor
    conv_width: int
    group: int = 0


class StateRecord(NamedTuple):
    """One state tensor as a kernel sees it, in bytes: a conv state as rows, an SSM state as one row."""

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
            strides = table.stride()
            like = (table.dtype, table.shape, strides, table.device)
            if like != (torch.int32, first.shape, first.stride(), first.device) or table.dim() != 2:
                raise ValueError(f"block_tables have {like}; accepted: int32, 2-D, all alike")
            if table.shape[1] > 1 and strides[1] != 1:
                raise ValueError(f"block_tables have strides {strides}; accepted: columns side by side")
        records = [_record(state, conv_dim_first, first.device) for state in states]
        addresses = [table.data_ptr() for table in block_tables]
        return cls(
            states=tuple(states),
            block_tables=tuple(block_tables),
            conv_dim_first=conv_dim_first,
            table_addresses=torch.tensor(addresses, dtype=torch.int64, device=first.device),
            state_records=torch.tensor(records, dtype=torch.int64, device=first.device),
            max_state_bytes=max(state.tensor[0].numel() * state.tensor.itemsize for state in states),
            max_window_bytes=max(state.conv_width * state.tensor.itemsize for state in states),
        )

    def lies_in(self, states: Sequence[AlignState], block_tables: Sequence[Tensor]) -> bool:
        """Whether the layout describes the memory of these tensors, whatever that memory holds now."""
        return _memory(states, block_tables) == _memory(self.states, self.block_tables)


def _memory(states: Sequence[AlignState], block_tables: Sequence[Tensor]) -> list[tuple[object, ...]]:
    tensors = [*(state.tensor for state in states), *block_tables]
    places = [(x.data_ptr(), x.shape, x.stride(), x.dtype, x.device) for x in tensors]
    return [*places, *(state[1:] for state in states)]


def _record(state: AlignState, conv_dim_first: bool, device: torch.device) -> StateRecord:
    tensor, width, group = state
    if tensor.device != device or tensor.itemsize not in _BITS:
        raise ValueError(
            f"a state is {tensor.dtype} on {tensor.device}; accepted: elements of up to 8 bytes on {device}"
        )
    shape, strides, size = tensor.shape[1:], tensor.stride()[1:], tensor.itemsize
    inner_size, num_rows, row_stride = tensor[0].numel(), 1, 0
    if width:
        window_dim = 1 if conv_dim_first else 0
        if len(shape) != 2 or shape[window_dim] != width:
            order = "dim, window" if conv_dim_first else "window, dim"
            raise ValueError(
                f"a conv state of window {width} has shape {list(tensor.shape)}; accepted: [slots, {order}]"
            )
        num_rows, inner_size, row_stride = shape[0], shape[1], strides[0] * size
        contiguous = strides[1] == 1 or inner_size == 1
    else:
        contiguous = tensor[0].is_contiguous()
    if not contiguous:
        raise ValueError(f"a state has shape {list(shape)} and strides {strides}; accepted: one without gaps")
    memory = tensor.data_ptr(), tensor.stride(0) * size, size
    return StateRecord(*memory, inner_size, width, group, num_rows, row_stride, len(tensor))


def precopy_align(layout: AlignLayout, columns: Tensor, sources: Tensor, biases: Tensor) -> None:
    """Before a forward: copy states from columns `sources` to the running `columns` where the two differ.

    An SSM state comes from column source + bias, a conv window from column source without its first `bias`
    inputs. A state whose column or slot is out of range stays.
    """
    _copy_rows(layout, (sources >= 0) & (sources != columns), sources, columns, biases)


def postprocess_align(
    layout: AlignLayout, num_accepted: Tensor, columns: Tensor, num_computed: Tensor, num_scheduled: Tensor,
    num_drafted: Tensor, block_size_tokens: int,
) -> None:  # fmt: skip
    """After sampling: copy the state at the last boundary that a row reached to the boundary's column.

    `num_accepted` becomes 1 where the running column itself became the boundary's.
    """
    device = columns.device
    running, accepted, computed, scheduled, drafted = (
        tensor.cpu().numpy().astype(np.int64)
        for tensor in (columns, num_accepted, num_computed, num_scheduled, num_drafted)
    )
    step = save_boundary(running, accepted, computed + scheduled - drafted + accepted - 1, block_size_tokens)
    num_accepted.copy_(torch.from_numpy(step.accepted))
    moves, *copied = (
        torch.from_numpy(numbers).to(device)
        for numbers in (step.moves, step.sources, step.columns, step.biases)
    )
    _copy_rows(layout, moves, *copied)


def _copy_rows(
    layout: AlignLayout, moves: Tensor, sources: Tensor, destinations: Tensor, biases: Tensor
) -> None:
    """Copy the states of the rows that move, as integers: a NaN copied as a float might change its bits."""
    for tensor, width, group in layout.states:
        table, elements = layout.block_tables[group], tensor.view(_BITS[tensor.itemsize])
        read = sources if width else sources + biases
        inside = moves & (biases >= 0) & (torch.minimum(read, destinations) >= 0)
        rows = (inside & (torch.maximum(read, destinations) < table.shape[1])).nonzero()[:, 0]
        slots = torch.stack([table[rows, read[rows]], table[rows, destinations[rows]]]).long()
        exist = ((slots >= 0) & (slots < len(elements))).all(0)
        (source, destination), bias = slots[:, exist], biases[rows[exist]]
        copied = elements[source]
        if width:  # inputs from `bias` on go to the window's front, and its end stays
            window_dim = 2 if layout.conv_dim_first else 1
            inputs = torch.arange(width, device=bias.device) + bias[:, None]
            inputs = inputs[:, None] if layout.conv_dim_first else inputs[:, :, None]
            inputs = inputs.expand_as(copied)
            shifted = copied.gather(window_dim, inputs.clamp(max=width - 1))
            copied = torch.where(inputs < width, shifted, elements[destination])
        elements[destination] = copied
