"""The align kernels in Triton; `align_reference` has the same launchers in plain torch, with their arguments.

Each launch has a bounded grid: a program ranks the rows that need a copy and takes every n-th tile of these
copies, in 16-byte accesses where addresses and row strides allow. A step in which no row crosses a boundary,
which is nearly every step, costs a launch whose programs read the rows' numbers and exit. A `layout` is
(block_table_ptrs_ptr, block_table_stride_req, block_table_columns, state_records_ptr, num_states, num_tiles).
"""

# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005 - kernels join tuples by +, to which mypy gives one type; Triton unpacks no tuples

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..inference.kernels.state_move import PROGRAMS, copy_tile
from ..validation import ceil_div
from .align_reference import AlignLayout, StateRecord

COPY_BYTES = 16384  # bytes of one tile: 1024 accesses of 16 bytes, 8 independent ones for each thread
TILES = 64  # most programs that share one state
GROUP = 128  # batch rows that a program ranks at once
NUM_WARPS = 4
LAYOUT_NUMBERS = ("block_table_stride_req", "block_table_columns", "num_states", "num_tiles")
"""What a launch says of a layout besides its pointers and meta-parameters."""
_UNSPECIALISED = [*LAYOUT_NUMBERS, "num_reqs"]
"""Arguments whose values never cause a compilation: the kernels know only their types."""
RECORD_NUMBERS = tl.constexpr(len(StateRecord._fields))


@triton.jit
def copy_rows(
    # Batch rows: [GROUP]
    has_copy, rows, src_cols, dst_cols, biases,
    # Layout
    layout,
    # Meta-parameters
    COPY_BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, CONV_STATE_DIM_FIRST: tl.constexpr,
):  # fmt: skip
    """This program's share of the copies of up to GROUP batch rows; rows without `has_copy` cost nothing."""
    num_copies = tl.sum(has_copy.to(tl.int32), 0)
    if num_copies > 0:
        rank = tl.where(has_copy, tl.cumsum(has_copy.to(tl.int32), 0) - 1, -1)
        num_states, num_tiles = layout[4], layout[5]
        items_per_row = num_states * num_tiles
        for item in range(tl.program_id(0), num_copies * items_per_row, tl.num_programs(0)):
            ranked = rank == item // items_per_row
            _copy_mamba_state_block(
                item % items_per_row // num_tiles,
                tl.sum(tl.where(ranked, rows, 0), 0).to(tl.int64),
                tl.sum(tl.where(ranked, src_cols, 0), 0),
                tl.sum(tl.where(ranked, dst_cols, 0), 0),
                tl.sum(tl.where(ranked, biases, 0), 0),
                item % num_tiles, layout, COPY_BLOCK_SIZE, WINDOW, CONV_STATE_DIM_FIRST,
            )  # fmt: skip


@triton.jit
def _copy_mamba_state_block(
    # Which copy
    state_idx, bt_row_idx, src_col, dst_col, token_bias, tile,
    # Layout
    layout,
    # Meta-parameters
    COPY_BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, CONV_STATE_DIM_FIRST: tl.constexpr,
):  # fmt: skip
    """Tile `tile` of one state of one request row, from column to column.

    Copies nothing where a column is outside the table or a slot outside the state tensor.
    """
    ACCESSES: tl.constexpr = COPY_BLOCK_SIZE // 16
    block_table_ptrs_ptr, block_table_stride_req, block_table_columns = layout[0], layout[1], layout[2]
    state_records_ptr, num_tiles = layout[3], layout[5]
    base, slot_stride, element, inner, width, group, rows, row_stride, num_slots = _load_record(
        state_records_ptr, state_idx
    )
    src_col = tl.where(width > 0, src_col, src_col + token_bias)
    in_table = (src_col >= 0) & (src_col < block_table_columns) & (dst_col >= 0)
    in_table = in_table & (dst_col < block_table_columns) & (token_bias >= 0)
    table = tl.load(block_table_ptrs_ptr + group).to(tl.pointer_type(tl.int32))
    table += bt_row_idx * block_table_stride_req
    src_slot = tl.load(table + src_col, mask=in_table, other=-1).to(tl.int64)
    dst_slot = tl.load(table + dst_col, mask=in_table, other=-1).to(tl.int64)
    if (src_slot >= 0) & (src_slot < num_slots) & (dst_slot >= 0) & (dst_slot < num_slots):
        size = inner * element
        source = base + src_slot * slot_stride
        destination = base + dst_slot * slot_stride
        # A state is one segment, or none where nothing moves, unless its rows have to be taken one by one.
        segments = tl.where(src_slot == dst_slot, 0, 1).to(tl.int64)
        by_rows = False
        if width > 0:
            inputs = tl.maximum(width - token_bias, 0)
            idle = ((src_slot == dst_slot) & (token_bias == 0)) | (inputs == 0)
            if CONV_STATE_DIM_FIRST:
                by_rows = ((token_bias > 0) | (row_stride != size)) & (inputs > 0) & (idle == 0)
                segments = tl.where(idle, 0, 1).to(tl.int64)
                size *= rows
            else:
                source += token_bias * row_stride
                segments = tl.where(idle, 0, inputs)
                if (row_stride == size) & (src_slot != dst_slot):
                    size *= segments
                    segments = tl.minimum(segments, 1)
        if by_rows:
            if CONV_STATE_DIM_FIRST:
                source += token_bias * element
                row_bytes = (width - token_bias) * element
                shifted = (source, destination, rows, row_bytes, row_stride, tile, num_tiles)
                if (element | row_stride) & 1 == 0:
                    _shift_rows(shifted, 2, WINDOW)
                else:
                    _shift_rows(shifted, 1, WINDOW)
        else:
            copied = (source, destination, segments, size, row_stride, tile, num_tiles)
            unaligned = source | destination | tl.where(segments > 1, row_stride, 0)
            if unaligned & 15 == 0:
                _copy_segments(copied, 16, ACCESSES)
            elif unaligned & 3 == 0:
                _copy_segments(copied, 4, ACCESSES)
            else:
                _copy_segments(copied, 1, ACCESSES)


