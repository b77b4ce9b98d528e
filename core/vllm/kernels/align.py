"""The align kernels: columns advance and states move on the device, which alone knows the accepted counts.

`align_reference` has the same launchers in plain torch and documents their arguments. A step has at most
three launches:

    preprocess   finds where each state is and advances the columns; one lane per row
    precopy      copies states to their new columns, for models that update a state in place
    postprocess  finds the boundary that the accepted tokens reached, and copies its state there

Precopy and postprocess have a bounded grid: each program ranks the rows that need a copy and takes every
n-th tile of these copies. A step in which no row crosses a boundary, which is nearly every step, costs one
launch whose programs read the rows' numbers and exit. One program for each row, state and tile would start
200,000 of them.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...inference.kernels.state_move import PROGRAMS
from .align_layout import AlignLayout
from .state_block_copy import copy_rows

COPY_BYTES = 16384
"""Bytes of one tile: 1024 accesses of 16 bytes, 8 independent ones for each thread."""
TILES = 64
"""Most programs that share one state."""
GROUP = 128
"""Batch rows that a program ranks at once."""
LANES = 128
"""Batch rows of one program of the preprocessing."""
NUM_WARPS = 4
LAYOUT_NUMBERS = ("block_table_stride_req", "block_table_columns", "num_states", "num_tiles")
"""What a launch says of a layout besides its pointers and meta-parameters."""
_UNSPECIALISED = [*LAYOUT_NUMBERS, "num_reqs"]
"""Arguments whose values never cause a compilation: the kernels know only their types."""


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
    """One lane per batch row; no other lane reads or writes the numbers of that row's request."""
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


@triton.jit(do_not_specialize=_UNSPECIALISED)
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
    state_records_ptr,
    num_states: tl.int32,
    num_tiles: tl.int32,
    # Meta-parameters
    COPY_BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CONV_STATE_DIM_FIRST: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Copy the states of rows that have a source column other than the running column."""
    layout = (
        block_table_ptrs_ptr, block_table_stride_req, block_table_columns,
        state_records_ptr, num_states, num_tiles,
    )  # fmt: skip
    for first in range(0, num_reqs, GROUP):
        batch = first + tl.arange(0, GROUP)
        rows = batch
        if idx_mapping_ptr is not None:
            rows = tl.load(idx_mapping_ptr + batch, mask=batch < num_reqs, other=-1).to(tl.int32)
        known = (batch < num_reqs) & (rows >= 0)
        src_cols = tl.load(src_col_ptr + rows, mask=known, other=-1).to(tl.int32)
        dst_cols = tl.load(mamba_state_idx_ptr + rows, mask=known, other=-1).to(tl.int32)
        biases = tl.load(token_bias_ptr + rows, mask=known, other=0).to(tl.int32)
        moves = known & (src_cols >= 0) & (src_cols != dst_cols)
        copy_rows(
            moves, rows, src_cols, dst_cols, biases, layout, COPY_BLOCK_SIZE, WINDOW, CONV_STATE_DIM_FIRST
        )


@triton.jit(do_not_specialize=[*_UNSPECIALISED, "block_size"])
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
    state_records_ptr,
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
    """Copy the states of rows whose accepted tokens reached a boundary; program 0 writes the counts."""
    layout = (
        block_table_ptrs_ptr, block_table_stride_req, block_table_columns,
        state_records_ptr, num_states, num_tiles,
    )  # fmt: skip
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
        # Rounds towards zero where the rule rounds down; `reached` excludes negative quotients.
        boundaries = computed // block_size * block_size
        biases = boundaries - (computed - accepted + 1)
        dst_cols = boundaries // block_size - 1
        reached = known & (columns >= 0) & (accepted > 0) & (boundaries > 0) & (biases >= 0)
        in_place = dst_cols == columns
        if tl.program_id(0) == 0:
            tl.store(num_accepted_tokens_out_ptr + rows, 1, mask=reached & in_place)
        moves = reached & ((biases > 0) | (dst_cols != columns))
        copy_rows(
            moves, rows, columns, dst_cols, biases, layout, COPY_BLOCK_SIZE, WINDOW, CONV_STATE_DIM_FIRST
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
        preprocess_mamba_align_fused_kernel[(triton.cdiv(num_reqs, LANES),)](
            idx_mapping, state_idx, num_computed, query_start_loc, num_accepted, src_col, src_off, num_reqs,
            BLOCK_SIZE=LANES, MAMBA_BLOCK_SIZE=block_size_tokens, num_warps=NUM_WARPS,
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
        arguments = _layout_arguments(layout)
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

    Raises:
        ValueError: `num_accepted_out` is the memory of `num_accepted`, which other programs still read.
    """
    if num_accepted_out.data_ptr() == num_accepted.data_ptr():
        raise ValueError("num_accepted_out is num_accepted; accepted: other memory, filled with the same")
    if num_reqs:
        arguments = _layout_arguments(layout)
        postprocess_mamba_fused_kernel[_grid(num_reqs, arguments)](
            num_accepted, state_idx, num_scheduled, num_computed, num_drafted, num_accepted_out, idx_mapping,
            num_reqs, block_size_tokens, **arguments, GROUP=GROUP, HAS_IDX_MAPPING=idx_mapping is not None,
            PRECOMPUTED_NEW_COMPUTED=num_scheduled is None, num_warps=NUM_WARPS, num_stages=1,
        )  # fmt: skip


def _layout_arguments(layout: AlignLayout) -> dict[str, Any]:
    tables = layout.block_tables[0]
    return {
        "block_table_ptrs_ptr": layout.table_addresses,
        "block_table_stride_req": tables.stride(0),
        "block_table_columns": tables.shape[1],
        "state_records_ptr": layout.state_records,
        "num_states": len(layout.states),
        "num_tiles": max(1, min(TILES, -(-layout.max_state_bytes // COPY_BYTES))),
        "COPY_BLOCK_SIZE": COPY_BYTES,
        "WINDOW": triton.next_power_of_2(max(layout.max_window_bytes, 2)),
        "CONV_STATE_DIM_FIRST": layout.conv_dim_first,
    }


def _grid(num_reqs: int, arguments: dict[str, Any]) -> tuple[int]:
    return (min(PROGRAMS, num_reqs * arguments["num_states"] * arguments["num_tiles"]),)
