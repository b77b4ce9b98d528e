"""Mamba-2's scan and decode in Triton, by pool slots; the reference is `torch_ssd`.

The scan runs the stages of `ssd_stages`. None chooses its tiles by timing them, and all add in one order.
Products multiply numbers of the model's dtype, of float16 widened, and add in float32, as mamba_ssm and
megatron-core do. Sums of dt * A, decays, states and the recurrence between chunks are float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...validation import ceil_div
from .ssd_stages import chunk_cumsum, chunk_scan, chunk_scores, ssd_states
from .step_rows import ScanRows
from .tiles import any_index

UPDATE_WARPS = 4
_TILE_ELEMENTS = 2048  # 16 a thread: four loads of 16 bytes in flight in float32


def selective_state_update(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, ssm_states: Tensor,
    sources: Tensor, destinations: Tensor, *, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `torch_ssd.selective_state_update`; the state stays in float32 between the tokens of a call."""
    rows, tokens, heads, head_dim = x.shape
    groups, state_dim = B.shape[2:]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    block_p, block_n = update_blocks(head_dim, state_dim)
    ssd_update_kernel[(rows * heads * ceil_div(head_dim, block_p),)](
        x, dt, A, B, C, D, ssm_states, out, sources, destinations,
        *x.stride(), *dt.stride(), *A.stride(), *B.stride(), *C.stride(), *D.stride(),
        *ssm_states.stride(), *destinations.stride(),
        TOKENS=tokens, HEADS=heads, HEADS_PER_GROUP=heads // groups, HEAD_DIM=head_dim, STATE_DIM=state_dim,
        BLOCK_P=block_p, BLOCK_N=block_n, num_warps=UPDATE_WARPS, num_stages=1,
    )  # fmt: skip
    return out


def update_blocks(head_dim: int, state_dim: int) -> tuple[int, int]:
    """A program's tile, in P and in N. The number of rows has no say, so that other rows change no bits."""
    block_n = triton.next_power_of_2(state_dim)
    return min(triton.next_power_of_2(head_dim), max(1, _TILE_ELEMENTS // block_n)), block_n


@triton.jit
def ssd_update_kernel(
    # Pointers
    x, dt, A, B, C, D, states, out, sources, destinations,
    # Strides
    x_row_stride, x_token_stride, x_head_stride, x_p_stride,
    dt_row_stride, dt_token_stride, dt_head_stride,
    a_stride,
    b_row_stride, b_token_stride, b_group_stride, b_n_stride,
    c_row_stride, c_token_stride, c_group_stride, c_n_stride,
    d_stride,
    slot_stride, head_stride, p_stride, n_stride,
    destination_row_stride, destination_token_stride,
    # Meta-parameters
    TOKENS: tl.constexpr, HEADS: tl.constexpr, HEADS_PER_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, STATE_DIM: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program has a row, a head and BLOCK_P of P. Padding costs 1 + TOKENS scalar loads."""
    P_BLOCKS: tl.constexpr = (HEAD_DIM + BLOCK_P - 1) // BLOCK_P
    p = tl.program_id(0) % P_BLOCKS * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    head = tl.program_id(0) // P_BLOCKS % HEADS
    row = (tl.program_id(0) // (P_BLOCKS * HEADS)).to(tl.int64)
    group = head // HEADS_PER_GROUP

    x += row * x_row_stride + head * x_head_stride + p * x_p_stride
    dt += row * dt_row_stride + head * dt_head_stride
    B += row * b_row_stride + group * b_group_stride + n * b_n_stride
    C += row * c_row_stride + group * c_group_stride + n * c_n_stride
    out += (row * TOKENS * HEADS + head) * HEAD_DIM + p
    within = p[:, None] * p_stride + n[None, :] * n_stride
    states += head.to(tl.int64) * head_stride
    destinations += row * destination_row_stride

    source = tl.load(sources + row)
    if any_index(source, destinations, destination_token_stride, TOKENS) >= 0:
        inside = (p < HEAD_DIM)[:, None] & (n < STATE_DIM)[None, :]

        state = tl.load(states + source * slot_stride + within, mask=inside & (source >= 0), other=0.0)
        state = state.to(tl.float32)
        a = tl.load(A + head * a_stride).to(tl.float32)
        d = tl.load(D + head * d_stride).to(tl.float32)
        tl.debug_barrier()  # below, a thread may overwrite what another thread has read above
        for token in tl.static_range(TOKENS):
            step = tl.load(dt + token * dt_token_stride).to(tl.float32)
            xs = tl.load(x + token * x_token_stride, mask=p < HEAD_DIM, other=0.0).to(tl.float32)
            key = tl.load(B + token * b_token_stride, mask=n < STATE_DIM, other=0.0).to(tl.float32)
            query = tl.load(C + token * c_token_stride, mask=n < STATE_DIM, other=0.0).to(tl.float32)
            state = tl.fma(state, tl.exp(step * a), (step * xs)[:, None] * key[None, :])
            # Rounded here, not in the sum: all threads that hold y have the same bits, whichever stores it.
            products = tl.fma(state, query[None, :], 0.0)
            y = tl.fma(xs, d, tl.sum(products, axis=1))
            tl.store(out + token * HEADS * HEAD_DIM, y.to(out.dtype.element_ty), mask=p < HEAD_DIM)
            destination = tl.load(destinations + token * destination_token_stride)
            if destination >= 0:
                place = states + destination * slot_stride + within
                tl.store(place, state.to(states.dtype.element_ty), mask=inside)


def ssd_chunk_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, ssm_states: Tensor, rows: ScanRows,
    *, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `torch_ssd.ssd_chunk_scan`, in four launches; a ValueError where a last stride is not 1.

    The same inputs and cuts give the same bits whichever rows share the batch and, in a float32 pool, however
    the cuts are spread over calls.
    """
    operands, cuts = operand_dtype(x.dtype), rows.cu_chunk_seqlens
    chunk_dt, log_decays = chunk_cumsum(dt, A, rows.chunk_size, cuts)
    entering = ssd_states(x, B, chunk_dt, log_decays, ssm_states, rows, operands)
    CB = chunk_scores(C, B, rows.chunk_size, cuts, operands)
    return chunk_scan(x, chunk_dt, log_decays, C, CB, D, entering, cuts, out)


def operand_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of what the scan multiplies for inputs of `dtype`: sums of float16 soon reach 65,504."""
    return torch.float32 if dtype == torch.float16 else dtype
