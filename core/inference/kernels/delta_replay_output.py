"""The last stage of a replay of the gated delta rule: new tokens' outputs, and the state behind a full chunk.

Serves inputs of 16 bits. One launch does what the WY form's products, `delta_state_passing` and fla-core's
`chunk_fwd_o` do for a whole chunk, with their operands, roundings and orders of addition. Memory sees no
product but the outputs, and the state only as it is read, or written where the chunk is complete.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_WARPS, NUM_STAGES = 4, 2


def delta_replay_output(
    queries: Tensor,
    keys: Tensor,
    v_inputs: Tensor,
    strength: Tensor,
    log_decays: Tensor,
    inverse: Tensor,
    states: Tensor,
    slots: Tensor,
    starts: Tensor,
    lengths: Tensor,
    sources: Tensor,
    destinations: Tensor,
    tokens: int,
) -> Tensor:
    """o of each row's tokens from its chunk's keys and values, and the state at the chunk's start.

    One launch, whose grid depends on shapes alone. Does not synchronise. Padding rows write nothing.

    Args:
        queries: [rows * tokens, Hk, Dk] normalised. keys: [rows * chunk_size, Hk, Dk] normalised, zeros
            behind a row's tokens. Both contiguous, of the dtype of v_inputs.
        v_inputs: [slots, chunk_size, Hv, Dv], contiguous in each slot. Read up to each row's last token.
        strength: [rows * chunk_size, Hv] beta, contiguous.
        log_decays: [rows * chunk_size, Hv] float32, contiguous: sums of the decays' binary logarithms from
            the start of each chunk.
        inverse: [rows * chunk_size, Hv, chunk_size] contiguous, of the dtype of v_inputs: the inverse of the
            WY form's triangular system. Above the diagonal it is not read.
        states: [slots, Hv, Dk, Dv], contiguous, with any slot stride. Written at `destinations`.
        slots, starts, lengths, sources, destinations: [rows] as for `gated_delta_rule_replay`.
        tokens: T, a row's tokens with padding.

    Returns: o, [rows, T, Hv, Dv] in the dtype of v_inputs; unspecified for padding.
    """
    rows, chunk_size, heads, value_dim = slots.shape[0], *v_inputs.shape[1:]
    key_heads, key_dim = keys.shape[1:]
    out = torch.empty(rows, tokens, heads, value_dim, dtype=v_inputs.dtype, device=v_inputs.device)
    blocks = block_sizes(tokens, key_dim, value_dim)
    grid = (triton.cdiv(value_dim, blocks["BLOCK_V"]) * heads * rows,)
    delta_replay_output_kernel[grid](
        queries, keys, v_inputs, strength, log_decays, inverse, states, out,
        slots, starts, lengths, sources, destinations,
        v_inputs.stride(0), states.stride(0), key_dim**-0.5,
        tokens, heads, heads // key_heads, key_dim, value_dim, chunk_size,
        **blocks, num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    return out


def block_sizes(tokens: int, key_dim: int, value_dim: int) -> dict[str, int]:
    """Tile sizes. The number of rows has no say, so that other rows change no bits.

    Keys take two turns or more, up to 32 numbers by 16. In one turn the compiler would leave no loop, and
    then ptxas of CUDA 12.8 gives products of some sizes another variable for the address of their factor.
    """
    return {
        "BLOCK_Q": max(16, triton.next_power_of_2(tokens)),
        "BLOCK_K": 16 if key_dim <= 32 else 32,
        "BLOCK_V": max(16, min(64, triton.next_power_of_2(value_dim))),
    }


@triton.jit
def delta_replay_output_kernel(
    # Pointers
    queries, keys, v_inputs, strength, log_decays, inverse, states, out,
    slots, starts, lengths, sources, destinations,
    # Strides
    v_slot_stride: tl.int64, slot_stride: tl.int64,
    # Dimensions
    scale,
    tokens: tl.constexpr, heads: tl.constexpr, heads_of_key: tl.constexpr,
    key_dim: tl.constexpr, value_dim: tl.constexpr, chunk_size: tl.constexpr,
    # Meta-parameters
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """A program has a row, a value head and BLOCK_V of Dv. No other program touches this part of a state."""
    v_blocks: tl.constexpr = (value_dim + BLOCK_V - 1) // BLOCK_V
    key_heads: tl.constexpr = heads // heads_of_key
    operand: tl.constexpr = keys.dtype.element_ty
    head = tl.program_id(0) // v_blocks % heads
    row = (tl.program_id(0) // (v_blocks * heads)).to(tl.int64)
    p = tl.program_id(0) % v_blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    in_value = (p < value_dim)[None, :]

    slot = tl.load(slots + row)
    if slot >= 0:
        start = tl.load(starts + row) % chunk_size
        length = tl.load(lengths + row)
        source = tl.load(sources + row)
        destination = tl.load(destinations + row)
        t = tl.arange(0, chunk_size)
        chunk_token = row * chunk_size + t
        real = t < start + length
        new = tl.arange(0, BLOCK_Q)
        is_new = new < length

        decay = tl.load(log_decays + chunk_token * heads + head)
        beta = tl.load(strength + chunk_token * heads + head)
        of_pair = (chunk_token[:, None] * heads + head) * chunk_size + t[None, :]
        solved = tl.where(t[:, None] >= t[None, :], tl.load(inverse + of_pair), 0.0)
        own = v_inputs + slot * v_slot_stride + head * value_dim
        v = tl.load(
            own + t[:, None] * (heads * value_dim) + p[None, :], mask=real[:, None] & in_value, other=0.0
        )
        written = tl.dot(solved, (v * beta[:, None]).to(operand), allow_tf32=False).to(operand)

        held = tl.zeros((chunk_size, BLOCK_V), dtype=tl.float32)
        o = tl.zeros((BLOCK_Q, BLOCK_V), dtype=tl.float32)
        scores = tl.zeros((BLOCK_Q, chunk_size), dtype=tl.float32)
        of_key = head // heads_of_key * key_dim
        of_state = states + head * (key_dim * value_dim)
        key_end: tl.constexpr = max(key_dim, 2 * BLOCK_K)  # `block_sizes` says why there are two turns
        for first in range(0, key_end, BLOCK_K):
            n = first + tl.arange(0, BLOCK_K)
            in_key = (n < key_dim)[None, :]
            key = tl.load(
                keys + of_key + chunk_token[:, None] * (key_heads * key_dim) + n[None, :],
                mask=in_key,
                other=0.0,
            )
            query = tl.load(
                queries + of_key + (row * tokens + new)[:, None] * (key_heads * key_dim) + n[None, :],
                mask=is_new[:, None] & in_key,
                other=0.0,
            )
            scaled = key * beta[:, None]
            scaled = scaled * tl.exp2(decay)[:, None]
            read_key = tl.dot(solved, scaled.to(operand)).to(operand)
            state = tl.load(
                of_state + source * slot_stride + n[:, None] * value_dim + p[None, :],
                mask=(n < key_dim)[:, None] & in_value & (source >= 0),
                other=0.0,
            )
            state = state.to(tl.float32).to(operand)
            held = tl.dot(read_key, state, held)
            o = tl.dot(query, state, o)
            scores = tl.dot(query, tl.trans(key), scores)
        value = written.to(tl.float32) - held

        at = start + new
        decay_of_new = tl.load(
            log_decays + (row * chunk_size + at) * heads + head, mask=is_new & (at < chunk_size), other=0.0
        )
        o = o * tl.exp2(decay_of_new)[:, None]
        scores = scores * tl.exp2(decay_of_new[:, None] - decay[None, :])
        scores = tl.where(is_new[:, None] & (at[:, None] >= t[None, :]), scores, 0.0)
        o = o * scale + tl.dot(scores.to(operand), value.to(operand)) * scale
        of_out = ((row * tokens + new)[:, None] * heads + head) * value_dim + p[None, :]
        tl.store(out + of_out, o.to(operand), mask=is_new[:, None] & in_value)

        if destination >= 0:
            decay_of_chunk = tl.load(log_decays + (row * chunk_size + chunk_size - 1) * heads + head)
            value *= tl.exp2(decay_of_chunk - decay)[:, None]
            for first in range(0, key_dim, BLOCK_K):
                n = first + tl.arange(0, BLOCK_K)
                in_state = (n < key_dim)[:, None] & in_value
                of_part = of_state + n[:, None] * value_dim + p[None, :]
                after = tl.load(of_part + source * slot_stride, mask=in_state & (source >= 0), other=0.0)
                after = after.to(tl.float32) * tl.exp2(decay_of_chunk)
                key = tl.load(
                    keys + of_key + n[:, None] + chunk_token[None, :] * (key_heads * key_dim),
                    mask=(n < key_dim)[:, None],
                    other=0.0,
                )
                after = tl.dot(key, value.to(operand), after)
                tl.debug_barrier()  # a thread may overwrite what another thread has read
                tl.store(
                    of_part + destination * slot_stride, after.to(states.dtype.element_ty), mask=in_state
                )
