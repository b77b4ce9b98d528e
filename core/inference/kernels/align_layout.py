"""How the states that the align kernels copy lie in memory: what their launches read instead of tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_NUMBERS = (
    *("base_addresses", "slot_strides", "element_sizes", "inner_sizes", "conv_widths", "groups"),
    *("row_counts", "row_strides", "slot_counts"),
)
"""The tensors of a layout that have one number a state."""


class AlignState(NamedTuple):
    """One state tensor of one layer."""

    states: Tensor
    """[slots, ...]: an SSM state; or a conv state, [slots, window, dim] or [slots, dim, window]."""
    conv_width: int
    """The window of a conv state, kernel - 1 + draft tokens; 0 for an SSM state."""
    group: int = 0
    """Which of the block tables has its slots."""


@dataclass(frozen=True)
class AlignLayout:
    """State tensors and the tables of their slots; bound to the memory where these lay.

    The tensors on the device have one int64 for each state tensor, sizes and strides in bytes but for
    `inner_sizes`, which count elements that follow one another: of a whole SSM state; of a conv state,
    dim or window, whichever comes last. Rows of a conv state are what its inner elements are of.
    """

    states: tuple[AlignState, ...]
    block_tables: tuple[Tensor, ...]
    """[rows, columns] int32 of slots, -1 for none; all of one shape and row stride."""
    conv_dim_first: bool
    """Conv states are [slots, dim, window]."""
    table_addresses: Tensor
    """One int64 for each block table."""
    base_addresses: Tensor
    slot_strides: Tensor
    element_sizes: Tensor
    inner_sizes: Tensor
    conv_widths: Tensor
    groups: Tensor
    row_counts: Tensor
    row_strides: Tensor
    slot_counts: Tensor
    most_bytes: int
    """Of the largest state."""
    widest_window: int
    """In bytes: inputs of the longest window, times their size."""

    @classmethod
    def of(
        cls, states: Sequence[AlignState], block_tables: Sequence[Tensor], conv_dim_first: bool
    ) -> "AlignLayout":
        """Copies the numbers to the device: synchronises. ValueError where a state cannot be copied as bytes.

        States may have gaps between slots, and conv states between rows, not between inner elements.
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
        rows = [_numbers(state, conv_dim_first, first.device, len(block_tables)) for state in states]
        numbers = torch.tensor(rows, dtype=torch.int64).T.contiguous().to(first.device).unbind()
        tables = torch.tensor([table.data_ptr() for table in block_tables], dtype=torch.int64)
        return cls(
            states=tuple(states),
            block_tables=tuple(block_tables),
            conv_dim_first=conv_dim_first,
            most_bytes=max(state.states[0].numel() * state.states.itemsize for state in states),
            widest_window=max(state.conv_width * state.states.itemsize for state in states),
            table_addresses=tables.to(first.device),
            **dict(zip(_NUMBERS, numbers, strict=True)),
        )

    def lies_in(self, states: Sequence[AlignState], block_tables: Sequence[Tensor]) -> bool:
        """Whether this is the layout of these tensors: where they are, not what they hold."""
        tensors = [state.states for state in states] + list(block_tables)
        own = [state.states for state in self.states] + list(self.block_tables)
        return (
            [_place(tensor) for tensor in tensors] == [_place(tensor) for tensor in own]
            and [state[1:] for state in states] == [state[1:] for state in self.states]
        )  # fmt: skip

    def bytes_copied(self, bias: int) -> int:
        """Bytes that copying a row's states writes, and reads: of conv windows all but the first `bias`."""
        copied = 0
        for states, width, _ in self.states:
            whole = states[0].numel() * states.itemsize
            copied += whole // width * max(width - bias, 0) if width else whole
        return copied


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _numbers(state: AlignState, conv_dim_first: bool, device: torch.device, tables: int) -> list[int]:
    """The state's entry of each of `_NUMBERS`."""
    states, width, group = state
    if states.device != device or not 0 <= group < tables or states.itemsize not in (1, 2, 4, 8):
        raise ValueError(
            f"a state is {states.dtype} on {states.device}, of group {group}; accepted: elements of up to 8 "
            f"bytes on {device}, of a group below {tables}"
        )
    shape, strides, size = states.shape[1:], states.stride()[1:], states.itemsize
    inner, rows, row_stride = states[0].numel(), 1, 0
    if width:
        at = 1 if conv_dim_first else 0
        if len(shape) != 2 or shape[at] != width:
            order = "dim, window" if conv_dim_first else "window, dim"
            raise ValueError(
                f"a conv state of window {width} has shape {list(states.shape)}; accepted: [slots, {order}]"
            )
        rows, inner, row_stride = shape[0], shape[1], strides[0] * size
        contiguous = strides[1] == 1 or inner == 1
    else:
        contiguous = states[0].is_contiguous()
    if not contiguous:
        raise ValueError(f"a state has shape {list(shape)} and strides {strides}; accepted: one without gaps")
    return [
        states.data_ptr(), states.stride(0) * size, size, inner, width, group, rows, row_stride, len(states)
    ]  # fmt: skip