@triton.jit
def _load_record(state_records_ptr, state_idx):
    """The numbers of one `StateRecord`, in its order."""
    record = state_records_ptr + state_idx * RECORD_NUMBERS
    numbers = ()
    for place in tl.static_range(RECORD_NUMBERS):
        numbers = numbers + (tl.load(record + place),)
    return numbers


@triton.jit
def _copy_segments(copied, ALIGN: tl.constexpr, ACCESSES: tl.constexpr):
    """This tile's bytes of equally long segments, the first segment first.

    `copied` is (source address, destination address, number of segments, bytes of one segment, stride between
    segments in bytes, tile, number of tiles). Source and destination may overlap, the destination being the
    lower one: a destination segment then is the source of an earlier segment. Every program copies the same
    bytes of all segments, so it has read them before it overwrites them.
    """
    source, destination, segments, size, stride, tile, num_tiles = copied
    pieces = tl.cdiv(size, ACCESSES * ALIGN)
    for turn in range(tl.cdiv(pieces - tile, num_tiles)):
        piece = tile + turn * num_tiles
        for segment in range(segments):
            shift = segment * stride
            copy_tile(source + shift, destination + shift, piece, pieces, size, ALIGN, ALIGN > 1, ACCESSES)
            if segments > 1:
                tl.debug_barrier()  # other threads' loads and stores of the next segment


