"""The decode recurrence of Mamba mixers in Triton; the reference is `reference.selective_state_update`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_WARPS = 4
_TILE_ELEMENTS = 2048  # 16 a thread: four loads of 16 bytes in flight in float32


def selective_state_update(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    ssm_states: Tensor,
    sources: Tensor,
    destinations: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """h[t] = exp(dt A) h[t-1] + dt B x, y = C h + D x, over T tokens of every row (arXiv 2312.00752).

    Reads each state once and stores it at each destination. Computes in float32, and keeps the state in
    float32 between the tokens of a call. One launch. Does not synchronise.

    Args:
        x: [rows, T, H, P]. dt: [rows, T, H], after bias and softplus. A: [H], negative. D: [H].
        B, C: [rows, T, G, N]; head h belongs to group h // (H // G). All these tensors have any strides.
        ssm_states: [slots, H, P, N] with any strides. Written at `destinations`.
        sources: [rows] the pool index of the state before the tokens, -1: zeros.
        destinations: [rows, T] the pool index for the state after each token, -1: nowhere. One destination
            may be the row's source. A row whose indices are all -1 (padding) costs a few small loads, and its
            outputs are unspecified.
        out: where y goes, contiguous, of the dtype of x; None allocates it.

    Returns: y, [rows, T, H, P] in the dtype of x.
    """
    rows, tokens, heads, head_dim = x.shape
    groups, state_dim = B.shape[2:]
    if out is None:
        out = torch.empty(rows, tokens, heads, head_dim, dtype=x.dtype, device=x.device)
    block_p, block_n = block_sizes(head_dim, state_dim)
    update_kernel[(rows * heads * triton.cdiv(head_dim, block_p),)](
        x, dt, A, B, C, D, ssm_states, out, sources, destinations,
        *x.stride(), *dt.stride(), *A.stride(), *B.stride(), *C.stride(), *D.stride(),
        *ssm_states.stride(), *destinations.stride(),
        TOKENS=tokens, HEADS=heads, HEADS_A_GROUP=heads // groups, HEAD_DIM=head_dim, STATE_DIM=state_dim,
        BLOCK_P=block_p, BLOCK_N=block_n, num_warps=NUM_WARPS, num_stages=1,
    )  # fmt: skip
    return out


def block_sizes(head_dim: int, state_dim: int) -> tuple[int, int]:
    """A program's tile, in P and in N. The number of rows has no say, so that other rows change no bits."""
    block_n = triton.next_power_of_2(state_dim)
    return min(triton.next_power_of_2(head_dim), max(1, _TILE_ELEMENTS // block_n)), block_n


@triton.jit
def update_kernel(
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
    TOKENS: tl.constexpr, HEADS: tl.constexpr, HEADS_A_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, STATE_DIM: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program has a row, a head and BLOCK_P of P. No other program touches this part of the row's states.

    Padding costs 1 + TOKENS scalar loads.
    """
    P_BLOCKS: tl.constexpr = (HEAD_DIM + BLOCK_P - 1) // BLOCK_P
    p = tl.program_id(0) % P_BLOCKS * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    head = tl.program_id(0) // P_BLOCKS % HEADS
    row = (tl.program_id(0) // (P_BLOCKS * HEADS)).to(tl.int64)
    group = head // HEADS_A_GROUP

    x += row * x_row_stride + head * x_head_stride + p * x_p_stride
    dt += row * dt_row_stride + head * dt_head_stride
    B += row * b_row_stride + group * b_group_stride + n * b_n_stride
    C += row * c_row_stride + group * c_group_stride + n * c_n_stride
    out += (row * TOKENS * HEADS + head) * HEAD_DIM + p
    within = p[:, None] * p_stride + n[None, :] * n_stride
    states += head.to(tl.int64) * head_stride
    destinations += row * destination_row_stride

    source = tl.load(sources + row)
    any_index = source
    for token in tl.static_range(TOKENS):
        any_index = tl.maximum(any_index, tl.load(destinations + token * destination_token_stride))
    if any_index >= 0:
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
