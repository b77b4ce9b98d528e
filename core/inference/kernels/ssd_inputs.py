"""What a prefill leaves for the decodes that replay its last chunk; the reference is in
`reference_replay_ssd.py`.
"""

import triton
import triton.language as tl
from torch import Tensor

from .ssd_decays import NUM_WARPS as SUM_WARPS
from .ssd_decays import heads_of_a_program, sum_decays

COPY_WARPS = 4
COPY_BLOCK = 1024  # numbers of 16 bits, 16 bytes a thread


def keep_ssd_inputs(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    x_inputs: Tensor,
    B_inputs: Tensor,
    gates: Tensor,
    slots: Tensor,
    tail_starts: Tensor,
    query_start_loc: Tensor,
    chunk_size: int,
) -> None:
    """Store the inputs of each row's tail, the tokens behind the row's last grid point.

    Sums of dt * A have the bits of `chunk_cumsum`. Two launches, whose grids and addresses depend on shapes
    alone: a CUDA graph can capture them. Does not synchronise.

    Args:
        x: [tokens, H, P] and B: [tokens, G, N], of packed rows; the last stride is 1.
        dt: [tokens, H]. A: [H].
        x_inputs, B_inputs, gates: as for `ssd_replay`. Written at `slots`.
        slots: [rows] int64, where a row's inputs go; -1: nowhere.
        tail_starts: [rows] int64, the packed token with which a row's tail begins, at a grid point. The tail
            has at most `chunk_size` tokens, and no token where it begins at the row's end.
        query_start_loc: [rows + 1], where each row's tokens start.
        chunk_size: the tokens of a chunk.

    Raises:
        ValueError: a tensor has other strides.
    """
    for name, tokens_first in (("x", x), ("B", B)):
        if tokens_first.stride(-1) != 1:
            raise ValueError(f"{name} has strides {tokens_first.stride()}; accepted: a last stride of 1")
    for name, pool in (("x_inputs", x_inputs), ("B_inputs", B_inputs), ("gates", gates)):
        if not pool[:1].is_contiguous():
            raise ValueError(f"{name} has strides {pool.stride()}; accepted: contiguous slots of any stride")
    rows, (_, heads, head_dim), (groups, state_dim) = slots.shape[0], x.shape, B.shape[1:]
    places = slots, tail_starts, query_start_loc
    keep_inputs_kernel[(chunk_size, rows)](
        x, B, x_inputs, B_inputs, *places,
        x.stride(0), x.stride(1), B.stride(0), B.stride(1), x_inputs.stride(0), B_inputs.stride(0),
        heads, head_dim, groups, state_dim, BLOCK=COPY_BLOCK, num_warps=COPY_WARPS,
    )  # fmt: skip
    block_h = heads_of_a_program(heads)
    keep_gates_kernel[(triton.cdiv(heads, block_h), rows)](
        dt, A, gates, *places, *dt.stride(), A.stride(0), gates.stride(0),
        HEADS=heads, CHUNK_SIZE=chunk_size, BLOCK_H=block_h, num_warps=SUM_WARPS,
    )  # fmt: skip


@triton.jit
def copy_token(inputs, kept, head_stride, HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Store the numbers of one token, HEADS of SIZE, side by side."""
    for first in range(0, HEADS * SIZE, BLOCK):
        place = first + tl.arange(0, BLOCK)
        inside = place < HEADS * SIZE
        numbers = tl.load(inputs + place // SIZE * head_stride + place % SIZE, mask=inside)
        tl.store(kept + place, numbers, mask=inside)


@triton.jit
def keep_inputs_kernel(
    # Pointers
    x, B, x_inputs, B_inputs, slots, tail_starts, query_start_loc,
    # Strides
    x_token_stride: tl.int64, x_head_stride: tl.int64, B_token_stride: tl.int64, B_group_stride: tl.int64,
    x_slot_stride: tl.int64, B_slot_stride: tl.int64,
    # Dimensions
    heads: tl.constexpr, head_dim: tl.constexpr, groups: tl.constexpr, state_dim: tl.constexpr,
    # Meta-parameters
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A program has a row and a token of the chunk; a token that the tail has not costs three loads."""
    offset = tl.program_id(0)
    row = tl.program_id(1)
    slot = tl.load(slots + row)
    token = tl.load(tail_starts + row) + offset
    if (slot >= 0) & (token < tl.load(query_start_loc + row + 1)):
        x_size: tl.constexpr = heads * head_dim
        B_size: tl.constexpr = groups * state_dim
        x_kept = x_inputs + slot * x_slot_stride + offset * x_size
        B_kept = B_inputs + slot * B_slot_stride + offset * B_size
        copy_token(x + token * x_token_stride, x_kept, x_head_stride, heads, head_dim, BLOCK)
        copy_token(B + token * B_token_stride, B_kept, B_group_stride, groups, state_dim, BLOCK)


@triton.jit
def keep_gates_kernel(
    # Pointers
    dt, A, gates, slots, tail_starts, query_start_loc,
    # Strides
    dt_token_stride: tl.int64, dt_head_stride: tl.int64, a_stride, gate_slot_stride: tl.int64,
    # Meta-parameters
    HEADS: tl.constexpr, CHUNK_SIZE: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """A program has a row and BLOCK_H heads."""
    head = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    row = tl.program_id(1)
    slot = tl.load(slots + row)
    start = tl.load(tail_starts + row)
    length = tl.load(query_start_loc + row + 1) - start
    if (slot >= 0) & (length > 0):
        is_head = head < HEADS
        rate = tl.load(A + head * a_stride, mask=is_head, other=0.0).to(tl.float32)
        steps_out = gates + slot * gate_slot_stride + head * CHUNK_SIZE
        sum_decays(
            dt + start * dt_token_stride + head * dt_head_stride, rate,
            steps_out, steps_out + HEADS * CHUNK_SIZE, dt_token_stride, length, length, is_head, BLOCK_H,
        )  # fmt: skip