@triton.jit
def _shift_rows(shifted, ALIGN: tl.constexpr, WINDOW: tl.constexpr):
    """This tile's share of rows whose source and destination may overlap.

    `shifted` is (source address, destination address, number of rows, bytes of one row, stride between rows
    in bytes, tile, number of tiles).
    """
    source, destination, num_rows, row_bytes, stride, tile, num_tiles = shifted
    word: tl.constexpr = tl.int16 if ALIGN == 2 else tl.int8
    WORDS: tl.constexpr = WINDOW // ALIGN
    ROWS: tl.constexpr = 1024 // WORDS if WORDS < 1024 else 1
    source_words = source.to(tl.pointer_type(word))
    destination_words = destination.to(tl.pointer_type(word))
    place = tl.arange(0, WORDS)[None, :]
    for first in range(tile * ROWS, num_rows.to(tl.int32), num_tiles * ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        inside = (row < num_rows) & (place < row_bytes // ALIGN)
        offset = row * (stride // ALIGN) + place
        moved = tl.load(source_words + offset, mask=inside)
        tl.debug_barrier()  # what is stored below may be what other threads load above
        tl.store(destination_words + offset, moved, mask=inside)


@triton.jit(do_not_specialize=_UNSPECIALISED)
def precopy_mamba_align_fused_kernel(
    # Pointers
    mamba_state_idx_ptr, src_col_ptr, token_bias_ptr,
    # Dimensions
    num_reqs: tl.int32,
    # Layout
    block_table_ptrs_ptr, block_table_stride_req: tl.int64, block_table_columns: tl.int64,
    state_records_ptr, num_states: tl.int32, num_tiles: tl.int32,
    # Meta-parameters
    COPY_BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, CONV_STATE_DIM_FIRST: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Copy the states of rows that have a source column other than the running column."""
    layout = (
        block_table_ptrs_ptr, block_table_stride_req, block_table_columns,
        state_records_ptr, num_states, num_tiles,
    )  # fmt: skip
    for first in range(0, num_reqs, GROUP):
        rows = first + tl.arange(0, GROUP)
        is_request = rows < num_reqs
        src_cols = tl.load(src_col_ptr + rows, mask=is_request, other=-1).to(tl.int32)
        dst_cols = tl.load(mamba_state_idx_ptr + rows, mask=is_request, other=-1).to(tl.int32)
        biases = tl.load(token_bias_ptr + rows, mask=is_request, other=0).to(tl.int32)
        moves = is_request & (src_cols >= 0) & (src_cols != dst_cols)
        copy_rows(
            moves, rows, src_cols, dst_cols, biases, layout, COPY_BLOCK_SIZE, WINDOW, CONV_STATE_DIM_FIRST
        )


@triton.jit(do_not_specialize=[*_UNSPECIALISED, "block_size"])
def postprocess_mamba_fused_kernel(
    # Pointers
    num_accepted_tokens_ptr, mamba_state_idx_ptr, num_scheduled_tokens_ptr, num_computed_tokens_ptr,
    num_draft_tokens_ptr, num_accepted_tokens_out_ptr,
    # Dimensions
    num_reqs: tl.int32, block_size: tl.int32,
    # Layout
    block_table_ptrs_ptr, block_table_stride_req: tl.int64, block_table_columns: tl.int64,
    state_records_ptr, num_states: tl.int32, num_tiles: tl.int32,
    # Meta-parameters
    COPY_BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, CONV_STATE_DIM_FIRST: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Copy the states of rows whose accepted tokens reached a boundary; program 0 writes the counts."""
    layout = (
        block_table_ptrs_ptr, block_table_stride_req, block_table_columns,
        state_records_ptr, num_states, num_tiles,
    )  # fmt: skip
    for first in range(0, num_reqs, GROUP):
        rows = first + tl.arange(0, GROUP)
        is_request = rows < num_reqs
        accepted = tl.load(num_accepted_tokens_ptr + rows, mask=is_request, other=0).to(tl.int32)
        columns = tl.load(mamba_state_idx_ptr + rows, mask=is_request, other=-1).to(tl.int32)
        computed = tl.load(num_computed_tokens_ptr + rows, mask=is_request, other=0).to(tl.int32)
        scheduled = tl.load(num_scheduled_tokens_ptr + rows, mask=is_request, other=0).to(tl.int32)
        drafted = tl.load(num_draft_tokens_ptr + rows, mask=is_request, other=0).to(tl.int32)
        computed += scheduled - drafted + accepted - 1
        # Rounds towards zero where the rule rounds down; `reached` excludes negative quotients.
        boundaries = computed // block_size * block_size
        biases = boundaries - (computed - accepted + 1)
        dst_cols = boundaries // block_size - 1
        reached = is_request & (columns >= 0) & (accepted > 0) & (boundaries > 0) & (biases >= 0)
        in_place = dst_cols == columns
        if tl.program_id(0) == 0:
            tl.store(num_accepted_tokens_out_ptr + rows, 1, mask=reached & in_place)
        moves = reached & ((biases > 0) | (dst_cols != columns))
        copy_rows(
            moves, rows, columns, dst_cols, biases, layout, COPY_BLOCK_SIZE, WINDOW, CONV_STATE_DIM_FIRST
        )


def precopy_align(layout: AlignLayout, columns: Tensor, sources: Tensor, biases: Tensor) -> None:
    """`align_reference.precopy_align` in one launch; does not synchronise."""
    _launch(precopy_mamba_align_fused_kernel, layout, len(columns), columns, sources, biases, len(columns))


def postprocess_align(
    layout: AlignLayout, num_accepted: Tensor, columns: Tensor, num_computed: Tensor, num_scheduled: Tensor,
    num_drafted: Tensor, block_size_tokens: int,
) -> None:  # fmt: skip
    """`align_reference.postprocess_align` in one launch, on a copy of the counts, which all programs see."""
    _launch(
        postprocess_mamba_fused_kernel, layout, len(columns), num_accepted.clone(), columns, num_scheduled,
        num_computed, num_drafted, num_accepted, len(columns), block_size_tokens,
    )  # fmt: skip


def _launch(kernel: Any, layout: AlignLayout, num_reqs: int, *arguments: Any) -> None:
    tables, num_states = layout.block_tables[0], len(layout.states)
    num_tiles = max(1, min(TILES, ceil_div(layout.max_state_bytes, COPY_BYTES)))
    programs = min(PROGRAMS, num_reqs * num_states * num_tiles)
    if programs:
        kernel[(programs,)](
            *arguments,
            layout.table_addresses, tables.stride(0), tables.shape[1],
            layout.state_records, num_states, num_tiles,
            COPY_BLOCK_SIZE=COPY_BYTES, WINDOW=triton.next_power_of_2(max(layout.max_window_bytes, 2)),
            CONV_STATE_DIM_FIRST=layout.conv_dim_first, GROUP=GROUP, num_warps=NUM_WARPS, num_stages=1,
        )  # fmt: skip
