"""Align mode on the device: columns advance and states move without the host knowing the accepted counts.

`align_reference` has the same launchers in plain torch, and says what they do. Three launches a step at most:

    preprocess   where each state is, and the columns of this step; one lane a row
    precopy      states to their new columns, for kernels that cannot read elsewhere than they write
    postprocess  the boundary that the accepted tokens reached; decides and copies

States move as bits, in 16-byte accesses where addresses and row strides are multiples of 16. The grid of the
two that copy is bounded, as in `fused_state_copy`: programs rank the rows that have a copy and take their
tiles in turn, so a step in which no row crosses a boundary, nearly every one, costs a launch whose programs
read the rows' numbers and leave. (One program for each row, state and tile would start 200,000 of them.)
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .align_layout import AlignLayout
from .specialisation import Specialisation
from .state_move import PROGRAMS
from .state_move_kernels import copy_tile

COPY_BYTES = 16384
"""Of a chunk: 1024 accesses of 16 bytes, 8 independent ones for each thread."""
TILES = 64
"""Programs that share one state at most."""
GROUP = 128
"""Batch rows that a program ranks at once."""
NUM_WARPS = 4
_LANES = 128
"""Rows that a program of the preprocessing has."""
LAYOUT_ARGUMENTS = (
    *("block_table_ptrs_ptr", "block_table_stride_req", "block_table_columns"),
    *("state_base_addrs_ptr", "state_block_strides_ptr", "state_elem_sizes_ptr", "state_inner_sizes_ptr"),
    *("state_conv_widths_ptr", "state_group_indices_ptr", "state_dim_row_count_ptr"),
    *("state_dim_row_stride_ptr", "state_slot_counts_ptr", "num_states", "num_tiles"),
    *("COPY_BLOCK_SIZE", "WINDOW", "CONV_STATE_DIM_FIRST"),
)
"""What an `AlignLayout` is to a kernel, in the kernels' order."""
_NUMBERS = ["block_table_stride_req", "block_table_columns", "num_states", "num_tiles", "num_reqs"]


@triton.jit
def preprocess_mamba_align_fused_kernel(
    # Pointers
    idx_mapping_ptr,
    state_idx_ptr,
    num_computed_tokens_ptr,
    query_start_loc_ptr,
    num_accepted_tokens_ptr,
    src_col_ptr,
    src_off_ptr,
    # Dimensions
    num_reqs,
    # Meta-parameters
    BLOCK_SIZE: tl.constexpr,
    MAMBA_BLOCK_SIZE: tl.constexpr,
):
    """One lane a batch row; it alone reads and writes its request's numbers."""
    batch = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    inside = batch < num_reqs
    rows = tl.load(idx_mapping_ptr + batch, mask=inside, other=-1).to(tl.int64)
    known = inside & (rows >= 0)
    column = tl.load(state_idx_ptr + rows, mask=known, other=-2).to(tl.int64)
    accepted = tl.load(num_accepted_tokens_ptr + rows, mask=known, other=1).to(tl.int64)
    tl.store(src_col_ptr + rows, column, mask=known)
    tl.store(src_off_ptr + rows, tl.maximum(accepted - 1, 0), mask=known)
    begin = tl.load(query_start_loc_ptr + batch, mask=known, other=0).to(tl.int64)
    end = tl.load(query_start_loc_ptr + batch + 1, mask=known, other=0).to(tl.int64)
    after = tl.load(num_computed_tokens_ptr + rows, mask=known, other=0).to(tl.int64) + end - begin
    running = (after + MAMBA_BLOCK_SIZE - 1) // MAMBA_BLOCK_SIZE - 1
    tl.store(state_idx_ptr + rows, running, mask=known & (column >= -1))
    tl.store(num_accepted_tokens_ptr + rows, 1, mask=known & (column >= 0) & (column != running))


