"""The decode recurrence of the gated delta rule in Triton; see `reference.gated_delta_rule_update`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_WARPS = 4
_TILE_ELEMENTS = 4096  # 32 a thread: eight loads of 16 bytes in flight in float32


def gated_delta_rule_update(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    sources: Tensor,
    destinations: Tensor,
) -> Tensor:
    """S = exp(g) S; S = S + k (beta (v - S^T k))^T; o = S^T q, over T tokens of every row.

    Normalises q and k, x * rsqrt(sum x^2 + 1e-6), and scales q by Dk ** -0.5 (arXiv 2412.06464). Reads each
    state once and stores it at each destination. Computes in float32, and keeps the state in float32 between
    the tokens of a call. One launch. Does not synchronise.

    Args:
        q, k: [rows, T, Hk, Dk] raw; value head h reads key head h // (Hv // Hk). v: [rows, T, Hv, Dv].
        g, beta: [rows, T, Hv], the log decay and the strength of the update. All these tensors have any
            strides.
        states: [slots, Hv, Dk, Dv] with any strides. Written at `destinations`.
        sources: [rows] the pool index of the state before the tokens, -1: zeros.
        destinations: [rows, T] the pool index for the state after each token, -1: nowhere. One destination
            may be the row's source. A row whose indices are all -1 (padding) costs a few small loads, and its
            outputs are unspecified.

    Returns: o, [rows, T, Hv, Dv] in the dtype of v.
    """
    rows, tokens, heads, value_dim = v.shape
    key_heads, key_dim = k.shape[2:]
    out = torch.empty(rows, tokens, heads, value_dim, dtype=v.dtype, device=v.device)
    block_k, block_v = block_sizes(key_dim, value_dim)
    update_kernel[(rows * heads * triton.cdiv(value_dim, block_v),)](
        q, k, v, g, beta, states, out, sources, destinations,
        *q.stride(), *k.stride(), *v.stride(), *g.stride(), *beta.stride(),
        *states.stride(), *destinations.stride(),
        TOKENS=tokens, HEADS=heads, HEADS_OF_KEY=heads // key_heads, KEY_DIM=key_dim, VALUE_DIM=value_dim,
        BLOCK_K=block_k, BLOCK_V=block_v, num_warps=NUM_WARPS, num_stages=1,
    )  # fmt: skip
    return out


def block_sizes(key_dim: int, value_dim: int) -> tuple[int, int]:
    """A program's tile, in Dk and in Dv. The number of rows has no say, so that other rows change no bits."""
    block_k = triton.next_power_of_2(key_dim)
    return block_k, min(triton.next_power_of_2(value_dim), max(1, _TILE_ELEMENTS // block_k))


@triton.jit
def update_kernel(
    # Pointers
    q, k, v, g, beta, states, out, sources, destinations,
    # Strides
    q_row_stride, q_token_stride, q_head_stride, q_dim_stride,
    k_row_stride, k_token_stride, k_head_stride, k_dim_stride,
    v_row_stride, v_token_stride, v_head_stride, v_dim_stride,
    g_row_stride, g_token_stride, g_head_stride,
    beta_row_stride, beta_token_stride, beta_head_stride,
    slot_stride, head_stride, key_stride, value_stride,
    destination_row_stride, destination_token_stride,
    # Meta-parameters
    TOKENS: tl.constexpr, HEADS: tl.constexpr, HEADS_OF_KEY: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """A program has a row, a value head and BLOCK_V of Dv. No other program touches this part of the states.

    Padding costs 1 + TOKENS scalar loads.
    """
    V_BLOCKS: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    n = tl.arange(0, BLOCK_K)
    p = tl.program_id(0) % V_BLOCKS * BLOCK_V + tl.arange(0, BLOCK_V)
    head = tl.program_id(0) // V_BLOCKS % HEADS
    row = (tl.program_id(0) // (V_BLOCKS * HEADS)).to(tl.int64)
    key_head = head // HEADS_OF_KEY

    q += row * q_row_stride + key_head * q_head_stride + n * q_dim_stride
    k += row * k_row_stride + key_head * k_head_stride + n * k_dim_stride
    v += row * v_row_stride + head * v_head_stride + p * v_dim_stride
    g += row * g_row_stride + head * g_head_stride
    beta += row * beta_row_stride + head * beta_head_stride
    out += (row * TOKENS * HEADS + head) * VALUE_DIM + p
    within = n[:, None] * key_stride + p[None, :] * value_stride
    states += head.to(tl.int64) * head_stride
    destinations += row * destination_row_stride

    source = tl.load(sources + row)
    any_index = source
    for token in tl.static_range(TOKENS):
        any_index = tl.maximum(any_index, tl.load(destinations + token * destination_token_stride))
    if any_index >= 0:
        inside = (n < KEY_DIM)[:, None] & (p < VALUE_DIM)[None, :]
        state = tl.load(states + source * slot_stride + within, mask=inside & (source >= 0), other=0.0)
        state = state.to(tl.float32)
        tl.debug_barrier()  # below, a thread may overwrite what another thread has read above
        for token in tl.static_range(TOKENS):
            key = tl.load(k + token * k_token_stride, mask=n < KEY_DIM, other=0.0).to(tl.float32)
            query = tl.load(q + token * q_token_stride, mask=n < KEY_DIM, other=0.0).to(tl.float32)
            value = tl.load(v + token * v_token_stride, mask=p < VALUE_DIM, other=0.0).to(tl.float32)
            decay = tl.exp(tl.load(g + token * g_token_stride).to(tl.float32))
            strength = tl.load(beta + token * beta_token_stride).to(tl.float32)
            key *= tl.rsqrt(tl.sum(key * key, axis=0) + 1e-6)
            query *= tl.rsqrt(tl.sum(query * query, axis=0) + 1e-6) * (KEY_DIM**-0.5)

            state *= decay
            held = tl.sum(state * key[:, None], axis=0)
            new_value = strength * (value - held)
            state += key[:, None] * new_value[None, :]
            o = tl.sum(state * query[:, None], axis=0)
            tl.store(out + token * HEADS * VALUE_DIM, o.to(out.dtype.element_ty), mask=p < VALUE_DIM)
            destination = tl.load(destinations + token * destination_token_stride)
            if destination >= 0:
                place = states + destination * slot_stride + within
                tl.store(place, state.to(states.dtype.element_ty), mask=inside)
