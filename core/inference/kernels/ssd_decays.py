"""The SSD stage that adds up dt * A within each chunk, one token after the other.

A sum in order can be continued from any token's sum, so that a decode's next sum has the bits that a prefill
gives it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_WARPS = 1
_MAX_HEADS = 32  # of a program, which is one warp


def chunk_cumsum(dt: Tensor, A: Tensor, chunk_size: int, cu_chunk_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """l[k] = fma(dt[k], A, l[k - 1]) from 0 on, over the tokens of each chunk, in order.

    One launch, whose grid and addresses depend on shapes alone: a CUDA graph can capture it. Does not
    synchronise.

    Args:
        dt: [tokens, H], any strides. A: [H].
        chunk_size: the most tokens of a chunk.
        cu_chunk_seqlens: [chunks + 1] int32, where each chunk starts, and the trailing total.

    Returns: the time steps and their sums l, both [H, chunks, chunk size] float32. Behind a chunk's tokens
        the steps are 0, and every sum is the chunk's last one.
    """
    heads, chunks = dt.shape[1], cu_chunk_seqlens.shape[0] - 1
    chunk_dt, log_decays = torch.empty(2, heads, chunks, chunk_size, dtype=torch.float32, device=dt.device)
    block_h = heads_of_a_program(heads)
    chunk_cumsum_kernel[(chunks, triton.cdiv(heads, block_h))](
        dt, A, cu_chunk_seqlens, chunk_dt, log_decays,
        *dt.stride(), A.stride(0), chunk_dt.stride(0),
        HEADS=heads, CHUNK_SIZE=chunk_size, BLOCK_H=block_h, num_warps=NUM_WARPS,
    )  # fmt: skip
    return chunk_dt, log_decays


def heads_of_a_program(heads: int) -> int:
    """The heads whose sums one program adds up side by side."""
    covering: int = triton.next_power_of_2(heads)
    return min(_MAX_HEADS, covering)


@triton.jit
def side_by_side(v0, v1, v2, v3, v4, v5, v6, v7):
    """Eight vectors [n] as the columns of a tile [n, 8]."""
    even = tl.join(tl.join(v0, v4), tl.join(v2, v6))
    odd = tl.join(tl.join(v1, v5), tl.join(v3, v7))
    return tl.reshape(tl.join(even, odd), (v0.shape[0], 8))


@triton.jit
def load_step(dt, token, token_stride, length, is_head):
    """The time steps of one token, 0 behind the tokens."""
    return tl.load(dt + token * token_stride, mask=is_head & (token < length), other=0.0).to(tl.float32)


@triton.jit
def sum_decays(dt, rate, steps_out, sums_out, token_stride, length, stored, is_head, BLOCK_H: tl.constexpr):
    """Store the steps and the sums of `stored` tokens, of which `length` are real.

    dt points at the first token, steps_out and sums_out at the first number, each [BLOCK_H]. The numbers of a
    head lie side by side. Sixteen loads run at once; the sums wait for each other alone.
    """
    place = tl.arange(0, 8)[None, :]
    total = tl.zeros((BLOCK_H,), dtype=tl.float32)
    for first in range(0, stored, 16):
        d0 = load_step(dt, first, token_stride, length, is_head)
        d1 = load_step(dt, first + 1, token_stride, length, is_head)
        d2 = load_step(dt, first + 2, token_stride, length, is_head)
        d3 = load_step(dt, first + 3, token_stride, length, is_head)
        d4 = load_step(dt, first + 4, token_stride, length, is_head)
        d5 = load_step(dt, first + 5, token_stride, length, is_head)
        d6 = load_step(dt, first + 6, token_stride, length, is_head)
        d7 = load_step(dt, first + 7, token_stride, length, is_head)
        d8 = load_step(dt, first + 8, token_stride, length, is_head)
        d9 = load_step(dt, first + 9, token_stride, length, is_head)
        d10 = load_step(dt, first + 10, token_stride, length, is_head)
        d11 = load_step(dt, first + 11, token_stride, length, is_head)
        d12 = load_step(dt, first + 12, token_stride, length, is_head)
        d13 = load_step(dt, first + 13, token_stride, length, is_head)
        d14 = load_step(dt, first + 14, token_stride, length, is_head)
        d15 = load_step(dt, first + 15, token_stride, length, is_head)
        s0 = tl.fma(d0, rate, total)
        s1 = tl.fma(d1, rate, s0)
        s2 = tl.fma(d2, rate, s1)
        s3 = tl.fma(d3, rate, s2)
        s4 = tl.fma(d4, rate, s3)
        s5 = tl.fma(d5, rate, s4)
        s6 = tl.fma(d6, rate, s5)
        s7 = tl.fma(d7, rate, s6)
        s8 = tl.fma(d8, rate, s7)
        s9 = tl.fma(d9, rate, s8)
        s10 = tl.fma(d10, rate, s9)
        s11 = tl.fma(d11, rate, s10)
        s12 = tl.fma(d12, rate, s11)
        s13 = tl.fma(d13, rate, s12)
        s14 = tl.fma(d14, rate, s13)
        total = tl.fma(d15, rate, s14)
        to = first + place
        inside = is_head[:, None] & (to < stored)
        tl.store(steps_out[:, None] + to, side_by_side(d0, d1, d2, d3, d4, d5, d6, d7), mask=inside)
        tl.store(sums_out[:, None] + to, side_by_side(s0, s1, s2, s3, s4, s5, s6, s7), mask=inside)
        to += 8
        inside = is_head[:, None] & (to < stored)
        tl.store(steps_out[:, None] + to, side_by_side(d8, d9, d10, d11, d12, d13, d14, d15), mask=inside)
        tl.store(sums_out[:, None] + to, side_by_side(s8, s9, s10, s11, s12, s13, s14, total), mask=inside)


@triton.jit
def chunk_cumsum_kernel(
    # Pointers
    dt, A, cu_chunk_seqlens, chunk_dt, log_decays,
    # Strides
    dt_token_stride: tl.int64, dt_head_stride: tl.int64, a_stride, out_head_stride: tl.int64,
    # Meta-parameters
    HEADS: tl.constexpr, CHUNK_SIZE: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """A program has a chunk and BLOCK_H heads."""
    chunk = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = head < HEADS
    start = tl.load(cu_chunk_seqlens + chunk).to(tl.int64)
    length = (tl.load(cu_chunk_seqlens + chunk + 1) - start).to(tl.int32)
    rate = tl.load(A + head * a_stride, mask=is_head, other=0.0).to(tl.float32)
    out = head * out_head_stride + chunk * CHUNK_SIZE
    sum_decays(
        dt + start * dt_token_stride + head * dt_head_stride, rate, chunk_dt + out, log_decays + out,
        dt_token_stride, length, CHUNK_SIZE, is_head, BLOCK_H,
    )  # fmt: skip
