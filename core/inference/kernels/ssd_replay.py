"""Mamba-2's decode by replay: rows of the SSD scan, from a chunk's first state and the inputs since.

The reference is `torch_ssd`. A recurrent update rounds otherwise than the scan does. A decode by replay
does what `chunk_scores`, `chunk_scan` and `ssd_states` do for the same tokens: the same products over the
same operands, added in the same order, so that its results have the same bits. Tensor cores add over K in an
order that no tile's side changes. numpy in Triton's interpreter does not; there the tiles are the scan's.
"""

from collections import namedtuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...validation import ceil_div
from .dtypes_and_strides import check_last_stride, check_slots
from .mixer_inputs import SsdInputs
from .ssd import operand_dtype
from .ssd_stages import (
    INTERPRETED,
    SUM_WARPS,
    add_update,
    heads_of_a_warp,
    masked_scores,
    multiply_add,
    padded_side,
    scan_blocks,
    state_blocks,
    sum_decays,
)
from .step_rows import ReplayRows, TailRows, input_table
from .tiles import load_tile, places

MIN_PROGRAMS = 1024
"""Programs of a step, at least, while heads can be spread: about eight on each multiprocessor of an H100."""


def ssd_replay(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, ssm_states: Tensor, inputs: SsdInputs,
    rows: ReplayRows, *, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `torch_ssd.ssd_replay`, with the bits of `ssd_chunk_scan` in one run over the chunk.

    `inputs.x` and `inputs.B` have the dtype of x. A ValueError where a last stride of x, B or C is not 1.
    """
    check_last_stride(x=x, B=B, C=C)
    check_slots(ssm_states=ssm_states, x_inputs=inputs.x, B_inputs=inputs.B, dt_inputs=inputs.dt)
    num_rows, tokens, heads, head_dim = x.shape
    groups, state_dim = B.shape[2:]
    operands = operand_dtype(x.dtype)
    blocks, options = block_sizes(tokens, rows.chunk_size, head_dim, state_dim, operands)
    head_block = group_heads_per_program(num_rows, heads, heads // groups)
    y = torch.empty(num_rows, tokens, heads, head_dim, dtype=x.dtype, device=x.device) if out is None else out
    ssd_replay_kernel[(ceil_div(head_dim, blocks["BLOCK_P"]), heads // head_block, num_rows)](
        x, dt, A, B, C, D, ssm_states, *inputs, y,
        rows.input_rows, input_table(rows), rows.starts, rows.lengths, rows.sources, rows.destinations,
        *x.stride()[:3], *dt.stride(), *B.stride()[:3], *C.stride()[:3], A.stride(0), D.stride(0),
        ssm_states.stride(0), *(pool.stride(0) for pool in inputs),
        tokens, heads, groups, head_dim, state_dim, rows.chunk_size, inputs.x.shape[1],
        operands == torch.float32, head_block,
        **blocks, **options,
    )  # fmt: skip
    return y


def group_heads_per_program(rows: int, heads: int, heads_of_group: int) -> int:
    """The heads of a group that a program serves: they share products of C and B, and programs fill a GPU."""
    block = 1
    while heads_of_group % (2 * block) == 0 and rows * heads >= 2 * block * MIN_PROGRAMS:
        block *= 2
    return block


def block_sizes(
    tokens: int, chunk_size: int, head_dim: int, state_dim: int, operands: torch.dtype
) -> tuple[dict[str, int | bool], dict[str, int]]:
    """Tile sizes, whether rows of tiles lie on the scan's own grid, and options of the launch.

    On a GPU the first row of the first tile is the first new token, and one tile has all tokens of the chunk.
    Tensor cores need 16 rows; products of float32 do without them. More than two tokens would spill with
    eight warps of 128 registers a thread.
    """
    scan, _, _ = scan_blocks(chunk_size, head_dim, state_dim, operands)
    states, _ = state_blocks(chunk_size, head_dim, state_dim, operands)
    blocks: dict[str, int | bool] = scan | {f"STATE_{name}": size for name, size in states.items()}
    wide = operands == torch.float32
    if not INTERPRETED:
        blocks["BLOCK_M"] = min(16, triton.next_power_of_2(tokens)) if wide else 16
        blocks["BLOCK_K"] = min(32 if wide else 256, padded_side(chunk_size))
    aligned = bool(INTERPRETED)
    reach = tokens + blocks["BLOCK_M"] - 1 if aligned else tokens
    options = {"num_warps": 4, "num_stages": 1 if wide else 2}
    if not wide and tokens <= 2:
        options |= {"num_warps": 8, "maxnreg": 128}
    return blocks | {"ALIGNED": aligned, "M_TILES": ceil_div(reach, blocks["BLOCK_M"])}, options


_Chunk = namedtuple(
    "_Chunk",
    "x x_inputs B B_inputs C table offset end x_token_stride x_head_stride B_token_stride C_token_stride "
    "x_input_stride B_input_stride",
)
"""A row's tokens since the last grid point: up to `offset` from it they are kept, up to `end` new."""
_Steps = namedtuple("_Steps", "dt token_stride offset length rate before")
"""A head's time steps of new tokens, its A, and the sum of dt * A of the kept tokens."""
_NewTokens = namedtuple("_NewTokens", "m token is_new inside")
"""A tile of new tokens: their numbers in the chunk and in the step; inside also of the program's channels."""
_Shared = namedtuple("_Shared", "k x_places scores")
"""What heads share: tokens of the chunk, their places in the kept x, and their scores."""


@triton.jit
def tokens_of(kept, new, k, offset, kept_places, new_stride):
    """Pointers [k, columns] to the inputs of tokens of a chunk: the first `offset` are kept, others are new.

    `kept`, `new`: pointers to the columns. A choice between pointers without columns, to which these are
    added, is loaded number by number by Triton 3.8 and 3.9.
    """
    kept_ptrs = kept[None, :] + kept_places[:, None]
    return tl.where((k < offset)[:, None], kept_ptrs, new[None, :] + ((k - offset) * new_stride)[:, None])


@triton.jit
def with_token(step, total, last, steps, k, t):
    """Steps and sums with those of the new token t; `last` is the sum of the token before."""
    new = tl.load(steps.dt + t * steps.token_stride, mask=t < steps.length, other=0.0).to(tl.float32)
    last = tl.fma(new, steps.rate, last)
    is_token = k == steps.offset + t
    return tl.where(is_token, new, step), tl.where(is_token, last, total), last


@triton.jit
def steps_of(kept_dt, steps, k, tokens: tl.constexpr, log_offset: tl.constexpr):
    """The steps and sums of tokens k, finite after the tokens."""
    step = tl.load(kept_dt + k, mask=k < steps.offset, other=0.0)
    total = tl.load(kept_dt + log_offset + k, mask=k < steps.offset, other=0.0)
    last = steps.before
    if tokens <= 8:
        for t in tl.static_range(0, tokens):
            step, total, last = with_token(step, total, last, steps, k, t)
    else:
        for t in range(steps.length):
            step, total, last = with_token(step, total, last, steps, k, t)
    return step, total


@triton.jit
def scores_of(
    chunk, k, B_places, new, state_dim: tl.constexpr, operand: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """C[m] B[k] of new tokens and of tokens k of the chunk, as `chunk_scores` adds it."""
    scores = tl.zeros((new.token.shape[0], k.shape[0]), dtype=tl.float32)
    for first_n in tl.static_range(0, state_dim, BLOCK_N):
        n = first_n + tl.arange(0, BLOCK_N)
        query_ptrs = chunk.C + new.token[:, None] * chunk.C_token_stride + n[None, :]
        queries = load_tile(query_ptrs, new.is_new, n < state_dim)
        key_ptrs = tokens_of(chunk.B_inputs + n, chunk.B + n, k, chunk.offset, B_places, chunk.B_token_stride)
        keys = load_tile(key_ptrs, k < chunk.end, n < state_dim)
        scores = multiply_add(queries.to(operand), tl.trans(keys.to(operand)), scores)
    return scores


@triton.jit
def add_inputs(
    acc, scores, m, decay_m, k, x_places, x_kept, x_new, x_token_stride, is_channel, kept_dt, steps,
    tokens: tl.constexpr, log_offset: tl.constexpr, operand: tl.constexpr,
):  # fmt: skip
    """acc + the masked scores times x[k], over tokens k; x_kept and x_new point at the channels of x."""
    step, decay = steps_of(kept_dt, steps, k, tokens, log_offset)
    scores = masked_scores(scores, decay_m, decay, step, m, k)
    x_ptrs = tokens_of(x_kept, x_new, k, steps.offset, x_places, x_token_stride)
    values = load_tile(x_ptrs, k < steps.offset + steps.length, is_channel)
    return multiply_add(scores.to(operand), values.to(operand), acc)


@triton.jit
def _output_of_head(
    chunk, new, head, kept_dt, steps, shared, skip, states, slot_stride, source, y, first_m, first_p, p,
    is_channel,
    tokens: tl.constexpr, heads: tl.constexpr, groups: tl.constexpr,
    head_dim: tl.constexpr, state_dim: tl.constexpr, chunk_size: tl.constexpr, block_tokens: tl.constexpr,
    operand: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Store channels p of a head's outputs of new tokens, and keep their x, steps and sums."""
    m, table = new.m, chunk.table
    log_offset: tl.constexpr = heads * chunk_size
    x_size: tl.constexpr = heads * head_dim
    step_m, decay_m = steps_of(kept_dt, steps, m, tokens, log_offset)
    acc = tl.zeros((m.shape[0], p.shape[0]), dtype=tl.float32)
    for first_n in tl.static_range(0, state_dim, BLOCK_N):
        n = first_n + tl.arange(0, BLOCK_N)
        query_ptrs = chunk.C + new.token[:, None] * chunk.C_token_stride + n[None, :]
        queries = load_tile(query_ptrs, new.is_new, n < state_dim)
        within = head * (head_dim * state_dim) + p[:, None] * state_dim + n[None, :]
        in_state = is_channel[:, None] & (n < state_dim)[None, :] & (source >= 0)
        state = tl.load(states + source * slot_stride + within, mask=in_state, other=0.0)
        state = state.to(tl.float32).to(operand)
        acc = multiply_add(queries.to(operand), tl.trans(state), acc)
    acc *= tl.exp(decay_m)[:, None]

    x_kept = chunk.x_inputs + head * head_dim + p
    x_new = chunk.x + head * chunk.x_head_stride + p
    if chunk_size <= BLOCK_K:  # Triton loads ahead in a loop that has no loop inside
        acc = add_inputs(
            acc, shared.scores, m, decay_m, shared.k, shared.x_places, x_kept, x_new, chunk.x_token_stride,
            is_channel, kept_dt, steps, tokens, log_offset, operand,
        )  # fmt: skip
    else:
        for first_k in range(0, tl.minimum(first_m + BLOCK_M, chunk.end), BLOCK_K):
            k = first_k + tl.arange(0, BLOCK_K)
            is_old = k < chunk.offset
            B_places = places(table, k, is_old, chunk.B_input_stride, block_tokens, groups * state_dim)
            scores = scores_of(chunk, k, B_places, new, state_dim, operand, BLOCK_N)
            x_places = places(table, k, is_old, chunk.x_input_stride, block_tokens, x_size)
            acc = add_inputs(
                acc, scores, m, decay_m, k, x_places, x_kept, x_new, chunk.x_token_stride,
                is_channel, kept_dt, steps, tokens, log_offset, operand,
            )  # fmt: skip

    skipped = tl.load(x_new[None, :] + new.token[:, None] * chunk.x_token_stride, mask=new.inside, other=0.0)
    acc = tl.fma(skipped.to(tl.float32), skip, acc)
    out = y + head * head_dim + new.token[:, None] * x_size + p[None, :]
    tl.store(out, acc.to(y.dtype.element_ty), mask=new.inside)

    # What other programs read of the inputs lies before `offset`.
    x_places = places(table, m, new.is_new, chunk.x_input_stride, block_tokens, x_size)
    tl.store(x_kept[None, :] + x_places[:, None], skipped, mask=new.inside)
    if first_p == 0:
        tl.store(kept_dt + m, step_m, mask=new.is_new)
        tl.store(kept_dt + log_offset + m, decay_m, mask=new.is_new)


@triton.jit
def _keep_group(
    chunk, new, size: tl.constexpr, state_dim: tl.constexpr, block_tokens: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Keep a group's B of new tokens; `size` is that of all groups."""
    B_places = places(chunk.table, new.m, new.is_new, chunk.B_input_stride, block_tokens, size)
    for first_n in tl.static_range(0, state_dim, BLOCK_N):
        n = first_n + tl.arange(0, BLOCK_N)
        mask = new.is_new[:, None] & (n < state_dim)[None, :]
        key_ptrs = chunk.B + new.token[:, None] * chunk.B_token_stride + n[None, :]
        keys = tl.load(key_ptrs, mask=mask, other=0.0)
        tl.store(chunk.B_inputs + B_places[:, None] + n[None, :], keys, mask=mask)


@triton.jit
def _complete_state(
    chunk, head, dt_inputs, steps, states, slot_stride, source, destination, first_p,
    tokens: tl.constexpr, heads: tl.constexpr, groups: tl.constexpr,
    head_dim: tl.constexpr, state_dim: tl.constexpr, chunk_size: tl.constexpr, block_tokens: tl.constexpr,
    operand: tl.constexpr, BLOCK_P: tl.constexpr,
    STATE_BLOCK_P: tl.constexpr, STATE_BLOCK_N: tl.constexpr, STATE_BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Store BLOCK_P of P of a head's state after the chunk."""
    table, decay_of_chunk = chunk.table, steps.before
    for t in range(steps.length):
        step = tl.load(steps.dt + t * steps.token_stride).to(tl.float32)
        decay_of_chunk = tl.fma(step, steps.rate, decay_of_chunk)
    for part_p in range(0, BLOCK_P, STATE_BLOCK_P):
        p = first_p + part_p + tl.arange(0, STATE_BLOCK_P)
        for first_n in range(0, state_dim, STATE_BLOCK_N):
            n = first_n + tl.arange(0, STATE_BLOCK_N)
            inside = (p < head_dim)[:, None] & (n < state_dim)[None, :]
            within = head * (head_dim * state_dim) + p[:, None] * state_dim + n[None, :]
            in_state = inside & (source >= 0)
            state = tl.load(states + source * slot_stride + within, mask=in_state, other=0.0).to(tl.float32)
            update = tl.zeros((STATE_BLOCK_P, STATE_BLOCK_N), dtype=tl.float32)
            for first_k in tl.range(0, chunk.end, STATE_BLOCK_K, num_stages=1):
                k = first_k + tl.arange(0, STATE_BLOCK_K)
                kept_dt = dt_inputs + head * chunk_size
                step, decay = steps_of(kept_dt, steps, k, tokens, heads * chunk_size)
                is_old = k < chunk.offset
                x_places = places(table, k, is_old, chunk.x_input_stride, block_tokens, heads * head_dim)
                x_kept = chunk.x_inputs + head * head_dim + p
                x_new = chunk.x + head * chunk.x_head_stride + p
                value_ptrs = tokens_of(x_kept, x_new, k, chunk.offset, x_places, chunk.x_token_stride)
                values = load_tile(value_ptrs, k < chunk.end, p < head_dim)
                B_places = places(table, k, is_old, chunk.B_input_stride, block_tokens, groups * state_dim)
                B_kept, B_new = chunk.B_inputs + n, chunk.B + n
                key_ptrs = tokens_of(B_kept, B_new, k, chunk.offset, B_places, chunk.B_token_stride)
                keys = load_tile(key_ptrs, k < chunk.end, n < state_dim)
                update = add_update(update, values, keys, decay_of_chunk, decay, step, operand)
            state = tl.fma(state, tl.exp(decay_of_chunk), update)
            tl.debug_barrier()
            place = states + destination * slot_stride + within
            tl.store(place, state.to(states.dtype.element_ty), mask=inside)


@triton.jit
def ssd_replay_kernel(
    # Pointers
    x, dt, A, B, C, D, ssm_states, x_inputs, B_inputs, dt_inputs, y,
    input_rows, input_blocks, starts, lengths, sources, destinations,
    # Strides
    x_row_stride: tl.int64, x_token_stride: tl.int64, x_head_stride: tl.int64,
    dt_row_stride: tl.int64, dt_token_stride: tl.int64, dt_head_stride: tl.int64,
    B_row_stride: tl.int64, B_token_stride: tl.int64, B_group_stride: tl.int64,
    C_row_stride: tl.int64, C_token_stride: tl.int64, C_group_stride: tl.int64,
    A_stride, D_stride, state_slot_stride: tl.int64,
    x_input_stride: tl.int64, B_input_stride: tl.int64, dt_input_stride: tl.int64,
    # Dimensions
    tokens: tl.constexpr, heads: tl.constexpr, groups: tl.constexpr,
    head_dim: tl.constexpr, state_dim: tl.constexpr, chunk_size: tl.constexpr, block_tokens: tl.constexpr,
    # Meta-parameters
    WIDE: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STATE_BLOCK_P: tl.constexpr, STATE_BLOCK_N: tl.constexpr, STATE_BLOCK_K: tl.constexpr,
    ALIGNED: tl.constexpr, M_TILES: tl.constexpr,
):  # fmt: skip
    """A program has a row, BLOCK_H heads of a group and BLOCK_P of P. Padding costs five loads."""
    row = tl.program_id(2).to(tl.int64)
    input_row = tl.load(input_rows + row)
    start = tl.load(starts + row)
    length = tl.load(lengths + row)
    source = tl.load(sources + row)
    destination = tl.load(destinations + row)
    if input_row < 0:
        return
    operand: tl.constexpr = tl.float32 if WIDE else x.dtype.element_ty
    heads_of_group: tl.constexpr = heads // groups
    first_p = tl.program_id(0) * BLOCK_P
    first_head = tl.program_id(1) * BLOCK_H
    group = first_head // heads_of_group
    offset = start % chunk_size
    end = offset + length

    x += row * x_row_stride
    dt += row * dt_row_stride
    B += row * B_row_stride + group * B_group_stride
    C += row * C_row_stride + group * C_group_stride
    table = input_blocks + row * ((chunk_size + block_tokens - 1) // block_tokens)
    B_inputs += group * state_dim
    dt_inputs += input_row * dt_input_stride
    y += row * (tokens * heads * head_dim)
    before_at = dt_inputs + heads * chunk_size + offset - 1
    chunk = _Chunk(
        x, x_inputs, B, B_inputs, C, table, offset, end, x_token_stride, x_head_stride, B_token_stride,
        C_token_stride, x_input_stride, B_input_stride,
    )  # fmt: skip

    p = first_p + tl.arange(0, BLOCK_P)
    is_channel = p < head_dim
    if chunk_size <= BLOCK_K:
        chunk_k = tl.arange(0, BLOCK_K)
        is_old = chunk_k < offset
        x_places = places(table, chunk_k, is_old, x_input_stride, block_tokens, heads * head_dim)
        B_places = places(table, chunk_k, is_old, B_input_stride, block_tokens, groups * state_dim)
    for tile in range(M_TILES):
        first_m = (offset // BLOCK_M * BLOCK_M if ALIGNED else offset) + tile * BLOCK_M
        if first_m < end:
            m = first_m + tl.arange(0, BLOCK_M)
            is_new = (m >= offset) & (m < end)
            new = _NewTokens(m, m - offset, is_new, is_new[:, None] & is_channel[None, :])
            shared = None
            if chunk_size <= BLOCK_K:
                scores = scores_of(chunk, chunk_k, B_places, new, state_dim, operand, BLOCK_N)
                shared = _Shared(chunk_k, x_places, scores)
            for head in range(first_head, first_head + BLOCK_H):
                rate = tl.load(A + head * A_stride).to(tl.float32)
                skip = tl.load(D + head * D_stride).to(tl.float32)
                before = tl.load(before_at + head * chunk_size, mask=offset > 0, other=0.0)
                steps = _Steps(dt + head * dt_head_stride, dt_token_stride, offset, length, rate, before)
                _output_of_head(
                    chunk, new, head, dt_inputs + head * chunk_size, steps, shared, skip, ssm_states,
                    state_slot_stride, source, y, first_m, first_p, p, is_channel,
                    tokens, heads, groups, head_dim, state_dim, chunk_size, block_tokens, operand,
                    BLOCK_M, BLOCK_N, BLOCK_K,
                )  # fmt: skip
            if (first_p == 0) & (first_head % heads_of_group == 0):
                _keep_group(chunk, new, groups * state_dim, state_dim, block_tokens, BLOCK_N)

    if destination >= 0:
        tl.debug_barrier()  # below, a thread may overwrite what another thread has read above
        for head in range(first_head, first_head + BLOCK_H):
            rate = tl.load(A + head * A_stride).to(tl.float32)
            before = tl.load(before_at + head * chunk_size, mask=offset > 0, other=0.0)
            steps = _Steps(dt + head * dt_head_stride, dt_token_stride, offset, length, rate, before)
            _complete_state(
                chunk, head, dt_inputs, steps, ssm_states, state_slot_stride, source, destination, first_p,
                tokens, heads, groups, head_dim, state_dim, chunk_size, block_tokens, operand,
                BLOCK_P, STATE_BLOCK_P, STATE_BLOCK_N, STATE_BLOCK_K,
            )  # fmt: skip


TAIL_BLOCK, TAIL_WARPS = 1024, 4  # numbers of 16 bits, 16 bytes a thread


def keep_ssd_inputs(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, inputs: SsdInputs, rows: TailRows, chunk_size: int
) -> None:
    """As `torch_ssd.keep_ssd_inputs`, with `chunk_cumsum`'s bits; ValueError for strided rows."""
    check_last_stride(x=x, B=B)
    check_slots(x_inputs=inputs.x, B_inputs=inputs.B, dt_inputs=inputs.dt)
    input_rows, starts, query_start_loc, _ = rows
    table = input_table(rows)
    keep_tails_kernel[(chunk_size, input_rows.shape[0])](
        x, B, inputs.x, inputs.B, input_rows, table, starts, query_start_loc,
        *x.stride()[:2], *B.stride()[:2], inputs.x.stride(0), inputs.B.stride(0),
        *x.shape[1:], *B.shape[1:], inputs.x.shape[1], table.shape[1], BLOCK=TAIL_BLOCK, num_warps=TAIL_WARPS,
    )  # fmt: skip
    heads = x.shape[1]
    block_h = heads_of_a_warp(heads)
    keep_dt_kernel[(ceil_div(heads, block_h), input_rows.shape[0])](
        dt, A, inputs.dt, input_rows, starts, query_start_loc,
        *dt.stride(), A.stride(0), inputs.dt.stride(0),
        HEADS=heads, CHUNK_SIZE=chunk_size, BLOCK_H=block_h, num_warps=SUM_WARPS,
    )  # fmt: skip


@triton.jit
def keep_dt_kernel(
    # Pointers
    dt, A, dt_inputs, input_rows, tail_starts, query_start_loc,
    # Strides
    dt_token_stride: tl.int64, dt_head_stride: tl.int64, a_stride, dt_input_stride: tl.int64,
    # Meta-parameters
    HEADS: tl.constexpr, CHUNK_SIZE: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """A program has a row and BLOCK_H heads."""
    head = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    row = tl.program_id(1)
    input_row = tl.load(input_rows + row)
    start = tl.load(tail_starts + row)
    length = tl.load(query_start_loc + row + 1) - start
    if (input_row >= 0) & (length > 0):
        is_head = head < HEADS
        rate = tl.load(A + head * a_stride, mask=is_head, other=0.0).to(tl.float32)
        steps_out = dt_inputs + input_row * dt_input_stride + head * CHUNK_SIZE
        sum_decays(
            dt + start * dt_token_stride + head * dt_head_stride, rate,
            steps_out, steps_out + HEADS * CHUNK_SIZE, dt_token_stride, length, length, is_head, BLOCK_H,
        )  # fmt: skip


@triton.jit
def _copy_token(inputs, kept, head_stride, HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Store the numbers of one token, HEADS of SIZE, side by side."""
    for first in range(0, HEADS * SIZE, BLOCK):
        place = first + tl.arange(0, BLOCK)
        inside = place < HEADS * SIZE
        numbers = tl.load(inputs + place // SIZE * head_stride + place % SIZE, mask=inside)
        tl.store(kept + place, numbers.to(kept.dtype.element_ty), mask=inside)


@triton.jit
def keep_tails_kernel(
    # Pointers
    first, second, first_kept, second_kept, input_rows, input_blocks, tail_starts, query_start_loc,
    # Strides
    first_token_stride: tl.int64, first_head_stride: tl.int64,
    second_token_stride: tl.int64, second_head_stride: tl.int64,
    first_input_stride: tl.int64, second_input_stride: tl.int64,
    # Dimensions
    first_heads: tl.constexpr, first_size: tl.constexpr,
    second_heads: tl.constexpr, second_size: tl.constexpr,
    block_tokens: tl.constexpr, num_input_blocks: tl.constexpr,
    # Meta-parameters
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A program has a row and a token of the chunk; a token that the tail has not costs three loads."""
    offset = tl.program_id(0)
    row = tl.program_id(1)
    input_row = tl.load(input_rows + row)
    token = tl.load(tail_starts + row) + offset
    if (input_row >= 0) & (token < tl.load(query_start_loc + row + 1)):
        first += token * first_token_stride
        second += token * second_token_stride
        input_block = tl.load(input_blocks + row * num_input_blocks + offset // block_tokens).to(tl.int64)
        offset %= block_tokens
        first_kept += input_block * first_input_stride + offset * (first_heads * first_size)
        second_kept += input_block * second_input_stride + offset * (second_heads * second_size)
        _copy_token(first, first_kept, first_head_stride, first_heads, first_size, BLOCK)
        _copy_token(second, second_kept, second_head_stride, second_heads, second_size, BLOCK)