@triton.jit
def _copy_segments(
    # Pointers, as addresses
    source,
    destination,
    # Dimensions
    segments,
    size,
    tile,
    num_tiles,
    # Strides in bytes
    stride,
    # Meta-parameters
    ALIGN: tl.constexpr,
    ACCESSES: tl.constexpr,
):
    """This tile's bytes of `segments` stretches of `size`, the first one first.

    A segment may be the destination of a later one: all are of one state, and a program has the same bytes of
    each.
    """
    chunks = tl.cdiv(size, ACCESSES * ALIGN)
    for turn in range(tl.cdiv(chunks - tile, num_tiles)):
        chunk = tile + turn * num_tiles
        for segment in range(segments):
            copy_tile(
                source + segment * stride,
                destination + segment * stride,
                chunk,
                chunks,
                size,
                ALIGN,
                ALIGN > 1,
                True,
                ACCESSES,
            )
            if segments > 1:
                tl.debug_barrier()  # other threads' loads and stores of the next segment


@triton.jit
def _shift_rows(
    # Pointers, as addresses
    source,
    destination,
    # Dimensions
    rows,
    kept,
    tile,
    num_tiles,
    # Strides in bytes
    stride,
    # Meta-parameters
    ALIGN: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """This tile's share of `rows` rows of `kept` bytes; source and destination rows may overlap."""
    word: tl.constexpr = tl.int16 if ALIGN == 2 else tl.int8
    WORDS: tl.constexpr = WINDOW // ALIGN
    ROWS: tl.constexpr = 1024 // WORDS if WORDS < 1024 else 1
    of = source.to(tl.pointer_type(word))
    to = destination.to(tl.pointer_type(word))
    place = tl.arange(0, WORDS)[None, :]
    for first in range(tile * ROWS, rows.to(tl.int32), num_tiles * ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (place < kept // ALIGN)
        at = row * (stride // ALIGN) + place
        moved = tl.load(of + at, mask=inside)
        tl.debug_barrier()  # what is stored below may be what other threads load above
        tl.store(to + at, moved, mask=inside)


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
    block_table_ptrs_ptr,
    block_table_stride_req,
    block_table_columns,
    state_base_addrs_ptr,
    state_block_strides_ptr,
    state_elem_sizes_ptr,
    state_inner_sizes_ptr,
    state_conv_widths_ptr,
    state_group_indices_ptr,
    state_dim_row_count_ptr,
    state_dim_row_stride_ptr,
    state_slot_counts_ptr,
    num_tiles,
    # Meta-parameters
    COPY_BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CONV_STATE_DIM_FIRST: tl.constexpr,
):
    """Tile `tile` of one state of one request row, from column to column; nothing if one is out of range."""
    ACCESSES: tl.constexpr = COPY_BLOCK_SIZE // 16
    width = tl.load(state_conv_widths_ptr + state_idx)
    src_col = tl.where(width > 0, src_col, src_col + token_bias)
    in_table = (src_col >= 0) & (src_col < block_table_columns) & (dst_col >= 0)
    in_table = in_table & (dst_col < block_table_columns) & (token_bias >= 0)
    group = tl.load(state_group_indices_ptr + state_idx)
    table = tl.load(block_table_ptrs_ptr + group).to(tl.pointer_type(tl.int32))
    table += bt_row_idx * block_table_stride_req
    of = tl.load(table + src_col, mask=in_table, other=-1).to(tl.int64)
    to = tl.load(table + dst_col, mask=in_table, other=-1).to(tl.int64)
    slots = tl.load(state_slot_counts_ptr + state_idx)
    if (of >= 0) & (of < slots) & (to >= 0) & (to < slots):
        base = tl.load(state_base_addrs_ptr + state_idx)
        slot_stride = tl.load(state_block_strides_ptr + state_idx)
        element = tl.load(state_elem_sizes_ptr + state_idx)
        size = tl.load(state_inner_sizes_ptr + state_idx) * element
        rows = tl.load(state_dim_row_count_ptr + state_idx)
        row_stride = tl.load(state_dim_row_stride_ptr + state_idx)
        source = base + of * slot_stride
        destination = base + to * slot_stride
        # A state is one segment, or none where nothing moves, unless its rows have to be taken one by one.
        segments = tl.where(of == to, 0, 1).to(tl.int64)
        by_rows = False
        if width > 0:
            kept = tl.maximum(width - token_bias, 0)
            idle = ((of == to) & (token_bias == 0)) | (kept == 0)
            if CONV_STATE_DIM_FIRST:
                by_rows = ((token_bias > 0) | (row_stride != size)) & (kept > 0) & (idle == 0)
                segments = tl.where(idle, 0, 1).to(tl.int64)
                size *= rows
            else:
                source += token_bias * row_stride
                segments = tl.where(idle, 0, kept)
                if (row_stride == size) & (of != to):
                    size *= segments
                    segments = tl.minimum(segments, 1)
        if by_rows:
            if CONV_STATE_DIM_FIRST:
                source += token_bias * element
                kept = (width - token_bias) * element
                if (element | row_stride) & 1 == 0:
                    _shift_rows(source, destination, rows, kept, tile, num_tiles, row_stride, 2, WINDOW)
                else:
                    _shift_rows(source, destination, rows, kept, tile, num_tiles, row_stride, 1, WINDOW)
        else:
            unaligned = source | destination | tl.where(segments > 1, row_stride, 0)
            if unaligned & 15 == 0:
                _copy_segments(source, destination, segments, size, tile, num_tiles, row_stride, 16, ACCESSES)
            elif unaligned & 3 == 0:
                _copy_segments(source, destination, segments, size, tile, num_tiles, row_stride, 4, ACCESSES)
            else:
                _copy_segments(source, destination, segments, size, tile, num_tiles, row_stride, 1, ACCESSES)


@triton.jit
def _copy_rows(
    # Batch rows: [GROUP]
    live,
    rows,
    src_cols,
    dst_cols,
    biases,
    # Layout
    block_table_ptrs_ptr,
    block_table_stride_req,
    block_table_columns,
    state_base_addrs_ptr,
    state_block_strides_ptr,
    state_elem_sizes_ptr,
    state_inner_sizes_ptr,
    state_conv_widths_ptr,
    state_group_indices_ptr,
    state_dim_row_count_ptr,
    state_dim_row_stride_ptr,
    state_slot_counts_ptr,
    num_states,
    num_tiles,
    # Meta-parameters
    COPY_BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CONV_STATE_DIM_FIRST: tl.constexpr,
):
    """This program's share of the copies of the `live` ones of up to GROUP rows."""
    live_rows = tl.sum(live.to(tl.int32), 0)
    if live_rows > 0:
        rank = tl.where(live, tl.cumsum(live.to(tl.int32), 0) - 1, -1)
        items_a_row = num_states * num_tiles
        for item in range(tl.program_id(0), live_rows * items_a_row, tl.num_programs(0)):
            this = rank == item // items_a_row
            _copy_mamba_state_block(
                item % items_a_row // num_tiles,
                tl.sum(tl.where(this, rows, 0), 0).to(tl.int64),
                tl.sum(tl.where(this, src_cols, 0), 0),
                tl.sum(tl.where(this, dst_cols, 0), 0),
                tl.sum(tl.where(this, biases, 0), 0),
                item % num_tiles,
                block_table_ptrs_ptr,
                block_table_stride_req,
                block_table_columns,
                state_base_addrs_ptr,
                state_block_strides_ptr,
                state_elem_sizes_ptr,
                state_inner_sizes_ptr,
                state_conv_widths_ptr,
                state_group_indices_ptr,
                state_dim_row_count_ptr,
                state_dim_row_stride_ptr,
                state_slot_counts_ptr,
                num_tiles,
                COPY_BLOCK_SIZE,
                WINDOW,
                CONV_STATE_DIM_FIRST,
            )


@triton.jit(do_not_specialize=_NUMBERS)
def precopy_mamba_align_fused_kernel(
    # Pointers
    mamba_state_idx_ptr,
    src_col_ptr,
    token_bias_ptr,
    idx_mapping_ptr,
    # Dimensions
    num_reqs: tl.int32,
    # Layout
    block_table_ptrs_ptr,
    block_table_stride_req: tl.int64,
    block_table_columns: tl.int64,
    state_base_addrs_ptr,
    state_block_strides_ptr,
    state_elem_sizes_ptr,
    state_inner_sizes_ptr,
    state_conv_widths_ptr,
    state_group_indices_ptr,
    state_dim_row_count_ptr,
    state_dim_row_stride_ptr,
    state_slot_counts_ptr,
    num_states: tl.int32,
    num_tiles: tl.int32,
    # Meta-parameters
    COPY_BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CONV_STATE_DIM_FIRST: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Rows whose source column is one, and not the running one."""
    for first in range(0, num_reqs, GROUP):
        batch = first + tl.arange(0, GROUP)
        rows = batch
        if idx_mapping_ptr is not None:
            rows = tl.load(idx_mapping_ptr + batch, mask=batch < num_reqs, other=-1).to(tl.int32)
        known = (batch < num_reqs) & (rows >= 0)
        src_cols = tl.load(src_col_ptr + rows, mask=known, other=-1).to(tl.int32)
        dst_cols = tl.load(mamba_state_idx_ptr + rows, mask=known, other=-1).to(tl.int32)
        biases = tl.load(token_bias_ptr + rows, mask=known, other=0).to(tl.int32)
        _copy_rows(
            known & (src_cols >= 0) & (src_cols != dst_cols),
            rows,
            src_cols,
            dst_cols,
            biases,
            block_table_ptrs_ptr,
            block_table_stride_req,
            block_table_columns,
            state_base_addrs_ptr,
            state_block_strides_ptr,
            state_elem_sizes_ptr,
            state_inner_sizes_ptr,
            state_conv_widths_ptr,
            state_group_indices_ptr,
            state_dim_row_count_ptr,
            state_dim_row_stride_ptr,
            state_slot_counts_ptr,
            num_states,
            num_tiles,
            COPY_BLOCK_SIZE,
            WINDOW,
            CONV_STATE_DIM_FIRST,
        )


@triton.jit(do_not_specialize=[*_NUMBERS, "block_size"])
def postprocess_mamba_fused_kernel(
    # Pointers
    num_accepted_tokens_ptr,
    mamba_state_idx_ptr,
    num_scheduled_tokens_ptr,
    num_computed_tokens_ptr,
    num_draft_tokens_ptr,
    num_accepted_tokens_out_ptr,
    idx_mapping_ptr,
    # Dimensions
    num_reqs: tl.int32,
    block_size: tl.int32,
    # Layout
    block_table_ptrs_ptr,
    block_table_stride_req: tl.int64,
    block_table_columns: tl.int64,
    state_base_addrs_ptr,
    state_block_strides_ptr,
    state_elem_sizes_ptr,
    state_inner_sizes_ptr,
    state_conv_widths_ptr,
    state_group_indices_ptr,
    state_dim_row_count_ptr,
    state_dim_row_stride_ptr,
    state_slot_counts_ptr,
    num_states: tl.int32,
    num_tiles: tl.int32,
    # Meta-parameters
    COPY_BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CONV_STATE_DIM_FIRST: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_IDX_MAPPING: tl.constexpr = False,
    PRECOMPUTED_NEW_COMPUTED: tl.constexpr = False,
):
    """Rows whose accepted tokens reached a boundary. The first program writes the output counts."""
    for first in range(0, num_reqs, GROUP):
        batch = first + tl.arange(0, GROUP)
        rows = batch
        if HAS_IDX_MAPPING:
            rows = tl.load(idx_mapping_ptr + batch, mask=batch < num_reqs, other=-1).to(tl.int32)
        known = (batch < num_reqs) & (rows >= 0)
        accepted = tl.load(num_accepted_tokens_ptr + rows, mask=known, other=0).to(tl.int32)
        columns = tl.load(mamba_state_idx_ptr + rows, mask=known, other=-1).to(tl.int32)
        computed = tl.load(num_computed_tokens_ptr + rows, mask=known, other=0).to(tl.int32)
        if not PRECOMPUTED_NEW_COMPUTED:
            scheduled = tl.load(num_scheduled_tokens_ptr + rows, mask=known, other=0).to(tl.int32)
            drafted = tl.load(num_draft_tokens_ptr + rows, mask=known, other=0).to(tl.int32)
            computed += scheduled - drafted + accepted - 1
        # Division rounds towards zero; no row with a negative quotient is live.
        boundaries = computed // block_size * block_size
        biases = boundaries - (computed - accepted + 1)
        dst_cols = boundaries // block_size - 1
        reached = known & (columns >= 0) & (accepted > 0) & (boundaries > 0) & (biases >= 0)
        in_place = dst_cols == columns
        if tl.program_id(0) == 0:
            tl.store(num_accepted_tokens_out_ptr + rows, 1, mask=reached & in_place)
        _copy_rows(
            reached & ((biases > 0) | (dst_cols != columns)),
            rows,
            columns,
            dst_cols,
            biases,
            block_table_ptrs_ptr,
            block_table_stride_req,
            block_table_columns,
            state_base_addrs_ptr,
            state_block_strides_ptr,
            state_elem_sizes_ptr,
            state_inner_sizes_ptr,
            state_conv_widths_ptr,
            state_group_indices_ptr,
            state_dim_row_count_ptr,
            state_dim_row_stride_ptr,
            state_slot_counts_ptr,
            num_states,
            num_tiles,
            COPY_BLOCK_SIZE,
            WINDOW,
            CONV_STATE_DIM_FIRST,
        )


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
    """`align_reference.preprocess_align` in one launch; does not synchronise."""
    if num_reqs:
        preprocess_mamba_align_fused_kernel[(triton.cdiv(num_reqs, _LANES),)](
            idx_mapping, state_idx, num_computed, query_start_loc, num_accepted, src_col, src_off, num_reqs,
            BLOCK_SIZE=_LANES, MAMBA_BLOCK_SIZE=block_size_tokens, num_warps=NUM_WARPS,
        )  # fmt: skip


def precopy_align(
    layout: AlignLayout,
    state_idx: Tensor,
    src_col: Tensor,
    token_bias: Tensor,
    idx_mapping: Tensor | None,
    num_reqs: int,
) -> None:
    """`align_reference.precopy_align` in one launch; does not synchronise."""
    if num_reqs:
        arguments = layout_arguments(layout)
        precopy_mamba_align_fused_kernel[_grid(num_reqs, arguments)](
            state_idx, src_col, token_bias, idx_mapping, num_reqs,
            **arguments, GROUP=GROUP, num_warps=NUM_WARPS, num_stages=1,
        )  # fmt: skip


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
    """`align_reference.postprocess_align` in one launch; does not synchronise.

    ValueError where the counts are to be written over those that are read.
    """
    if num_accepted_out.data_ptr() == num_accepted.data_ptr():
        raise ValueError("num_accepted_out is num_accepted; accepted: other memory, filled with the same")
    if num_reqs:
        arguments = layout_arguments(layout)
        postprocess_mamba_fused_kernel[_grid(num_reqs, arguments)](
            num_accepted, state_idx, num_scheduled, num_computed, num_drafted, num_accepted_out, idx_mapping,
            num_reqs, block_size_tokens, **arguments, GROUP=GROUP, HAS_IDX_MAPPING=idx_mapping is not None,
            PRECOMPUTED_NEW_COMPUTED=num_scheduled is None, num_warps=NUM_WARPS, num_stages=1,
        )  # fmt: skip


def layout_arguments(layout: AlignLayout) -> dict[str, Any]:
    """What a layout is to a kernel, by name."""
    tables = layout.block_tables[0]
    values = (
        layout.table_addresses,
        tables.stride(0),
        tables.shape[1],
        layout.base_addresses,
        layout.slot_strides,
        layout.element_sizes,
        layout.inner_sizes,
        layout.conv_widths,
        layout.groups,
        layout.row_counts,
        layout.row_strides,
        layout.slot_counts,
        len(layout.states),
        max(1, min(TILES, -(-layout.most_bytes // COPY_BYTES))),
        COPY_BYTES,
        triton.next_power_of_2(max(layout.widest_window, 2)),
        layout.conv_dim_first,
    )
    return dict(zip(LAYOUT_ARGUMENTS, values, strict=True))


def _grid(num_reqs: int, arguments: dict[str, Any]) -> tuple[int]:
    return (min(PROGRAMS, num_reqs * arguments["num_states"] * arguments["num_tiles"]),)


def hopper_specialisations() -> list[Specialisation]:
    """Both conv layouts, both forms of the postprocessing, four draft tokens."""
    vectors = [name for name in LAYOUT_ARGUMENTS if name.endswith("_ptr")]
    layout: dict[str, str] = dict.fromkeys(vectors, "*i64")
    layout |= {"block_table_stride_req": "i64", "block_table_columns": "i64"}
    layout |= {"num_states": "i32", "num_tiles": "i32", "num_reqs": "i32"}
    preprocessing = (
        *("idx_mapping", "state_idx", "num_computed_tokens", "query_start_loc"),
        *("num_accepted_tokens", "src_col", "src_off"),
    )
    found = [
        Specialisation(
            "preprocess_mamba_align",
            preprocess_mamba_align_fused_kernel,
            {f"{name}_ptr": "*i32" for name in preprocessing} | {"num_reqs": "i32"},
            {"BLOCK_SIZE": _LANES, "MAMBA_BLOCK_SIZE": 512},
            num_warps=NUM_WARPS,
        )
    ]
    for dim_first in (True, False):
        order = "dim, window" if dim_first else "window, dim"
        constants: dict[str, Any] = {"COPY_BLOCK_SIZE": COPY_BYTES, "WINDOW": 16, "GROUP": GROUP}
        constants["CONV_STATE_DIM_FIRST"] = dim_first
        columns = ("mamba_state_idx_ptr", "src_col_ptr", "token_bias_ptr", "idx_mapping_ptr")
        found.append(
            Specialisation(
                f"precopy_mamba_align [{order}]",
                precopy_mamba_align_fused_kernel,
                layout | dict.fromkeys(columns, "*i32"),
                constants,
                num_warps=NUM_WARPS,
                num_stages=1,
                wide=("load", "store"),
            )
        )
        counts = (
            *("num_accepted_tokens_ptr", "mamba_state_idx_ptr"),
            *("num_computed_tokens_ptr", "num_accepted_tokens_out_ptr"),
        )
        of_step = ("num_scheduled_tokens_ptr", "num_draft_tokens_ptr")
        for precomputed in (True, False):
            given = ("idx_mapping_ptr",) if precomputed else of_step
            absent = of_step if precomputed else ("idx_mapping_ptr",)
            found.append(
                Specialisation(
                    f"postprocess_mamba [{order}], given {'the new' if precomputed else 'scheduled'}",
                    postprocess_mamba_fused_kernel,
                    layout | {"block_size": "i32"} | dict.fromkeys((*counts, *given), "*i32"),
                    constants
                    | dict.fromkeys(absent)
                    | {"HAS_IDX_MAPPING": precomputed, "PRECOMPUTED_NEW_COMPUTED": precomputed},
                    num_warps=NUM_WARPS,
                    num_stages=1,
                    wide=("load", "store"),
                )
            )
    return found
