"""Copies of states between columns, as bytes: the device functions that the align kernels share.

The kernels in `align` decide which state goes where. The functions here only move bytes: a state crosses in
16-byte accesses where addresses and row strides are multiples of 16, and in narrower ones elsewhere. A
`layout` argument is the tuple (block_table_ptrs_ptr, block_table_stride_req, block_table_columns,
state_records_ptr, num_states, num_tiles).
"""

import triton
import triton.language as tl

from ...inference.kernels.state_move_kernels import copy_tile
from .align_layout import StateRecord

RECORD_NUMBERS = tl.constexpr(len(StateRecord._fields))


@triton.jit
def copy_rows(
    # Batch rows: [GROUP]
    has_copy,
    rows,
    src_cols,
    dst_cols,
    biases,
    # Layout
    layout,
    # Meta-parameters
    COPY_BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CONV_STATE_DIM_FIRST: tl.constexpr,
):
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
                item % num_tiles,
                layout,
                COPY_BLOCK_SIZE,
                WINDOW,
                CONV_STATE_DIM_FIRST,
            )


@triton.jit
def _copy_mamba_state_block(
    # Which copy
    state_idx,
    bt_row_idx,
    src_col,
    dst_col,
    token_bias,
    tile,
    # Layout
    layout,
    # Meta-parameters
    COPY_BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CONV_STATE_DIM_FIRST: tl.constexpr,
):
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
    return (
        tl.load(record),
        tl.load(record + 1),
        tl.load(record + 2),
        tl.load(record + 3),
        tl.load(record + 4),
        tl.load(record + 5),
        tl.load(record + 6),
        tl.load(record + 7),
        tl.load(record + 8),
    )


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
            copy_tile(
                source + shift, destination + shift, piece, pieces, size, ALIGN, ALIGN > 1, True, ACCESSES
            )
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
