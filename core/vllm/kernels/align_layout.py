"""Where states lie in memory: the numbers that a launch of the align kernels reads instead of tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class AlignState(NamedTuple):
    """One state tensor of one layer."""

    states: Tensor
    """An SSM state [slots, ...], or a conv state [slots, window, dim] or [slots, dim, window]."""
    conv_width: int
    """Inputs in the window of a conv state, kernel - 1 + draft tokens; 0 for an SSM state."""
    group: int = 0
    """Index of the block table that names the state's slots."""


class StateRecord(NamedTuple):
    """One state tensor as a kernel sees it: int64 numbers, in this order.

    A conv state is a matrix of `num_rows` rows with `inner_size` elements each; an SSM state is one row.
    """

    base_address: int
    slot_stride: int
    """Bytes."""
    element_size: int
    """Bytes."""
    inner_size: int
    """Elements of one row, which lie side by side."""
    conv_width: int
    group: int
    num_rows: int
    row_stride: int
    """Bytes; 0 for an SSM state."""
    num_slots: int


@dataclass(frozen=True)
class AlignLayout:
    """State tensors and the tables of their slots, bound to the memory where both lay at the call.

    Attributes:
        states: the state tensors, which the kernels write.
        block_tables: [rows, columns] int32 slots, -1 for none; all of one shape and one row stride.
        conv_dim_first: conv states are [slots, dim, window], not [slots, window, dim].
        table_addresses: [tables] int64 on the device.
        state_records: [states, fields of StateRecord] int64 on the device.
        max_state_bytes: bytes of the largest state.
        max_window_bytes: bytes of the longest conv window of one channel.
    """

    states: tuple[AlignState, ...]
    block_tables: tuple[Tensor, ...]
    conv_dim_first: bool
    table_addresses: Tensor
    state_records: Tensor
    max_state_bytes: int
    max_window_bytes: int

    @classmethod
    def from_tensors(
        cls, states: Sequence[AlignState], block_tables: Sequence[Tensor], conv_dim_first: bool
    ) -> "AlignLayout":
        """Measure the tensors and send the numbers to their device; synchronises.

        States may have gaps between slots, and conv states gaps between rows.

        Raises:
            ValueError: there is no state or no table, the tables are not alike, or a state cannot be copied
                as bytes.
        """
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

    def bytes_copied(self, bias: int) -> int:
        """Bytes that copying a row reads, and also writes; conv windows lack their first `bias` inputs."""
        copied = 0
        for states, width, _ in self.states:
            whole = states[0].numel() * states.itemsize
            copied += whole // width * max(width - bias, 0) if width else whole
        return copied


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
